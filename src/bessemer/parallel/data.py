"""Data parallelism: gradients summed over the ranks that see other tokens with the same weights.

Inside a replica these are the ranks of the shard and context axes (of the experts: those that hold the same ones);
there FSDP2 may shard parameters, gradients and optimizer state. The reduction across replicas is one function
(`ReplicaSum`), entered from bucketed gradient hooks without sharding and from FSDP2's all-reduce hook with it. It works
on a copy, so that a failed one leaves the local gradients as they were, and it starts under the backward pass of the
last unit. Nothing here divides: gradients are sums of per-token terms, normalised in one place, `train/step.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard

from bessemer.comm import collectives as comm
from bessemer.models.canonical import pieces
from bessemer.models.moe import Experts
from bessemer.parallel.gathering import gathering
from bessemer.parallel.mesh import Mesh

__all__ = ["DataParallel", "ReplicaSum", "drop_gathered", "shard"]

BUCKET_BYTES = 8 << 20
"""Gradients are reduced in buckets of at least this size: large enough for the link's bandwidth, small enough that
the first one leaves early in the backward pass."""


class ReplicaSum:
    """The one place where gradients cross replicas: sums `buffer` in place over the replica group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.muted = False

    def start(self, buffer: torch.Tensor) -> dist.Work | None:
        """Start the sum; the caller waits for the work before it reads. None: there is nothing to wait for."""
        if self.group is None or self.muted:
            return None
        return comm.all_reduce(buffer, group=self.group, async_op=True)


class _Bucket:
    """A run of parameters whose gradients travel together: first inside the replica, then across replicas."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.flat = torch.empty(sum(p.numel() for p in params), dtype=torch.float32, device=params[0].device)
        sizes = [p.numel() for p in params]
        self.views = [v.view_as(p) for v, p in zip(self.flat.split(sizes), params, strict=True)]
        self.reset()

    def reset(self) -> None:
        self.pending = len(self.params)
        self.inside: dist.Work | None = None
        self.across: dist.Work | None = None
        self.local: list[torch.Tensor] = []


class Replicated:
    """Gradients of parameters that every rank of `group`, and of the replica group, holds whole. Without either, the
    hooks are not even installed. In a pipeline (`staged`) `done`, not autograd, tells which gradients are complete."""

    def __init__(
        self, params: Sequence[nn.Parameter], group: dist.ProcessGroup | None, replica_sum: ReplicaSum, *, staged: bool
    ) -> None:
        self.params = list(params)
        self._group = group
        self._sum = replica_sum
        self._armed = False
        self._started: _Bucket | None = None
        self._buckets: list[_Bucket] = []
        if group is not None or replica_sum.group is not None:
            self._buckets = _make_buckets([p for p in self.params if p.requires_grad])
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        for param in () if staged else self._bucket_of:
            param.register_post_accumulate_grad_hook(self._ready)

    def before_backward(self, *, last: bool) -> None:
        self._armed = last
        for bucket in self._buckets:
            bucket.reset()  # which also lets go of the gradients of the step before

    def done(self, params: Iterable[nn.Parameter]) -> None:
        """The step's local gradients of these parameters are complete."""
        for param in params:
            self._ready(param)

    def _ready(self, param: torch.Tensor) -> None:
        bucket = self._bucket_of.get(param)  # type: ignore[call-overload]
        if bucket is None or not self._armed:
            return
        bucket.pending -= 1
        if bucket.pending == 0:
            self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        bucket.local = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket.params]
        torch._foreach_copy_(bucket.views, bucket.local)
        if self._group is None:
            bucket.across = self._sum.start(bucket.flat)
            return
        if self._started is not None:
            self._cross(self._started)  # it had the backward pass of this bucket's layers to finish in
        bucket.inside = comm.all_reduce(bucket.flat, group=self._group, async_op=True)
        self._started = bucket

    def _cross(self, bucket: _Bucket) -> None:
        if bucket.inside is not None:
            bucket.inside.wait()
            bucket.inside = None
            bucket.across = self._sum.start(bucket.flat)

    def finish(self) -> None:
        for bucket in self._buckets:
            if bucket.pending:  # a parameter that took no part in this step's last backward pass
                self._launch(bucket)
                bucket.pending = 0
        self._started = None
        for bucket in self._buckets:
            self._cross(bucket)
        for bucket in self._buckets:
            if bucket.across is not None:
                bucket.across.wait()
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view

    def local_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        if not self._buckets:
            return {p: p.grad for p in self.params if p.grad is not None}
        return {p: g for bucket in self._buckets for p, g in zip(bucket.params, bucket.local, strict=True)}


