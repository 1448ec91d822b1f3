"""The tensors of a dump: which of them fit, what each of them is, and an operator that can be called again.

    bag = Bag(limit_bytes=256_000_000)
    operator = packed_call(call, bag)           # most important first
    bag.add("batch.tokens_BS", tokens_BS)
    write_dump(folder, {"kind": "non-finite", "operator": operator, ...}, bag)

    record, tensors = read_dump(path)
    Operator(record["operator"], tensors).run()

safetensors and JSON; nothing is pickled. A tensor that doesn't fit, or can't be read from its device any more, is
described all the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bessemer.core.errors import RequestError
from bessemer.runtime.bad_element import Element
from bessemer.runtime.dump_folder import RECORD, TENSORS, as_json, read_record
from bessemer.runtime.first_bad import Call, ParameterView, bad_elements, tensors_in

__all__ = ["Bag", "Operator", "packed_call", "read_dump", "without_texts", "write_dump"]

_KINDS = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "memory_format"}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


class Bag:
    """Tensors for one dump, up to `limit_bytes`. redact: whole numbers are replaced by zeros, since they may be token
    ids; floating-point values stay, although activations also tell of the data that they come from."""

    def __init__(self, limit_bytes: float, *, redact: bool = False) -> None:
        self.redact = redact
        self.kept: dict[str, Tensor] = {}
        self.described: dict[str, dict[str, Any]] = {}
        self.room = limit_bytes

    def add(self, name: str, tensor: Tensor) -> bool:
        """Keep a copy if there is room; whether it is kept as it was."""
        told: dict[str, Any] = {"shape": list(tensor.shape), "dtype": _word(tensor.dtype)}
        self.described[name] = told
        size = tensor.numel() * tensor.itemsize
        try:
            told |= _figures(tensor)
            if size > self.room:
                told |= {"kept": False, "why": f"{size} bytes, more than were left"}
                return False
            copy = tensor.detach().to("cpu", copy=True).contiguous()
        except RuntimeError as error:  # after a failed kernel a device may give nothing back
            told |= {"kept": False, "why": f"can't be read: {str(error).splitlines()[0]}"}
            return False
        self.room -= size
        hidden = self.redact and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        self.kept[name] = torch.zeros_like(copy) if hidden else copy
        told["kept"] = True
        if hidden:
            told["redacted"] = True
        return not hidden

    def whole(self, names: list[str]) -> bool:
        """Whether all of these are kept as they were."""
        return all(self.described[n].get("kept") and not self.described[n].get("redacted") for n in names)


def _figures(tensor: Tensor) -> dict[str, Any]:
    """Of a floating-point tensor, how many elements are bad, the first of them, and the largest of the others."""
    if not tensor.is_floating_point() or not tensor.numel():
        return {}
    wide, bad = tensor.detach().float(), bad_elements(tensor)
    count = int(bad.sum())
    told: dict[str, Any] = {"largest": float(torch.where(bad, 0.0, wide).abs().max())}
    if count:
        at = torch.unravel_index(bad.flatten().int().argmax(), tensor.shape)
        told |= {"nan": int(wide.isnan().sum()), "infinite": int(wide.isinf().sum()), "first_bad": [int(i) for i in at]}
    return told


def without_texts(text: str) -> str:
    """An error's words with what stands in quotes replaced: it may be a piece of the data."""
    return _QUOTED.sub("'[redacted]'", text)


def packed_call(call: Call, bag: Bag) -> dict[str, Any]:
    """An operator's call as JSON; its tensors go into the bag as in.NAME and out.N."""
    for name, tensor in call.tensors.items():
        bag.add(f"in.{name}", tensor)
    for number, tensor in enumerate(call.outputs):
        bag.add(f"out.{number}", tensor)
    inputs = [f"in.{name}" for name in call.tensors]
    func = _operator(call.operator)
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return {
        "name": call.operator,
        "arguments": {name: _packed(name, value) for name, value in arguments.items()},
        "inputs": list(call.tensors),
        "outputs": len(call.outputs),
        "module": call.module,
        "backward": call.backward,
        "stack": call.stack,
        "repeats": call.repeats,
        "arrives": call.arrives,
        "whole": bag.whole(inputs),
        "parameters": {n: vars(view) for n, view in call.parameters.items()},
    }


