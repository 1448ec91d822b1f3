"""The safetensors files of a Hugging Face folder, and whether they can be the weights of a model. No torch: `bessemer
check` asks before anything starts.

A file begins with the length of its header (8 bytes, little-endian) and the header, JSON: name -> dtype, shape, place.
What only the whole list of names tells, `models.hf` finds when it reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bessemer.core.errors import CheckpointError, ConfigError
from bessemer.core.hf_families import spec_from_config
from bessemer.core.model import ModelSpec
from bessemer.core.paths import user_path
from bessemer.core.problem import Problem
from bessemer.core.units import counted

__all__ = ["INDEX", "SIZE_KEYS", "header_shapes", "weight_files", "weights_problems"]

INDEX = "model.safetensors.index.json"
SIZE_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
"""The sizes of a model, and the keys of a job that give them."""

_MAX_HEADER = 100_000_000  # bytes; safetensors itself takes no longer one
_LAYER = re.compile(r"^(?:model\.layers|(?:transformer\.)?h)\.(\d+)\.")


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that the index names. CheckpointError `weights-files` where there are none."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}", code="weights-files", fix=_fix())
    if single.is_file() and not index.is_file():
        return [single]
    if not index.is_file():
        others = sorted(p.name for p in folder.glob("*.bin"))
        held = f"; it holds {others[0]}, a pickle, which is not read" if others else ""
        raise CheckpointError(
            f"{folder} has neither model.safetensors nor {INDEX}{held}", code="weights-files", fix=_fix()
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index} is not an index of shards: {error}", code="weights-files", fix=_fix()
        ) from error
    absent = sorted(str(n) for n in names if not (folder / str(n)).is_file())
    if absent:
        raise CheckpointError(
            f"{index} names files that are missing: {', '.join(absent)}",
            code="weights-files",
            fix="copy or download them again",
        )
    return [folder / n for n in sorted(names)]


def header_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a safetensors file. CheckpointError `weights-files` where it is none."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, file.stat().st_size - 8):
                raise ValueError("the file is cut short, or another format")
            header = json.loads(opened.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        if 8 + length + end != file.stat().st_size:
            raise ValueError("the file is cut short, or longer than its header says")
        return {name: tuple(int(n) for n in entry["shape"]) for name, entry in tensors.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{file} can't be read as safetensors: {error}",
            code="weights-files",
            fix="copy or download the file again",
        ) from error


def weights_problems(weights: str, spec: ModelSpec) -> Iterator[Problem]:
    """Why the folder `weights` can't fill a model of `spec`: no such files, or another family or other sizes."""
    folder = user_path(weights)
    try:
        shapes = {name: shape for file in weight_files(folder) for name, shape in header_shapes(file).items()}
    except CheckpointError as error:
        why = "the run would start from them"
        yield Problem(code=error.code, where="model.weights", what=error.message, why=why, fix=error.fix)
        return
    differ = [*_config_differences(folder, spec)] or [*_header_differences(shapes, spec)]
    if differ:
        yield Problem(
            code="weights-mismatch",
            where="model.weights",
            what=f"{folder} holds another model: {', '.join(differ)}",
            why="every tensor of the model is read from there, and none may be left over",
            fix="leave out model.preset, model.hf, model.family and the sizes: the config.json beside the weights then "
            "describes the model; or other model.weights",
        )


def _fix() -> str:
    return "model.weights = a folder that save_pretrained wrote (safetensors)"


def _config_differences(folder: Path, spec: ModelSpec) -> Iterator[str]:
    """What the config.json beside the weights says otherwise; nothing where there is none that can be read."""
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    family = config.get("model_type") if isinstance(config, dict) else None
    if family is None:
        return
    if family != spec.family:
        yield f"of the family {family}, the job's is {spec.family}"
        return
    try:
        theirs = spec_from_config(config)
    except ConfigError:
        return  # the job describes the model by itself; the headers still have to fit it
    keys = {field: key for field, key in SIZE_KEYS.items() if field != "max_positions" or spec.positions == "learned"}
    for field, key in {**keys, "tied_embeddings": "tie_word_embeddings"}.items():
        ours, other = getattr(spec, field), getattr(theirs, field)
        if ours != other:
            yield f"{key} {str(other).lower()}, the job's is {str(ours).lower()}"
    if spec.moe and theirs.moe and spec.moe.num_experts != theirs.moe.num_experts:
        yield f"{counted(theirs.moe.num_experts, 'expert')}, the job's has {spec.moe.num_experts}"


def _header_differences(shapes: dict[str, tuple[int, ...]], spec: ModelSpec) -> Iterator[str]:
    """What the embedding and the number of layers tell."""
    names = ("transformer.wte.weight", "wte.weight") if spec.family == "gpt2" else ("model.embed_tokens.weight",)
    found = next((shapes[name] for name in names if name in shapes), None)
    wanted = (spec.vocab_size, spec.hidden_size)
    if found is None:
        yield f"there is no tensor {names[0]}, as the family {spec.family} has"
        return
    if found != wanted:
        yield f"the embedding is {list(found)}, the job's {list(wanted)}"
    layers = len({match[1] for match in map(_LAYER.match, shapes) if match})
    if layers != spec.num_layers + spec.mtp_layers:
        modules = f" and {counted(spec.mtp_layers, 'prediction module')}" if spec.mtp_layers else ""
        yield f"{counted(layers, 'layer')}, the job's has {spec.num_layers}{modules}"