def _make_buckets(params: list[nn.Parameter]) -> list[_Bucket]:
    """Buckets in the order in which backward finishes: the last parameters first."""
    buckets: list[_Bucket] = []
    run: list[nn.Parameter] = []
    size = 0
    for param in reversed(params):
        run.append(param)
        size += param.numel() * 4
        if size >= BUCKET_BYTES:
            buckets.append(_Bucket(run))
            run, size = [], 0
    if run:
        buckets.append(_Bucket(run))
    return buckets


def shard(module: nn.Module, mesh: Mesh, kind: str, gather: str = "fp32") -> None:
    """Lay `module` (a `Decoder`, perhaps still on the meta device) over the ranks that see other tokens with the same
    weights, if `kind` says so: FSDP2 for each block, and for experts over the ranks that hold the same ones.

    optimizer (ZeRO-1): gradients stay whole until the step's last backward pass, then are scattered once.
    gradient (ZeRO-2):  they are scattered after each backward pass; parameters stay whole until the update.
    full (ZeRO-3):      parameters are gathered for each block and dropped after it.

    `gather` is precision.gather: in what parameters travel where they are gathered.
    """
    if kind == "none" or mesh.group("data") is None:
        return
    reshard = kind == "full"
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    experts = [part for part in module.modules() if isinstance(part, Experts)]
    alone = {p for part in experts for p in part.parameters()} if mesh.group("expert_data") is None else set()
    if not alone and experts:
        expert_mesh = mesh.device_mesh("expert_data")
        placed = partial(_expert_dim, ranks=mesh.size("expert_data"))
        for part in experts:
            fully_shard(
                part,
                mesh=expert_mesh,
                reshard_after_forward=reshard,
                mp_policy=policy,
                shard_placement_fn=placed,
            )
    data_mesh = mesh.device_mesh("data")
    for block in (*module.blocks.values(), *module.mtp, module):
        fully_shard(block, mesh=data_mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=alone)
    for unit in _units(module):
        unit.set_custom_all_gather(gathering(unit, gather, mesh.group("tensor")))
    if reshard:
        _gather_ahead(module)


def _expert_dim(stack: nn.Parameter, *, ranks: int) -> Shard:
    """Whole experts where each rank gets as many, else rows of all of them where these come out even (FSDP2 cuts
    other dims than the first only evenly), else experts after all, of which some ranks then hold none."""
    experts, rows = stack.shape[:2]
    return Shard(1) if experts % ranks and rows % ranks == 0 else Shard(0)


def _gather_ahead(module: nn.Module) -> None:
    """Each block's parameters, its experts' too, are on their way while the block before it computes, forward and
    backward; not across the ends of a pipeline stage, where the next pass of this rank may be another stage's."""
    layers: tuple[int, ...] = module.layers  # type: ignore[assignment]
    for before, after in itertools.pairwise(layers):
        if after == before + 1:
            first, second = module.block(before), module.block(after)
            first.set_modules_to_forward_prefetch(_units(second))
            second.set_modules_to_backward_prefetch(_units(first)[::-1])


