"""Naming the first bad tensor when a loss or a gradient norm isn't finite, and the operator that made it; runs on all
ranks, before the update.

First in the order of computing: in the forward pass the first output, or input x of a projection; in backward the
gradient that is latest in the model, since whatever lies before it is made of it. The operator is found by running the
passes again and watching every one. What doesn't come again was not the data's or the code's doing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bessemer import ops
from bessemer.core.errors import NonFinite
from bessemer.core.job import Job
from bessemer.core.model import ModelSpec
from bessemer.keep.slices import Slice
from bessemer.models.canonical import held, local, shapes
from bessemer.models.parts import Projection
from bessemer.parallel.data import DataParallel
from bessemer.parallel.mesh import Mesh
from bessemer.runtime.first_bad import Call, FirstBad
from bessemer.train.dumps import Fault
from bessemer.train.passes import Batch, Contribution, Passes
from bessemer.train.state import FALL_BACK_PREFIX, HISTORY_PREFIX

__all__ = ["refuse_non_finite_state", "stop_non_finite"]

_LATEST = 1 << 40
_PIECE = 1 << 24
"""Numbers looked at together: of a whole embedding the answers would fill a tight GPU."""
"""Above any number of submodules that a forward pass runs."""
PARAMETER, FORWARD, GRADIENT, SUM = 4, 3, 2, 1
_NOT_AGAIN = ", and no pass gives a bad value when it is run again"


@dataclass(frozen=True)
class _Finding:
    """What is bad on a rank. severity: PARAMETER, FORWARD, GRADIENT, SUM (over ranks, or nothing here); order: how far
    into the pass; micro: the first micro-batch that shows it; bad: the tensors, by name."""

    severity: int
    order: int
    text: str
    micro: int | None = None
    bad: Mapping[str, Tensor] | None = None


def stop_non_finite(
    job: Job, mesh: Mesh, parallel: DataParallel, passes: Passes, step: int, mine: Contribution
) -> None:
    """Raise `NonFinite` on every rank, naming the guilty rank and its first bad tensor. `step` counts from 0.

    A bad parameter explains a bad activation, which explains a bad gradient, and what is bad spreads to the ranks that
    compute later; so the rank with the earliest cause is named, the lowest one among equals. That rank keeps what it
    saw for a replay, where the job has dumps.
    """
    finding = _diagnose(parallel, passes, mine)
    scores = _scores(mesh, finding.severity * _LATEST - finding.order)
    guilty, severity = _elected(scores)
    text, where = finding.text, ""
    if severity == PARAMETER:
        text += _in_other_copies(mesh, scores, guilty)
    call: Call | None = None
    again: dict[str, bool] = {}
    if severity < PARAMETER:
        call, micro, again = _watched(passes, mesh, mine.batches, guilty, backward=severity < FORWARD)
        if severity == SUM:  # of sharded gradients only the sum is left: who made it shows only now
            guilty, _ = _elected(_scores(mesh, int(call is not None and not call.arrives)))
        text += _made_by(call) if call is not None or severity >= FORWARD or not mine.batches else _NOT_AGAIN
        finding = _Finding(severity, 0, text, micro if finding.micro is None else finding.micro, finding.bad)
    known = severity > SUM or call is not None  # else no rank is to blame, and a dump would blame this one
    if mesh.rank == guilty and passes.dumps is not None and known:
        places = range(len(mine.batches)) if finding.micro is None else (finding.micro,)
        batches = {} if severity == PARAMETER else {at: mine.batches[at] for at in places}
        fault = Fault(step, text, call, batches, dict(finding.bad or {}), again)
        where = passes.dumps.non_finite(passes, fault)
    text, where = mesh.broadcast_text(text, guilty), mesh.broadcast_text(where, guilty)
    first, last = job.samples_before(step), job.samples_before(step + 1) - 1
    fix = "a lower train.lr or more train.warmup_steps, or look at these samples; what is saved is from before"
    raise NonFinite(
        f"{text} (samples {first} to {last}); nothing was updated",
        fix=fix + (f"; `bessemer landing --replay {where}` runs it again" if where else ""),
        rank=guilty,
        step=step + 1,
    )


def _scores(mesh: Mesh, score: int) -> list[int]:
    """Those of all ranks, by rank."""
    ranks = torch.zeros(mesh.world_size, dtype=torch.int64, device=mesh.device)
    ranks[mesh.rank] = score
    return mesh.sum_over_world(ranks).tolist()


def _elected(scores: list[int]) -> tuple[int, int]:
    """(the lowest rank with the highest score, its severity if scores are those of findings)."""
    return scores.index(max(scores)), -(-max(scores) // _LATEST)


def _in_other_copies(mesh: Mesh, scores: list[int], guilty: int) -> str:
    """What the ranks that hold the same parameters have of them: the same, unless memory or an update went wrong."""
    block = mesh.world_size // mesh.sizes["replica"]
    copies = scores[guilty % block :: block]
    good = sum(-(-score // _LATEST) < PARAMETER for score in copies)
    return f", but finite in {good} of {len(copies)} copies" if good else ""


def refuse_non_finite_state(mesh: Mesh, slices: Iterable[Slice], step: int) -> None:
    """Raise `NonFinite` on every rank if a slice of parameters or moments, as they stand after `step` steps, isn't
    finite on any: a checkpoint of it could be the one for which a sound one goes."""
    bad = _first_bad((s.name, s.tensor) for s in slices if not s.name.startswith((HISTORY_PREFIX, FALL_BACK_PREFIX)))
    ranks = torch.zeros(mesh.world_size, dtype=torch.int64, device=mesh.device)
    ranks[mesh.rank] = int(bad is not None)
    found = mesh.sum_over_world(ranks).tolist()
    if any(found):
        guilty = found.index(1)
        raise NonFinite(
            f"{mesh.broadcast_text(bad or '', guilty)} is not finite after step {step}, which is not saved",
            fix="the same command goes on from an earlier step; if it comes again at another step, test this host",
            rank=guilty,
            step=step,
        )


def _diagnose(parallel: DataParallel, passes: Passes, mine: Contribution) -> _Finding:
    """What is bad on this rank, the earliest cause of it."""
    module = parallel.module
    named = dict(module.named_parameters())
    parameter = _first_bad((n, local(p.detach())) for n, p in named.items())
    # every rank runs this, also a clean one: a forward pass may be collective
    outputs = [(at, *bad) for at, batch in enumerate(mine.batches) if (bad := _first_bad_output(passes, batch))]
    if parameter is not None:
        shown = {f"weight.{parameter}": local(named[parameter].detach())}
        return _Finding(PARAMETER, 0, f"parameter {parameter} is not finite", bad=shown)
    if passes.knows_loss and float(mine.weight_sum) == 0:
        return _Finding(FORWARD, 0, "no token of this rank's samples counts towards the loss")
    if outputs:
        at, order, name = outputs[0]
        return _Finding(FORWARD, order, f"{name} is not finite", at)
    if mine.bad_units:
        return _Finding(GRADIENT, 0, f"what this rank gave of unit {mine.bad_units[0]} is not finite")
    kept = parallel.local_gradients() if mine.bad_units is None else {}
    local_bad = _latest_bad(module, {n: kept[p] for n, p in named.items() if p in kept})
    if local_bad is not None:
        order, name, param = local_bad
        shown = {f"gradient.{param}": kept[named[param]].clone()}
        return _Finding(GRADIENT, order, f"the gradient of {name} is not finite", bad=shown)
    summed = _latest_bad(module, {n: p.grad for n, p in named.items() if p.grad is not None})
    if summed is None:
        return _Finding(SUM, _LATEST - 1, "the summed loss is not finite")
    order, name, param = summed
    grad = named[param].grad
    assert grad is not None
    shown = {f"gradient.{param}": local(grad).clone()}
    return _Finding(SUM, order, f"the summed gradient of {name} is not finite", bad=shown)


def _watched(
    passes: Passes, mesh: Mesh, batches: list[Batch], guilty: int, *, backward: bool
) -> tuple[Call | None, int | None, dict[str, bool]]:
    """(what made the bad value here, in which micro-batch, whether it came again by the kind of operators). With the
    reference operators, which torch dispatches and so are seen; where they show nothing, with those of the run."""
    again: dict[str, bool] = {}
    for kind in ("reference", "native"):
        call, micro = _rerun(passes, batches, kind, backward=backward)
        again[kind] = call is not None
        seen = torch.zeros(mesh.world_size, dtype=torch.int64, device=mesh.device)
        seen[mesh.rank] = call is not None
        ranks = mesh.sum_over_world(seen).tolist()
        if ranks[guilty] or (backward and any(ranks)):
            break
    return call, micro, again


def _rerun(passes: Passes, batches: list[Batch], kind: str, *, backward: bool) -> tuple[Call | None, int | None]:
    """Run all units again, as every rank of the replica does, and watch until a bad value is found."""
    found: tuple[Call | None, int | None] = None, None
    each = passes.unit_micro_batches if backward else 1
    reference = ops.use("reference") if kind == "reference" else nullcontext()
    with reference, torch.compiler.set_stance("force_eager"):
        for first in range(0, len(batches), each):
            with FirstBad(passes.module) if found[0] is None else nullcontext() as watch:
                if backward:
                    passes.again(batches[first : first + each])
                else:
                    passes.key_draws(batches[first])
                    passes.forward(batches[first])
            if watch is not None and watch.culprit is not None:
                found = watch.culprit, first
    return found


def _made_by(call: Call | None) -> str:
    """The end of the sentence: who made it."""
    if call is None:
        return ""
    where = (f" of {call.module}" if call.module else "") + (", backward" if call.backward else "")
    if call.arrives:
        return f", made by a native kernel before {call.operator}{where}"
    return f", made by {call.operator}{where}"


def _first_bad(named: Iterable[tuple[str, torch.Tensor | None]]) -> str | None:
    for name, tensor in named:
        if tensor is not None and not _is_finite(tensor.reshape(-1)):
            return name
    return None


def _is_finite(flat: torch.Tensor) -> bool:
    return all(bool(flat[at : at + _PIECE].isfinite().all()) for at in range(0, flat.numel(), _PIECE))


def _latest_bad(module: nn.Module, gradients: Mapping[str, torch.Tensor]) -> tuple[int, str, str] | None:
    """(how far into the backward pass, name, parameter) of the non-finite gradient that is latest in the model."""
    spec: ModelSpec = module.spec  # type: ignore[assignment]
    order = {name: place for place, name in enumerate(reversed(list(shapes(spec))))}
    bad = [h.piece for h in held(module, gradients) if not bool(torch.isfinite(h.tensor).all())]
    if not bad:
        return None
    first = min(bad, key=lambda piece: order[piece.name])
    owner, _, kind = first.param.rpartition(".")
    if kind != "weight" or not isinstance(module.get_submodule(owner), Projection):
        return order[first.name], first.param, first.param
    return order[first.name], f"{first.param} (role grad of {first.name.removesuffix('.weight')})", first.param


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
