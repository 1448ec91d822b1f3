"""Naming the first bad tensor when a loss or a gradient norm isn't finite; runs on all ranks, before the update.

First in the order of computing: in the forward pass the first output, or input x of a projection; in backward the
gradient that is latest in the model, since whatever lies before it is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from bessemer.core.errors import NonFinite
from bessemer.core.job import Job
from bessemer.core.model import ModelSpec
from bessemer.models.canonical import held, local, shapes
from bessemer.models.parts import Projection
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

    A bad parameter explains a bad activation, which explains a bad gradient, and what is bad spreads to the ranks that
    compute later; so the rank with the earliest cause is named, the lowest one among equals.
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
    """(severity, how far into the pass, what is bad on this rank): 4 a parameter, 3 the forward pass, 2 a gradient, 1
    the sum over ranks, or nothing here."""
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
        return 3, order, f"{name} is not finite"
    kept = parallel.local_gradients()
    gradient = _latest_bad(module, {n: kept[p] for n, p in module.named_parameters() if p in kept})
    if gradient is not None:
        return 2, gradient[0], f"the gradient of {gradient[1]} is not finite"
    summed = _latest_bad(module, {n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    if summed is None:
        return 1, _LATEST - 1, "the summed loss is not finite"
    return 1, summed[0], f"the summed gradient of {summed[1]} is not finite"


def _first_bad(named: Iterable[tuple[str, torch.Tensor | None]]) -> str | None:
    for name, tensor in named:
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def _latest_bad(module: nn.Module, gradients: Mapping[str, torch.Tensor]) -> tuple[int, str] | None:
    """(how far into the backward pass, name) of the non-finite gradient that is latest in the model."""
    spec: ModelSpec = module.spec  # type: ignore[assignment]
    order = {name: place for place, name in enumerate(reversed(list(shapes(spec))))}
    bad = [h.piece for h in held(module, gradients) if not bool(torch.isfinite(h.tensor).all())]
    if not bad:
        return None
    first = min(bad, key=lambda piece: order[piece.name])
    owner, _, kind = first.param.rpartition(".")
    if kind != "weight" or not isinstance(module.get_submodule(owner), Projection):
        return order[first.name], first.param
    return order[first.name], f"{first.param} (role grad of {first.name.removesuffix('.weight')})"


def _first_bad_output(passes: Passes, batch: Batch) -> tuple[int, str] | None:
    """Run `batch` forward again; (how many submodules of the model were done before, name) of the first one, in order
    of completion, with a non-finite output, or input if it is a projection. The stages of a pipeline before its own
    count as done."""
    found: list[tuple[int, str]] = []
    done, stage_size = 0, _LATEST // passes.num_stages

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            nonlocal done
            if not found and isinstance(module, Projection) and _bad(args):
                found.append((passes.stage * stage_size + done, f"the input of {name} (its role x)"))
            if not found and _bad(output):
                found.append((passes.stage * stage_size + done, f"the output of {name}"))
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


def _bad(values: object) -> bool:
    tensors = values if isinstance(values, tuple) else (values,)
    return any(isinstance(t, torch.Tensor) and not bool(torch.isfinite(t).all()) for t in tensors)
