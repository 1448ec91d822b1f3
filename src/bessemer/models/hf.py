"""Hugging Face checkpoints: read into a model, written from its logical tensors.

Reading consumes every tensor of the files exactly once, or raises one error that lists all that don't fit. Both ways
go tensor by tensor: memory is one tensor (reading; of experts the stacks of a layer) or one shard (writing), not one
model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bessemer.core.errors import CheckpointError, RequestError
from bessemer.core.hf_config import config_from_spec
from bessemer.core.model import ModelSpec
from bessemer.core.paths import user_path
from bessemer.models.canonical import load_state
from bessemer.models.hf_names import HEADS, HfTensor, copies, hf_tensors, is_buffer, is_full_precision, normal_name
from bessemer.models.weight_files import INDEX, weight_files

__all__ = ["export_hf", "import_hf", "read_hf"]

_TYPES = {"F32", "BF16", "F16", "F64"}
_TYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def import_hf(model: nn.Module, folder: str | Path) -> None:
    """Fills an unsharded `Decoder` from a Hugging Face folder (model.safetensors, or shards with their index).

    Sources in float32, bfloat16 or float16 are widened to the parameters' type. CheckpointError `weights-files` if
    the files can't be read, `weights-mismatch` with every missing, unexpected or wrongly shaped tensor.
    """
    load_state(model, read_hf(model.spec, folder))


def read_hf(spec: ModelSpec, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, tensor) of every logical tensor, in the files' types; all checks come before the first."""
    folder = user_path(folder)
    wanted = {t.name: t for t in hf_tensors(spec)}
    stored = _stored(spec, folder)
    _check(spec, folder, wanted, stored)
    return _read(spec, wanted, stored)


@dataclass(frozen=True)
class _Stored:
    file: Path
    key: str  # in that file
    shape: tuple[int, ...]
    type: str


def _stored(spec: ModelSpec, folder: Path) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    view = opened.get_slice(key)
                    name = normal_name(spec, key)
                    if name in found:
                        raise CheckpointError(
                            f"{key} is in {found[name].file.name} and in {file.name}", code="weights-files"
                        )
                    found[name] = _Stored(file, key, tuple(view.get_shape()), view.get_dtype())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} can't be read as safetensors: {error}",
                code="weights-files",
                fix="copy or download the file again",
            ) from error
    return {name: s for name, s in found.items() if not is_buffer(name)}


def _check(spec: ModelSpec, folder: Path, wanted: dict[str, HfTensor], stored: dict[str, _Stored]) -> None:
    repeats = _repeats(spec)
    wrong = [f"missing     {name} {t.shape}" for name, t in wanted.items() if name not in stored]
    for name, found in stored.items():
        if name in wanted and found.shape != wanted[name].shape:
            wrong.append(f"shape       {name} is {found.shape}, the model wants {wanted[name].shape}")
        elif name not in wanted and name not in repeats:
            wrong.append(f"unexpected  {name} {found.shape}")
        elif found.type not in _TYPES:
            wrong.append(f"type        {name} is {found.type}; fp32, bf16 and fp16 are read")
    modules = tuple(f"model.layers.{spec.num_layers + i}." for i in range(spec.mtp_layers))
    if modules and not any(name.startswith(modules) for name in stored):
        fix = "model.num_nextn_predict_layers = 0: the file was written without its prediction modules"
    else:
        fix = "compare config.json with the file that the weights came with"
    if wrong:
        raise CheckpointError(
            f"{folder} doesn't hold the model that its config describes ({len(wrong)} differences):\n  "
            + "\n  ".join(wrong),
            code="weights-mismatch",
            fix=fix,
        )


def _read(spec: ModelSpec, wanted: dict[str, HfTensor], stored: dict[str, _Stored]) -> Iterator[tuple[str, Tensor]]:
    for repeat, original in _repeats(spec).items():
        if repeat in stored:
            _check_repeat(stored, repeat, original)
    left = Counter(t.parts[0] for t in wanted.values() if t.expert is not None)
    stacks: dict[str, Tensor] = {}
    for file in sorted({s.file for s in stored.values()}):
        with safe_open(file, "pt") as opened:
            for name in (n for n, s in stored.items() if s.file == file and n in wanted):
                want, tensor = wanted[name], opened.get_tensor(stored[name].key)
                if want.expert is None:
                    rows = tensor.t() if want.transposed else tensor
                    yield from zip(want.parts, rows.split(want.rows), strict=True)
                    continue
                part = want.parts[0]
                if part not in stacks:
                    stacks[part] = tensor.new_empty(left[part], *want.shape)
                stacks[part][want.expert] = tensor
                left[part] -= 1
                if not left[part]:
                    yield part, stacks.pop(part)


def _repeats(spec: ModelSpec) -> dict[str, str]:
    """Tensors that some writers store a second time, and the first: the head of a tied model, and what prediction
    modules share with it."""
    embedding = next(t.name for t in hf_tensors(spec) if t.parts == ("embed.weight",))
    return copies(spec) | ({HEADS: embedding} if spec.tied_embeddings else {})


def _check_repeat(stored: dict[str, _Stored], repeat: str, original: str) -> None:
    """It must then be the same, else the tie is wrong."""
    tables = []
    for name in (repeat, original):
        with safe_open(stored[name].file, "pt") as opened:
            tables.append(opened.get_tensor(stored[name].key))
    if tables[0].shape != tables[1].shape or not torch.equal(*tables):
        tied = repeat == HEADS
        raise CheckpointError(
            f"{repeat} differs from the embedding, but the config ties them"
            if tied
            else f"{repeat} differs from {original}, which a prediction module shares with the model",
            code="weights-mismatch",
            fix="model.tie_word_embeddings = false" if tied else "model.num_nextn_predict_layers = 0",
        )


