"""Data parallelism: gradients summed over replicas, and parameters, gradients and optimizer state sharded by FSDP2.

The reduction across replicas is one function (`ReplicaSum`), entered from bucketed gradient hooks without sharding
and from FSDP2's all-reduce hook with it. It works on a copy, so that a failed one leaves the local gradients as
they were, and it starts under the backward pass of the last unit. Nothing here divides: gradients are sums of
per-token terms, normalised in one place, `train/step.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from bessemer.parallel.mesh import Mesh

__all__ = ["DataParallel", "ReplicaSum", "Replicated", "Sharded", "data_parallel", "drop_gathered"]

BUCKET_BYTES = 8 << 20
"""Gradients are reduced in buckets of at least this size: large enough for the link's bandwidth, small enough that
the first one leaves early in the backward pass."""


class ReplicaSum:
    """The one place where gradients cross replicas: sums `buffer` in place over the replica group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def start(self, buffer: torch.Tensor) -> dist.Work | None:
        """Start the sum; the caller waits for the work before it reads. None: there is nothing to wait for."""
        if self.group is None:
            return None
        return dist.all_reduce(buffer, group=self.group, async_op=True)


class DataParallel(Protocol):
    """What the step needs of data parallelism."""

    module: nn.Module

    def before_backward(self, *, last: bool) -> None:
        """Say whether the backward pass that follows is the step's last one on this rank."""

    def finish(self) -> None:
        """Wait until each parameter's `.grad` is the sum over all ranks."""

    def local_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """This rank's own part of the step's gradients, as far as it is still apart from the sum."""


class _Bucket:
    """A run of parameters whose gradients travel together."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.flat = torch.empty(sum(p.numel() for p in params), dtype=torch.float32, device=params[0].device)
        sizes = [p.numel() for p in params]
        self.views = [v.view_as(p) for v, p in zip(self.flat.split(sizes), params, strict=True)]
        self.pending = len(params)
        self.work: dist.Work | None = None
        self.local: list[torch.Tensor] = []


class Replicated:
    """Every rank holds the whole model. One replica: the hooks are not even installed."""

    def __init__(self, module: nn.Module, replica_sum: ReplicaSum) -> None:
        self.module = module
        self._sum = replica_sum
        self._armed = False
        self._buckets: list[_Bucket] = []
        if replica_sum.group is not None:
            self._buckets = _make_buckets([p for p in module.parameters() if p.requires_grad])
            for bucket in self._buckets:
                for param in bucket.params:
                    param.register_post_accumulate_grad_hook(partial(self._ready, bucket))

    def before_backward(self, *, last: bool) -> None:
        self._armed = last
        if last:
            for bucket in self._buckets:
                bucket.pending = len(bucket.params)
                bucket.work = None
                bucket.local = []

    def _ready(self, bucket: _Bucket, _param: torch.Tensor) -> None:
        if not self._armed:
            return
        bucket.pending -= 1
        if bucket.pending == 0:
            self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        bucket.local = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket.params]
        torch._foreach_copy_(bucket.views, bucket.local)
        bucket.work = self._sum.start(bucket.flat)

    def finish(self) -> None:
        for bucket in self._buckets:
            if bucket.pending:  # a parameter that took no part in this step's last backward pass
                self._launch(bucket)
                bucket.pending = 0
            if bucket.work is not None:
                bucket.work.wait()
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view

    def local_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        if not self._buckets:
            return {p: p.grad for p in self.module.parameters() if p.grad is not None}
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


class Sharded:
    """FSDP2 over the shard axis, and the sum across replicas in its all-reduce hook.

    optimizer (ZeRO-1): gradients stay whole until the step's last backward pass, then are scattered once.
    gradient (ZeRO-2):  they are scattered after each backward pass; parameters stay whole until the update.
    full (ZeRO-3):      parameters are gathered for each block and dropped after it.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, kind: str, replica_sum: ReplicaSum) -> None:
        assert mesh.axes is not None
        self.module = module
        self._kind = kind
        self._sum = replica_sum
        self._last = False
        self._partial: dict[int, torch.Tensor] = {}
        reshard = kind == "full"
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        shard_axis = mesh.axes["shard"]
        for block in (*module.blocks, *module.mtp):  # type: ignore[misc]
            fully_shard(block, mesh=shard_axis, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(module, mesh=shard_axis, reshard_after_forward=reshard, mp_policy=policy)
        for index, part in enumerate(self._parts()):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
            if replica_sum.group is not None:
                part.set_all_reduce_hook(partial(self._across_replicas, index))

    def _parts(self) -> list[FSDPModule]:
        return [m for m in self.module.modules() if isinstance(m, FSDPModule)]

    def before_backward(self, *, last: bool) -> None:
        self._last = last
        root = self.module
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(last or self._kind != "optimizer")
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last or self._kind == "full")

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
        """Nothing is left to wait for: FSDP2 does so at the end of the backward pass."""

    def local_gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        return {}  # already scattered: the sum holds every rank's part


def data_parallel(module: nn.Module, mesh: Mesh, dp_shard: str) -> DataParallel:
    """`module` under the data parallelism of `mesh`: plain, replicated, sharded, or sharded replicas."""
    replica_sum = ReplicaSum(mesh.replica_group)
    if mesh.shard > 1:
        return Sharded(module, mesh, dp_shard, replica_sum)
    return Replicated(module, replica_sum)


def drop_gathered(module: nn.Module) -> None:
    """Let go of parameters that forward passes without a backward pass left gathered: an evaluation's, say."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
