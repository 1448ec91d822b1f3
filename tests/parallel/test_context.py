"""Context parallelism against attention in one process: results and gradients, masks, widths, heads, bytes sent.

The tolerance in float32 is that of the layout promise for gradients, 1e-5 of the largest element; the reference is
written out here in float64. In bfloat16 the reference has the same rounded inputs: what is left is the rounding of the
results, and in gradients that of the result that enters them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from bessemer import ops
from bessemer.comm import collectives as comm
from bessemer.parallel import context_ring
from bessemer.parallel.context import ContextParallel
from bessemer.runtime.kernels import KernelSample

KINDS = ("ring", "allgather", "ulysses")
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv: int = 4
    seq: int = 160  # pieces of 40 and 20 tokens: not of whole blocks of the kernel
    dim: int = 16
    value_dim: int = 16
    documents: bool = False
    window: int | None = None
    dtype: torch.dtype = torch.float32


CASES = {
    "causal": Case(),
    "whole blocks": Case(seq=512, dim=32, value_dim=32),
    "documents": Case(documents=True),
    "window": Case(window=17),
    "documents and window": Case(documents=True, window=33, kv=2),
    "grouped heads": Case(kv=2),
    "one key/value head": Case(kv=1, documents=True),
    "heads that need repeating": Case(heads=12, kv=6, dim=8, value_dim=8),
    "latent": Case(dim=24, value_dim=10),
    "latent documents": Case(dim=24, value_dim=10, documents=True),
    "bf16": Case(kv=2, dtype=torch.bfloat16),
    "bf16 latent documents": Case(dim=24, value_dim=10, documents=True, dtype=torch.bfloat16),
}


def tensors(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the result, of whole sequences, in the layout of the projections they come from."""
    generator = torch.Generator().manual_seed(7)
    widths = ((case.heads, case.dim), (case.kv, case.dim), (case.kv, case.value_dim), (case.heads, case.value_dim))
    return [torch.randn(2, case.seq, *width, generator=generator).to(case.dtype) for width in widths]


def starts_of(case: Case) -> Tensor | None:
    at = torch.arange(case.seq)
    segments = torch.stack((at // 50, (at > 7).int() + (at > case.seq - 30).int())) if case.documents else None
    return ops.first_keys(segments, 2, case.seq, case.window)


def whole(case: Case) -> list[Tensor]:
    """The result [B, N, H, E] and the gradients of q, k, v [B, N, heads, E], float64."""
    q, k, v, grad = (t.double().requires_grad_() for t in tensors(case))
    group, at = case.heads // case.kv, torch.arange(case.seq)
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k.repeat_interleave(group, 2)) * case.dim**-0.5
    starts = starts_of(case)
    first = torch.zeros(2, case.seq) if starts is None else starts
    seen = (at[None, None, :] <= at[None, :, None]) & (at[None, None, :] >= first[:, :, None])
    shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bhqk,bkhe->bqhe", shares, v.repeat_interleave(group, 2))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())]


def shared(split: ContextParallel, case: Case) -> list[Tensor]:
    """This rank's part of what `whole` gives. Inputs are views, as they come from a projection, not contiguous."""
    q, k, v, grad = (split.part(t).requires_grad_() for t in tensors(case))
    out = split.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), starts_of(case))
    assert out.shape == (2, case.seq // split.degree, case.heads, case.value_dim) and out.dtype == case.dtype
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())]


def errors(split: ContextParallel, case: Case, expected: list[Tensor]) -> dict[str, float]:
    """Of the result and each gradient the largest error over the limit."""
    found = {}
    for name, mine, all_of_it in zip(("out", "dq", "dk", "dv"), shared(split, case), expected, strict=True):
        limit = LIMIT[case.dtype] * float(all_of_it.abs().max())
        found[name] = float((mine.double() - split.part(all_of_it)).abs().max()) / limit
        found[name] = found[name] if mine.isfinite().all() else math.inf
    return found


