"""The model of a job: one of `preset`, `hf` or `family`, with the job's own config.json keys on top."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bessemer.core.errors import ConfigError
from bessemer.core.hf_families import spec_from_config
from bessemer.core.job import ModelSection
from bessemer.core.model import ModelSpec
from bessemer.core.paths import user_path
from bessemer.core.presets import preset_config, without_none
from bessemer.core.problem import Problem

__all__ = ["DEFAULT_CONFIG", "read_config", "resolve_model"]

DEFAULT_CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""The model of a job that names none: a Llama of 5.8 million parameters, for a laptop and the tokenizer bpe-4096."""


def resolve_model(section: ModelSection) -> ModelSpec:
    """The `ModelSpec` of a job's [model] table. ConfigError with every problem found.

    Without `preset`, `hf` and `family` the config.json beside `weights` is taken, else `DEFAULT_CONFIG`. Further keys
    are named as in config.json; they replace those of the preset or file, and "none" stands for null.
    """
    given = [key for key in ("preset", "hf", "family") if getattr(section, key) is not None]
    if len(given) > 1:
        problem = Problem(
            code="model-source",
            where=f"model.{given[1]}",
            what=f"{' and '.join(given)} are all given"
            if len(given) > 2
            else f"both {given[0]} and {given[1]} are given",
            why="each of them describes a whole model",
            fix=f"keep one of {', '.join(given)}",
        )
        raise ConfigError([problem], "the job")
    own = without_none(section.config_keys)
    base, origin = _base(section)
    kind = own.pop("model_type", base.get("model_type"))
    if kind != base.get("model_type"):
        problem = Problem(
            code="model-key",
            where="model.model_type",
            what=f"model_type = {kind!r} would change the family of {origin}",
            why="the family is what the other keys are read by",
            fix=f'model.family = "{kind}" with all its keys',
        )
        raise ConfigError([problem], "the job")

    def place(key: str) -> str:
        if key == "model_type" and section.family is not None:
            return "model.family"
        return f"model.{key}" if key.partition(".")[0] in own or origin == "" else origin

    return spec_from_config({**base, **own}, place=place, own=own.keys(), source="the job")


def read_config(folder: str, where: str) -> dict[str, Any]:
    """The config.json of a folder (or the file itself). ConfigError, naming field `where`, when it can't be read."""
    path = user_path(folder)
    file = path if path.suffix == ".json" else path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what, fix = f"{file} doesn't exist", f"{where} = a folder that holds config.json"
    except OSError as error:
        what, fix = f"{file} can't be read: {error.strerror}", "make it readable"
    except ValueError as error:
        what, fix = f"{file} is not JSON: {error}", "mend or fetch the file again"
    else:
        if isinstance(config, dict):
            return config
        what, fix = f"{file} holds no JSON object", "mend or fetch the file again"
    why = "a Hugging Face folder describes its model in config.json"
    raise ConfigError([Problem(code="model-hf", where=where, what=what, why=why, fix=fix)], "the job")


def _base(section: ModelSection) -> tuple[dict[str, Any], str]:
    """The keys below the job's own, and the field that answers for them ("": each key for itself)."""
    if section.preset is not None:
        return preset_config(section.preset), "model.preset"
    if section.hf is not None:
        return read_config(section.hf, "model.hf"), "model.hf"
    if section.family is not None:
        return {"model_type": section.family}, ""
    if section.weights is not None:
        return read_config(section.weights, "model.weights"), "model.weights"
    return dict(DEFAULT_CONFIG), ""
