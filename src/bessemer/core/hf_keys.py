"""Reading the keys of a config.json one by one, so that each is used, known to be harmless, or reported.

Every problem is collected, not only the first; a key that failed gives a placeholder so that reading goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from bessemer.core.problem import Problem, nearest

__all__ = ["HARMLESS", "REQUIRED", "KeyReader"]

T = TypeVar("T")
REQUIRED: Any = object()
"""As a default: the key must be there."""

# Bookkeeping of transformers, storage, and generation settings: none of them changes the function or its size.
_BOOKKEEPING = """
_attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures
auto_map bos_token_id chunk_size_feed_forward decoder_start_token_id dtype eos_token_id ep_size finetuning_task
gradient_checkpointing id2label label2id n_ctx name_or_path output_attentions output_hidden_states
output_router_logits pad_token_id prefix pretraining_tp problem_type quantization_config reorder_and_upcast_attn
return_dict return_dict_in_generate sep_token_id summary_activation summary_first_dropout summary_proj_to_labels
summary_type summary_use_proj task_specific_params tf_legacy_loss tokenizer_class torch_dtype torchscript
transformers_version unk_token_id unsloth_version use_bfloat16 use_cache use_return_dict bad_words_ids
begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
repetition_penalty suppress_tokens temperature top_k top_p typical_p attention_dropout attn_pdrop embd_pdrop
resid_pdrop hidden_dropout
"""
HARMLESS = frozenset(_BOOKKEEPING.split())
"""Keys of a config.json that are read over. Dropout is among them because a checkpoint's function has none: it only
says how its makers trained. In a job file all of these are errors, since they would have no effect there."""


class KeyReader:
    """Takes typed values out of a config; `place(key)` is the dotted field that a problem of that key names."""

    def __init__(
        self, config: Mapping[str, Any], place: Callable[[str], str], aliases: Mapping[str, str], table: str = "model"
    ) -> None:
        self.problems: list[Problem] = []
        self.wrong: set[str] = set()
        """Keys with a problem: what follows from their values says nothing."""
        self._place = place
        self._table = table
        self._values: dict[str, Any] = {}
        self._known: set[str] = set()
        for key, value in config.items():
            name = aliases.get(key, key)
            if name in self._values and self._values[name] != value:
                self.report(
                    "model-value", key, f"{key} and {name} differ", "they are two names of one value", f"only {name}"
                )
            self._values[name] = value

    def report(self, code: str, key: str, what: str, why: str, fix: str) -> None:
        """Adds a problem at `key`. Each "key = " of the fix is said with the table of a job in which it is typed."""
        self.wrong.add(key)
        fix = re.sub(r"(?<![\w.])(\w+)(?= = )", rf"{self._table}.\1", fix)
        self.problems.append(Problem(code=code, where=self._place(key), what=what, why=why, fix=fix))

    def integer(self, key: str, default: Any = REQUIRED, *, least: int = 1, most: int | None = None) -> int:
        """A whole number of at least `least`, at most `most`."""
        value = self._take(key, default)
        if value is REQUIRED:
            return least
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._mistyped(key, value, f"a whole number of at least {least}")
            return least
        if most is not None and value > most:
            self._mistyped(key, value, f"a whole number of at most {most}")
            return most
        return value

    def integer_or_none(
        self, key: str, default: int | None = None, *, absent: Any = None, least: int = 1
    ) -> int | None:
        """As `integer`, where null means `default`, and an absent key `absent` (None: `default` too)."""
        if self._values.get(key) is not None:
            return self.integer(key, least=least)
        self._known.add(key)
        if key in self._values or absent is None:
            return default
        if absent is REQUIRED:
            self._take(key, REQUIRED)
            return default
        return int(absent)

    def number(self, key: str, default: Any = REQUIRED, *, least: float = 0.0) -> float:
        """A finite number of at least `least`."""
        value = self._take(key, default)
        if value is REQUIRED:
            return least
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
            self._mistyped(key, value, f"a number of at least {least:g}")
            return least
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            self._mistyped(key, value, "true or false")
            return default
        return value

    def choice(self, key: str, default: str, meanings: Mapping[str, T]) -> T:
        """One of the words of `meanings`; gives what it means. Any other word changes the maths, so it is refused."""
        value = self._take(key, default)
        if not isinstance(value, str) or value not in meanings:
            known = ", ".join(f'"{m}"' for m in meanings)
            self.report(
                "model-unsupported",
                key,
                f"{key} = {value!r} is not something that Bessemer computes",
                "it would change the function, so it can't be ignored",
                f"{key} = {known}",
            )
            return next(iter(meanings.values()))
        return meanings[value]

    def only(self, key: str, *allowed: object) -> None:
        """Refuses every value but `allowed`; an absent or null key is fine."""
        value = self._take(key, None)
        if value is None or any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            return
        self.report(
            "model-unsupported",
            key,
            f"{key} = {value!r} is not supported",
            "it would change the function, so it can't be ignored",
            f"{key} = " + " or ".join(str(a).lower() if isinstance(a, bool) else repr(a) for a in allowed),
        )

    def table(self, key: str) -> dict[str, Any] | None:
        """A table of its own, or None."""
        value = self._take(key, None)
        if value is not None and not isinstance(value, Mapping):
            self._mistyped(key, value, "a table")
            return None
        return None if value is None else dict(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers from 0; absent or null: empty."""
        value = self._take(key, None)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            self._mistyped(key, value, "a list of whole numbers")
            return ()
        return tuple(value)

    def words(self, key: str, allowed: Collection[str], count: int) -> tuple[str, ...] | None:
        """A list of exactly `count` words out of `allowed`; None when absent."""
        value = self._take(key, None)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != count or any(v not in allowed for v in value):
            self._mistyped(key, value, f"a list of {count} words out of {', '.join(allowed)}")
            return None
        return tuple(value)

    def ignore(self, *keys: str) -> None:
        """Marks keys as known to mean nothing beside the others."""
        self._known.update(keys)

    def given(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def part(self, table: str, values: Mapping[str, Any]) -> KeyReader:
        """A reader of the values inside `table`, which names its keys `table.key` and reports here."""
        inner = KeyReader(values, lambda key: self._place(f"{table}.{key}"), {}, f"{self._table}.{table}")
        inner.problems = self.problems
        return inner

    def finish(self, harmless: Collection[str], own: Collection[str]) -> None:
        """Reports every key that nothing has asked for. Keys in `own` come from a job: there nothing is harmless."""
        for key, value in self._values.items():
            if key in self._known or (key in harmless and key not in own) or (value is None and key not in own):
                continue
            near = nearest(key, self._known)
            why = "a key that isn't understood may change the function"
            fix = f"did you mean {near[0]}?" if near else f"remove it; known here: {', '.join(sorted(self._known))}"
            if key in harmless:
                why = "it says nothing about the function of the model; training and storage have their own sections"
                fix = f"remove {key}"
            self.report("model-key", key, f"{key} has no meaning here", why, fix)

    def _take(self, key: str, default: Any) -> Any:
        self._known.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            why = "the size of the model follows from it, so there is no default"
            self.report("model-missing", key, f"{key} is missing", why, f"{key} = N")
        return default

    def _mistyped(self, key: str, value: object, wanted: str) -> None:
        self.report("model-value", key, f"{key} = {value!r} is not {wanted}", "", f"{key} = {wanted}")
