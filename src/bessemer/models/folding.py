"""Smooth-SwiGLU's scales, moved into the weights of a model that is done.

    scales = down_scales(model, run)                    # run() calls the model on what is typical for it
    state = folded_state(state, scales, torch.bfloat16)

Then what enters each down projection is at most 1 in every channel that `run` has shown, and one scale serves all.
Legend: T rows, X experts, F feed-forward width, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bessemer.core.errors import RequestError
from bessemer.models.canonical import pieces
from bessemer.models.decoder import Decoder
from bessemer.models.moe import Experts
from bessemer.models.parts import FeedForward
from bessemer.models.saving import Saving
from bessemer.precision import channel_scales, fold
from bessemer.precision.grouped import run_channels

__all__ = ["down_scales", "folded_state"]

T = TypeVar("T")


class _Latest(Saving):
    """Remembers what the latest activation function has returned."""

    activated: Tensor

    def part(self, name: str, run: Callable[..., T], *inputs: Any) -> T:
        made = run(*inputs)
        if name == "activation":
            assert isinstance(made, Tensor)
            self.activated = made
        return made


@torch.no_grad()
def down_scales(model: Decoder, run: Callable[[], None]) -> dict[str, Tensor]:
    """By the name of each gated down projection's weight the power of two at or above each channel's amax during
    run(): float32 [F], of experts [X, F]; 1 of a channel that stayed 0. The model is held whole and not quantised; its
    prediction modules, which run for gradients only, are left out."""
    seen: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    names = {piece.param: piece.name for piece in pieces(model)}
    latest, before = _Latest(), model.saving

    def largest(name: str, amax: Tensor) -> Tensor:
        seen[name] = torch.maximum(seen[name], amax) if name in seen else amax
        return seen[name]

    def hook(name: str, module: nn.Module, inputs: tuple[Any, ...], _output: Tensor) -> None:
        agree = partial(largest, name)
        routed = isinstance(module, Experts)
        scales[name] = (
            run_channels(latest.activated, inputs[1], agree) if routed else channel_scales(latest.activated, agree)
        )

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if isinstance(module, FeedForward | Experts):
                name = names[f"{path}.down.weight"]
                hooks.callback(module.register_forward_hook(partial(hook, name)).remove)
        model.saving = latest
        try:
            run()
        finally:
            model.saving = before
    return scales


def folded_state(
    state: Iterable[tuple[str, Tensor]], scales: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) with each up projection divided by its scales and each down projection multiplied by them: the
    same function, bit for bit in `dtype` too. RequestError `fold-range` where a weight would leave its range."""
    waiting: dict[str, Tensor] = {}
    for name, tensor in state:
        owner, _, kind = name.rpartition(".")
        part, _, which = owner.rpartition(".")
        scale = scales.get(f"{part}.down.weight")
        if scale is None or which not in ("up", "down") or (which, kind) == ("down", "bias"):
            yield name, tensor
        elif kind == "bias":
            yield name, _exact(name, tensor, tensor / scale, scale, dtype)
        else:
            waiting[name] = tensor
            up, down = f"{part}.up.weight", f"{part}.down.weight"
            if up in waiting and down in waiting:
                pair = waiting.pop(up), waiting.pop(down)
                folded = fold(*pair, scale)
                yield up, _exact(up, pair[0], folded[0], scale[..., None], dtype)
                yield down, _exact(down, pair[1], folded[1], 1 / scale[..., None, :], dtype)


def _exact(name: str, tensor: Tensor, folded: Tensor, back: Tensor, dtype: torch.dtype) -> Tensor:
    """`folded`, if the numbers of `dtype` that are written for it, times `back`, are those for `tensor`."""
    if not torch.equal(folded.to(dtype).float() * back, tensor.to(dtype).float()):
        what = f"{name} leaves the range of {str(dtype).removeprefix('torch.')} when it is divided by its scales"
        raise RequestError(what, code="fold-range", fix="--dtype bf16, or --dtype fp32")
    return folded