def split_of(rank: int, degree: int, kind: Any) -> ContextParallel:
    group = dist.group.WORLD
    assert group is not None
    return ContextParallel(group, degree, rank, kind)


def all_cases(rank: int, world: int, paths: tuple[str, ...]) -> dict[tuple[str, str, str], dict[str, float]]:
    found = {}
    for name, case in CASES.items():
        expected = whole(case)
        for kind in KINDS:
            for path in paths:
                torchs = kind == "ulysses" and (path == "reference" or ops.why_absent())
                if torchs and case.dtype == torch.bfloat16:
                    continue  # torch's own attention adds the gradients of a group's heads up in bf16
                with ops.use(path):  # type: ignore[arg-type]
                    found[path, kind, name] = errors(split_of(rank, world, kind), case, expected)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_every_kind_equals_one_process(world: int) -> None:
    paths = ("auto",) if world == 4 else ("auto", "reference")
    for rank, found in enumerate(run_ranks(world, all_cases, paths)):
        wrong = {case: errors for case, errors in found.items() if max(errors.values()) > 1}
        assert not wrong, f"rank {rank}: largest errors over the limit {wrong}"


def work(rank: int, world: int) -> dict[tuple[str, str], tuple[int, float]]:
    """Blocks that this rank's ring computes forward, and the FLOPs of both passes of each kind."""
    found = {}
    for name in ("causal", "window", "documents"):
        for kind in KINDS:
            with KernelSample() as sample:
                shared(split_of(rank, world, kind), CASES[name])
            blocks = sum(total.calls for (kernel, _), total in sample.totals.items() if kernel == "attend")
            found[kind, name] = blocks, sum(sample.flops.values())
    return found


def test_only_what_is_seen_is_computed() -> None:
    """8 pieces of 20 tokens: causal queries see the pieces up to their own, those with a window of 17 their own and the
    one before. What the ranks compute adds up to what one process does."""
    if ops.why_absent():
        pytest.skip(f"no native kernels: {ops.why_absent()}")
    ranks = run_ranks(4, work)
    blocks = {name: [found["ring", name][0] for found in ranks] for name in ("causal", "window")}
    assert blocks == {"causal": [9, 9, 9, 9], "window": [3, 4, 4, 4]}
    for name in ("causal", "window", "documents"):
        case = CASES[name]
        with KernelSample() as sample:
            q, k, v, grad = (t.transpose(1, 2).requires_grad_() for t in tensors(case))
            ops.attend(q, k, v, starts_of(case)).backward(grad.transpose(1, 2).detach())
        for kind in KINDS:
            assert sum(found[kind, name][1] for found in ranks) == sum(sample.flops.values())


def layout(rank: int, world: int) -> list[Any]:
    split = split_of(rank, world, "ring")
    values = torch.arange(2 * 16 * 3).view(2, 16, 3)
    at = split.positions(16, torch.device("cpu"))
    assert torch.equal(split.part(values), values[:, at])
    return at.tolist()


def test_a_rank_holds_an_early_and_a_late_piece() -> None:
    assert run_ranks(4, layout) == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


