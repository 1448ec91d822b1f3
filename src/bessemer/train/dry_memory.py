"""Bytes that one rank of a job holds, counted on tensors without data.

State is counted on the parameters and moments that the rank would have. Activations are counted by running a
micro-batch through each stage on the meta device: what is alive between its passes, and the most that is alive during
them. The rank's own program of passes and transfers then says how much of that meets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bessemer.core.job import Job
from bessemer.models.canonical import local, pieces
from bessemer.models.decoder import Decoder
from bessemer.ops.deferred import put_off_weight_gradients
from bessemer.parallel.mesh import Mesh
from bessemer.parallel.program import Step
from bessemer.runtime.allocations import AllocationSample
from bessemer.train.optim import Optimizer

__all__ = ["StageBytes", "peak_bytes", "scattered_bytes", "stage_bytes", "state_bytes"]


def state_bytes(job: Job, module: Decoder, mesh: Mesh) -> dict[str, int]:
    """Bytes by line of what a rank holds for the whole run; `module` is sharded and may be on the meta device.

    weights, optimizer: this rank's share.  gradients: with the copy that is summed over other ranks, and whole ones
    where FSDP scatters them only at the end of a step.  gathered: what FSDP holds whole of other ranks' shares.
    """
    params = dict(module.named_parameters())
    trained = {name: p for name, p in params.items() if p.requires_grad}
    experts = {piece.param for piece in pieces(module) if piece.expert}
    summed = 0
    for name, param in trained.items():
        group = mesh.group("expert_data" if name in experts else "data")
        if not isinstance(param, DTensor) and (group is not None or mesh.group("replica") is not None):
            summed += param.nbytes
    whole = 0
    if _gradients_stay_whole(job, mesh):
        whole = sum(p.nbytes for p in trained.values() if isinstance(p, DTensor))
    return {
        "weights": _local_bytes(params.values()),
        "gradients": _local_bytes(trained.values()) + summed + whole,
        "optimizer": _local_bytes(Optimizer(module, job, mesh).kept()),
        "gathered": _gathered_bytes(module, job.layout.dp_shard),
    }


def _gradients_stay_whole(job: Job, mesh: Mesh) -> bool:
    """Whether FSDP adds up several backward passes before it scatters (`parallel/data.py`)."""
    if mesh.sizes["pp"] > 1:
        return True
    several = job.train.global_batch > job.unit * job.replicas
    return several and job.layout.dp_shard == "optimizer"


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def _gathered_bytes(module: Decoder, kind: str) -> int:
    """Of all blocks; if they are dropped after use, of the embedding and head, which stay for a whole pass, of the
    largest block and of the next one on its way."""
    if not isinstance(module, FSDPModule):
        return 0
    blocks = [_sharded_bytes(block) for block in (*module.blocks.values(), *module.mtp)]
    root = _sharded_bytes(module) - sum(blocks)
    return root + sum(blocks if kind != "full" else sorted(blocks)[-2:])


def scattered_bytes(job: Job, module: Decoder, mesh: Mesh) -> int:
    """What FSDP needs for a moment where it scatters a block's gradients after its backward pass: whole ones, and the
    copy that it sends."""
    if not isinstance(module, FSDPModule) or _gradients_stay_whole(job, mesh):
        return 0
    return 2 * max(_sharded_bytes(block) for block in (*module.blocks.values(), *module.mtp))


def _sharded_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters() if isinstance(p, DTensor))


@dataclass(frozen=True)
class StageBytes:
    """One micro-batch in one stage. `held`: alive from its forward to its backward pass, the input among it; `waiting`:
    from the backward pass of inputs to that of weights, where they are apart. `during`: by pass the most of it that is
    alive. `takes`, `gives`: the stream that comes in and that goes out; gradients of both come back."""

    held: int
    waiting: int
    during: Mapping[str, int]
    takes: int
    gives: int


def stage_bytes(module: Decoder, layers: range, tokens_BS: Tensor, *, split_backward: bool) -> StageBytes:
    """Runs a micro-batch through `layers` of a module on the meta device, forward and backward."""
    for param in module.parameters():
        param.grad = torch.empty_like(param) if param.requires_grad else None
    with AllocationSample(meta=True) as sample:
        _passes(module, layers, tokens_BS, sample, split_backward=split_backward)  # makes what stays: rotation tables
        return _passes(module, layers, tokens_BS, sample, split_backward=split_backward)


def _passes(
    module: Decoder, layers: range, tokens_BS: Tensor, sample: AllocationSample, *, split_backward: bool
) -> StageBytes:
    begins, ends = layers.start == 0, layers.stop == module.spec.num_layers
    shape = stream_shape(module, *tokens_BS.shape)
    start = sample.restart()
    x = None if begins else torch.empty(shape, device="meta", requires_grad=True)
    with put_off_weight_gradients() if split_backward else nullcontext() as queue:
        out = module(tokens_BS, tokens_BS, layers=layers, stream_BSD=x)[0]
        during = {"F": sample.peak_bytes - start}
        root: Any = out if ends else get_gradient_edge(out)
        del out
        held = sample.restart() - start
        torch.autograd.backward(root, None if ends else torch.empty(shape, device="meta"))
        del root
        during["B" if queue is None else "I"] = sample.peak_bytes - start
        work = None if queue is None else queue.take()
    del x
    waiting = sample.restart() - start
    if work is not None:
        work.run()
        during["W"] = sample.peak_bytes - start
    stream = torch.empty(shape, device="meta").nbytes
    return StageBytes(held, waiting, during, 0 if begins else stream, 0 if ends else stream)


def stream_shape(module: Decoder, batch: int, seq: int) -> tuple[int, int, int]:
    """Of the stream as a rank holds it."""
    seq //= module.split.context.degree
    if module.split.tensor.sequence_parallel:
        seq //= module.split.tensor.degree
    return batch, seq, module.spec.hidden_size


def peak_bytes(program: Sequence[Step], stages: Mapping[int, StageBytes]) -> tuple[int, int]:
    """(the most that waits for backward passes at one time, the most that is alive at one time) on a rank that runs
    `program`."""
    waiting = streams = most_waiting = most = 0
    stream = max(max(one.takes, one.gives) for one in stages.values())
    for do, stage, _, transfer in program:
        if transfer is not None:
            streams += {"receive": stream, "sent": -stream}.get(do, 0)
        elif do != "complete":
            one = stages[stage]
            before = {"F": 0, "W": one.waiting}.get(do, one.held)
            after = {"F": one.held, "W": 0}.get(do, one.waiting)
            taken, given = {"F": (one.takes, one.gives), "W": (0, 0)}.get(do, (one.gives, one.takes))
            most = max(most, waiting - before + streams - taken + one.during[do])
            waiting += after - before
            streams += given - taken
        most_waiting, most = max(most_waiting, waiting), max(most, waiting + streams)
    assert waiting == streams == 0, "a pass or a transfer of the program has no counterpart"
    return most_waiting, most