def _units(module: nn.Module) -> list[FSDPModule]:
    """What FSDP2 gathers apart: of a block itself, and its experts where they have a mesh of their own."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


class _Scatter(DefaultReduceScatter):
    """FSDP2's scattering of gradients, marked and counted like all other communication."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return comm.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class Sharded:
    """The gradients of FSDP2's parameters, and the sum across replicas in its all-reduce hook.

    In a pipeline (`at_end`) they are scattered once, when the last unit has left it: passes of several micro-batches
    overlap, and schedules that split the backward pass make weights' gradients after FSDP2 would have taken them.
    """

    def __init__(self, module: nn.Module, kind: str, replica_sum: ReplicaSum, *, at_end: bool) -> None:
        self.module = module
        self.params = [p for p in module.parameters() if isinstance(p, DTensor)]
        self._kind = kind
        self._sum = replica_sum
        self._at_end = at_end
        self._last = False
        self._partial: dict[int, torch.Tensor] = {}
        for index, part in enumerate(self._parts()):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            part.set_custom_reduce_scatter(_Scatter())
            if replica_sum.group is not None:
                part.set_all_reduce_hook(partial(self._across_replicas, index))

    def _parts(self) -> list[FSDPModule]:
        return [m for m in self.module.modules() if isinstance(m, FSDPModule)]

    def before_backward(self, *, last: bool) -> None:
        root = self.module
        assert isinstance(root, FSDPModule)
        self._last = last and not self._at_end
        root.set_requires_gradient_sync(not self._at_end and (last or self._kind != "optimizer"))
        root.set_is_last_backward(self._last)
        root.set_reshard_after_backward(self._last or self._kind == "full")

    def _across_replicas(self, index: int, scattered: torch.Tensor) -> None:
        """FSDP2 calls this with its freshly scattered gradients and then adds them to `.grad`.

        Before the last pass they are put aside and FSDP2 is left with zeros, so that the one sum across replicas
        takes the whole step's gradient.
        """
        kept = self._partial.pop(index, None)
        if not self._last:
            self._partial[index] = scattered.clone() if kept is None else kept.add_(scattered)
            scattered.zero_()
            return
        if kept is not None:
            scattered.add_(kept)
        work = self._sum.start(scattered)
        if work is not None:
            work.wait()  # FSDP2 reads the result next; on a GPU this only orders streams

    def finish(self) -> None:
        if not self._at_end:
            return  # FSDP2 has waited at the end of the backward pass
        root = self.module
        assert isinstance(root, FSDPModule)
        self._last = True
        root.set_requires_gradient_sync(True)
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)
        # what torch.distributed.pipelining does after its own schedules
        root._get_fsdp_state()._root_post_backward_final_callback()

    def local_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        return {}  # already scattered: the sum holds every rank's part


class DataParallel:
    """What the step needs of data parallelism: `module` with its gradients summed over everything that shares them."""

    def __init__(self, module: nn.Module, mesh: Mesh, kind: str) -> None:
        """`module` after `shard` and with its parameters in memory; `kind` is layout.dp_shard."""
        self.module = module
        replica_sum = self._sum = ReplicaSum(mesh.group("replica"))
        expert_names = {p.param for p in pieces(module) if p.expert}
        plain = [(n, p) for n, p in module.named_parameters() if not isinstance(p, DTensor)]
        dense = [p for n, p in plain if n not in expert_names]
        experts = [p for n, p in plain if n in expert_names]
        staged = mesh.sizes["pp"] > 1
        self._replicated = (
            Replicated(dense, mesh.group("data"), replica_sum, staged=staged),
            Replicated(experts, mesh.group("expert_data"), replica_sum, staged=staged),
        )
        self._parts: list[Replicated | Sharded] = [*self._replicated]
        if any(isinstance(p, DTensor) for p in module.parameters()):
            self._parts.append(Sharded(module, kind, replica_sum, at_end=staged))

    def before_backward(self, *, last: bool) -> None:
        """Say whether the backward pass that follows is the step's last one on this rank."""
        for part in self._parts:
            part.before_backward(last=last)

    def done(self, params: Iterable[nn.Parameter]) -> None:
        """In a pipeline: the step's gradients of these parameters are complete on this rank."""
        params = list(params)
        for part in self._replicated:
            part.done(params)

    def finish(self) -> None:
        """Wait until each parameter's `.grad` is the sum over all ranks that hold the same parameter and see other
        tokens."""
        for part in self._parts:
            part.finish()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Meanwhile gradients are summed inside each replica alone."""
        self._sum.muted = True
        try:
            yield
        finally:
            self._sum.muted = False

    def local_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """This rank's own part of the step's gradients, as far as it is still apart from the sum."""
        return {p: g for part in self._parts for p, g in part.local_gradients().items()}


def drop_gathered(module: nn.Module) -> None:
    """Let go of parameters that forward passes without a backward pass left gathered: an evaluation's, say."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