def export_hf(
    spec: ModelSpec,
    state: Iterable[tuple[str, Tensor]],
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer_json: str | None = None,
    eos_token: str | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that `transformers` loads: config, generation config, weights and the tokenizer if given.

    state: (canonical name, tensor), each logical tensor once, in any order. Weights above `shard_bytes` are cut into
    files with an index. eos_token: the text that ends a document; default: the first special token of the tokenizer.
    The folder must not exist; it is written aside and renamed, so that it is never seen half-written.
    """
    folder = Path(folder)
    if folder.exists():
        raise RequestError(f"{folder} exists already", code="exists", fix="name another folder, or remove this one")
    if dtype not in _TYPE_NAMES:
        raise RequestError(f"weights can't be written in {dtype}", code="export-type", fix="fp32, bf16 or fp16")
    tensors = hf_tensors(spec)
    repeated: dict[str, list[str]] = {}
    for repeat, original in copies(spec).items():
        repeated.setdefault(original, []).append(repeat)
    gathered = (
        (name, tensor) for first, tensor in _gather(tensors, state) for name in (first, *repeated.get(first, ()))
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    aside.mkdir()
    try:
        _write_weights(gathered, aside, dtype, shard_bytes)
        _write_texts(spec, aside, dtype, tokenizer_json, eos_token)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _gather(tensors: list[HfTensor], state: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Puts logical tensors together as the files hold them; each file tensor leaves when its last part came."""
    home = {part: tensor for tensor in tensors for part in tensor.parts}
    stacks = Counter(tensor.parts[0] for tensor in tensors if tensor.expert is not None)
    names = {(tensor.parts[0], tensor.expert): tensor.name for tensor in tensors if tensor.expert is not None}
    waiting: dict[str, dict[str, Tensor]] = {}
    done: set[str] = set()
    wrong = []
    for name, value in state:
        if name not in home or name in done:
            wrong.append(f"{name} {'comes twice' if name in done else 'is unexpected'}")
            continue
        done.add(name)
        target = home[name]
        if name in stacks:
            if tuple(value.shape) != (stacks[name], *target.shape):
                wrong.append(f"{name} is {tuple(value.shape)}, the model wants {(stacks[name], *target.shape)}")
                continue
            yield from ((names[name, expert], matrix) for expert, matrix in enumerate(value.detach()))
            continue
        parts = waiting.setdefault(target.name, {})
        parts[name] = value.detach()
        if len(parts) == len(target.parts):
            del waiting[target.name]
            joined = value.detach() if len(parts) == 1 else torch.cat([parts[p] for p in target.parts])
            out = joined.t() if target.transposed else joined
            if tuple(out.shape) != target.shape:
                wrong.append(f"{name} makes {target.name} {tuple(out.shape)}, the model wants {target.shape}")
            yield target.name, out
    wrong += [f"{name} is missing" for name in home if name not in done]
    if wrong:
        raise CheckpointError("the state doesn't fit the model:\n  " + "\n  ".join(wrong), code="weights-mismatch")


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        shards.append(list(pending))
        save_file(pending, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        pending.clear()

    for name, tensor in tensors:
        value = tensor.to("cpu", torch.float32 if is_full_precision(name) else dtype).contiguous()
        if pending and size + value.nbytes > shard_bytes:
            flush()
            size = 0
        pending[name] = value.clone() if value.data_ptr() == tensor.data_ptr() else value
        size += value.nbytes
        total += value.nbytes
    flush()
    if len(shards) == 1:
        os.replace(folder / "part-1", folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        os.replace(folder / f"part-{number}", folder / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_texts(
    spec: ModelSpec, folder: Path, dtype: torch.dtype, tokenizer_json: str | None, eos_token: str | None
) -> None:
    config = config_from_spec(spec) | {"dtype": _TYPE_NAMES[dtype], "use_cache": True}
    generation: dict[str, Any] = {"_from_model_config": True}
    ids = {"bos_token_id": None, "eos_token_id": None}
    if tokenizer_json is not None:
        ids, tokens = _end_token(tokenizer_json, eos_token)
        (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.max_positions}
        _write_json(folder / "tokenizer_config.json", described | tokens)
    _write_json(folder / "config.json", config | ids)
    _write_json(folder / "generation_config.json", generation | {k: v for k, v in ids.items() if v is not None})


def _end_token(tokenizer_json: str, eos_token: str | None) -> tuple[dict[str, int | None], dict[str, str]]:
    """Token ids for the configs and token texts for the tokenizer's: one token ends and starts documents."""
    special = [t for t in json.loads(tokenizer_json).get("added_tokens") or [] if t.get("special")]
    named = [t for t in special if eos_token is None or t["content"] == eos_token]
    if eos_token is not None and not named:
        raise RequestError(f"the tokenizer has no special token {eos_token!r}", code="export-eos")
    if not named:
        return {"bos_token_id": None, "eos_token_id": None}, {}
    text, number = named[0]["content"], named[0]["id"]
    return {"bos_token_id": number, "eos_token_id": number}, {"bos_token": text, "eos_token": text}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