def _packed(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": name}
    if isinstance(value, list | tuple):
        return {"list": [_packed(f"{name}.{i}", item) for i, item in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    for kind, word in _KINDS.items():
        if isinstance(value, kind):
            return {word: _word(value)}
    return value if value is None or isinstance(value, bool | int | float | str) else {"unknown": type(value).__name__}


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.")


class Operator:
    """A dumped call, to be made again on the CPU."""

    def __init__(self, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.record = record
        self.name = str(record["name"])
        self.inputs = {n: tensors[f"in.{n}"] for n in record["inputs"] if f"in.{n}" in tensors}
        self.outputs = {f"out.{i}": tensors[f"out.{i}"] for i in range(record["outputs"]) if f"out.{i}" in tensors}

    @property
    def can_run(self) -> bool:
        """Whether all that it was given is here."""
        unknown = '"unknown"' in as_json(dict(self.record["arguments"]))
        return len(self.inputs) == len(self.record["inputs"]) and not unknown

    def parameter(self, name: str) -> ParameterView | None:
        """What an input is, where it is a parameter."""
        view = self.record["parameters"].get(name)
        return None if view is None else ParameterView(
            view["name"], tuple(view["shape"]), tuple(view["stride"]), view["offset"]
        )  # fmt: skip

    def bad_argument(self) -> Element | None:
        """A number among the arguments that isn't finite."""
        for name, value in self.record["arguments"].items():
            if isinstance(value, dict) and "float" in value:
                return Element(name, (), float(value["float"]))
        return None

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        """Its outputs, and what it writes to, in the order of the dump."""
        func = _operator(self.name)
        given = {n: t.clone() for n, t in (self.inputs if inputs is None else inputs).items()}
        known = {n: _unpacked(value, given) for n, value in self.record["arguments"].items()}
        positional = [known.pop(a.name) for a in func._schema.arguments if not a.kwarg_only and a.name in known]
        result = func(*positional, **known)
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return [*tensors_in(result), *(t for n, t in given.items() if n.partition(".")[0] in written)]


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "list":
        return [_unpacked(item, tensors) for item in held]
    if kind == "float":
        return float(held)
    return torch.device("cpu") if kind == "device" else getattr(torch, held)


def _operator(name: str) -> Any:
    """RequestError for one that this torch hasn't got."""
    space, packet, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), packet), overload)
    except AttributeError as error:
        raise RequestError(
            f"this torch {torch.__version__} has no operator {name}",
            code="dump-unreadable",
            fix="replay with the torch that dump.json names under versions",
        ) from error


def write_dump(folder: Path, record: Mapping[str, Any], bag: Bag) -> None:
    """Fill an empty folder. OSError where there is no room."""
    if bag.kept:
        try:
            save_file(bag.kept, folder / TENSORS)
        except Exception as error:  # safetensors has an exception of its own for what the disk says
            raise OSError(f"{folder / TENSORS}: {error}") from error
    (folder / RECORD).write_text(as_json({**record, "tensors": bag.described}), encoding="utf-8")


def read_dump(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(the record, the tensors that were kept). RequestError where `path` is no dump."""
    record = read_record(path)
    file = path / TENSORS
    if not file.exists() and not any(t.get("kept") for t in record["tensors"].values()):
        return record, {}
    try:
        return record, load_file(file)
    except Exception as error:
        raise RequestError(
            f"{file} can't be read: {error}", code="dump-unreadable", fix="copy the dump again, with both its files"
        ) from error
