"""Naming the first bad tensor when a loss or a gradient norm isn't finite; runs on all ranks, before the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from bessemer.core.errors import NonFinite
from bessemer.core.job import Job
from bessemer.models.canonical import local
from bessemer.parallel.data import DataParallel
from bessemer.parallel.mesh import Mesh
from bessemer.train.passes import Batch, Contribution, Passes

__all__ = ["stop_non_finite"]

_LATEST = 1 << 40
"""Above any number of submodules that a forward pass runs."""


def stop_non_finite(
    job: Job, mesh: Mesh, parallel: DataParallel, passes: Passes, step: int, mine: Contribution
) -> None:
    """Raise `NonFinite` on every rank, naming the guilty rank and its first bad tensor. `step` counts from 0.

    A bad parameter explains a bad activation, which explains a bad gradient, and an activation spreads to the ranks
    that compute later; so the rank with the earliest cause is named, the lowest one among equals.
    """
    severity, order, text = _diagnose(parallel, passes, mine)
    ranks = torch.zeros(mesh.world_size, dtype=torch.int64, device=mesh.device)
    ranks[mesh.rank] = severity * _LATEST - order
    found = mesh.sum_over_world(ranks).tolist()
    guilty = found.index(max(found))
    text = mesh.broadcast_text(text, guilty)
    first, last = job.samples_before(step), job.samples_before(step + 1) - 1
    raise NonFinite(
        f"{text} (samples {first} to {last}); nothing was updated",
        fix="a lower train.lr or more train.warmup_steps, or look at these samples; what is saved is from before",
        rank=guilty,
        step=step + 1,
    )


def _diagnose(parallel: DataParallel, passes: Passes, mine: Contribution) -> tuple[int, int, str]:
    """(severity, how far into the forward pass, what is bad on this rank): 4 a parameter, 3 the forward pass,
    2 a gradient, 1 nothing here."""
    module = parallel.module
    parameter = _first_bad((n, local(p.detach())) for n, p in module.named_parameters())
    # every rank runs this, also a clean one: a forward pass may be collective
    outputs = [bad for batch in mine.batches if (bad := _first_bad_output(passes, batch))]
    if parameter is not None:
        return 4, 0, f"parameter {parameter} is not finite"
    if passes.knows_loss and float(mine.weight_sum) == 0:
        return 3, 0, "no token of this rank's samples counts towards the loss"
    if outputs:
        order, name = outputs[0]
        return 3, order, f"the output of {name} is not finite"
    kept = parallel.local_gradients()
    gradient = _first_bad((n, kept.get(p)) for n, p in module.named_parameters())
    if gradient is not None:
        return 2, 0, f"the gradient of {gradient} is not finite"
    summed = _first_bad((n, local(p.grad)) for n, p in module.named_parameters() if p.grad is not None)
    return 1, 0, f"the summed gradient of {summed} is not finite" if summed else "the summed loss is not finite"


def _first_bad(named: Iterable[tuple[str, torch.Tensor | None]]) -> str | None:
    for name, tensor in named:
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def _first_bad_output(passes: Passes, batch: Batch) -> tuple[int, str] | None:
    """Run `batch` forward again; (how many submodules of the model were done before, name) of the first one, in order
    of completion, with a non-finite output. The stages of a pipeline before its own count as done."""
    found: list[tuple[int, str]] = []
    done, stage_size = 0, _LATEST // passes.num_stages

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            nonlocal done
            tensors = output if isinstance(output, tuple) else (output,)
            if not found and any(isinstance(t, torch.Tensor) and not bool(torch.isfinite(t).all()) for t in tensors):
                found.append((passes.stage * stage_size + done, name))
            done += 1

        return hook

    handles = [part.register_forward_hook(watch(name or "the loss")) for name, part in passes.module.named_modules()]
    try:
        with torch.compiler.set_stance("force_eager"):  # a hook that watches breaks a compiled block's graph
            passes.forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