class Counted:
    """Bytes that this rank sends through torch.distributed while it is entered: of a point-to-point send its own, of a
    collective the least that any algorithm for it sends."""

    def __init__(self) -> None:
        self.sent = 0.0
        self._kept: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Counted:
        share = dist.get_world_size() - 1
        self._wrap("batch_isend_irecv", lambda many: sum(size(p.tensor) for p in many if p.op is dist.isend))
        self._wrap("all_gather_single", lambda made, mine: size(mine) * share)
        self._wrap("reduce_scatter_single", lambda mine, made: size(mine) * share)
        self._wrap("all_to_all_single", lambda made, mine: size(mine) * share / (share + 1))
        return self

    def _wrap(self, name: str, sent: Callable[..., float]) -> None:
        call = self._kept[name] = getattr(comm, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.sent += sent(*args)
            return call(*args, **kwargs)

        setattr(comm, name, counted)

    def __exit__(self, *_: object) -> None:
        for name, call in self._kept.items():
            setattr(comm, name, call)


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def sent_bytes(rank: int, world: int, case: Case) -> dict[str, tuple[float, float]]:
    found = {}
    for kind in KINDS:
        split = split_of(rank, world, kind)
        q, k, v, grad = (split.part(t).transpose(1, 2).requires_grad_() for t in tensors(case))
        with Counted() as forward:
            out = split.attend(q, k, v, starts_of(case))
        with Counted() as backward:
            torch.autograd.grad(out, (q, k, v), grad.detach().transpose(1, 2))
        found[kind] = forward.sent, backward.sent
    return found


def test_bytes_sent_are_those_of_the_closed_forms() -> None:
    n, case = 4, Case(heads=8, kv=2, dim=24, value_dim=10, dtype=torch.bfloat16)
    tokens = 2 * case.seq // n
    q, o = tokens * case.heads * case.dim, tokens * case.heads * case.value_dim
    kv = tokens * case.kv * (case.dim + case.value_dim)
    ring = (n - 1) * 2 * kv
    swap = (n - 1) / n * 2 * (q + o + 2 * kv)  # 2 key/value heads for 4 ranks: each is repeated twice
    expected = {
        "ring": (ring, ring + n * 4 * kv),
        "allgather": (ring, ring + (n - 1) * 4 * kv),
        "ulysses": (swap, swap),
    }
    assert run_ranks(n, sent_bytes, case) == [expected] * n


def _lost(kept: Callable[..., Any], hop: Any) -> Tensor:
    came: Tensor = kept(hop)
    return torch.zeros_like(came) if came.dtype == torch.float32 else came  # of bf16 keys only gradients are float32


def _unweighted(kept: Callable[..., Any], out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Any:
    return out_a + out_b, kept(out_a, lse_a, out_b, lse_b)[1]


def _first_sum_kept(kept: Callable[..., Any], out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Any:
    return kept(out_a, lse_a, out_b, lse_b)[0], lse_a


def _own_part(kept: Callable[..., Any], mine: Tensor, made: Tensor, **_: Any) -> None:
    mine.copy_(made.chunk(dist.get_world_size())[dist.get_rank()])


def _not_swapped(kept: Callable[..., Any], swapped: Tensor, buffer: Tensor, **_: Any) -> None:
    swapped.copy_(buffer)


SABOTAGE: dict[str, tuple[str, Any, str, Callable[..., Any], set[str]]] = {
    "gradients don't travel": ("ring", context_ring._Hop, "arrived", _lost, {"dk", "dv"}),
    "blocks merged without weights": ("ring", ops, "merge_blocks", _unweighted, {"out", "dq"}),
    "denominators not added": ("ring", ops, "merge_blocks", _first_sum_kept, {"out", "dq", "dk", "dv"}),
    "gradients not summed": ("allgather", comm, "reduce_scatter_single", _own_part, {"dk", "dv"}),
    "heads not swapped": ("ulysses", comm, "all_to_all_single", _not_swapped, {"out", "dq", "dk", "dv"}),
}
"""What is left out: (kind, where, name, what runs instead of it, what must come out wrong)."""


def broken(rank: int, world: int) -> dict[str, set[str]]:
    """What comes out wrong where one step is left out, as a mistake in the code would."""
    found, case = {}, CASES["bf16"]
    expected = whole(case)
    for name, (kind, where, what, instead, _) in SABOTAGE.items():
        kept = getattr(where, what)
        setattr(where, what, lambda *args, _new=instead, _kept=kept, **kwargs: _new(_kept, *args, **kwargs))
        wrong = errors(split_of(rank, world, kind), case, expected)
        setattr(where, what, kept)
        found[name] = {part for part, error in wrong.items() if error > 10}
    return found


def test_a_step_left_out_is_seen() -> None:
    found = run_ranks(2, broken)
    for name, (*_, wrong) in SABOTAGE.items():
        assert set.union(*(ranks[name] for ranks in found)) >= wrong, name
