"""Optimisers: AdamW, torch's fused one or that of narrow moments, and Muon for the hidden matrices with AdamW for the
rest.

All act on the model's own parameters, which may pack several logical matrices (q, k, v) or be sharded; Muon
orthogonalises each *logical* matrix whole, so that neither packing nor sharding changes the update.
State tensors have the shape of their parameter and are saved under canonical names (`train/state.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bessemer.core.job import Job, TrainSection
from bessemer.models.canonical import Piece, local, local_box, local_rows, pieces
from bessemer.parallel.copies import whole_block
from bessemer.parallel.mesh import Mesh
from bessemer.train.moments import ADAMW_MOMENTS, NarrowAdamW

__all__ = ["Muon", "Optimizer", "moments", "orthogonalise"]

MUON_LR = 0.02
MUON_MOMENTUM = 0.95
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of the quintic iteration, Jordan et al. 2024 (kellerjordan.github.io/posts/muon)."""

MUON_MOMENTS = ("momentum",)


def moments(name: str, dims: int, train: TrainSection) -> tuple[str, ...]:
    """The kinds of state that the logical tensor `name` of `dims` dimensions has beside its value."""
    if name.endswith(".router.bias"):
        return ()  # moved at the commit, without a gradient
    hidden = train.optimizer == "muon" and dims >= 2 and name.startswith(("layers.", "mtp."))
    return MUON_MOMENTS if hidden else ADAMW_MOMENTS


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: five Newton-Schulz steps in float32. Shape [rows, columns]."""
    x = matrix.float()
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, Nesterov, orthogonalised per logical matrix; decoupled weight decay.

    `matrices` gives for each parameter the blocks of logical matrices that it holds; `whole` puts the blocks of all
    ranks together (`parallel/copies.py`). The update of a matrix is scaled by sqrt(max(1, rows / columns)), as in the
    reference above.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        matrices: Mapping[nn.Parameter, Sequence[Piece]],
        whole: Callable[[Piece, torch.Tensor], torch.Tensor],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._matrices = matrices
        self._whole = whole

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                buffer = self.state[param]["momentum"]
                buffer.mul_(group["momentum"]).add_(param.grad)
                update = self._update(param, param.grad.add(buffer, alpha=group["momentum"]))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                local(param).add_(update, alpha=-group["lr"])

    def _update(self, param: nn.Parameter, direction: torch.Tensor) -> torch.Tensor:
        """The orthogonalised part of `direction` that this rank holds; of a stack of experts each matrix by itself."""
        if param.ndim == 3:
            return self._experts(param, direction)
        rows_held = direction.full_tensor() if isinstance(direction, DTensor) else direction
        result = torch.empty_like(rows_held)
        for piece in self._matrices[param]:
            rows = slice(piece.row, piece.row + piece.rows)
            matrix = self._whole(piece, rows_held[rows])
            scale = max(1.0, matrix.size(0) / matrix.size(1)) ** 0.5
            result[rows] = orthogonalise(matrix)[piece.within()] * scale
        first, count = local_rows(param)
        return result[first : first + count]

    def _experts(self, param: nn.Parameter, direction: torch.Tensor) -> torch.Tensor:
        [piece] = self._matrices[param]
        (first, *inner), (count, *sizes) = local_box(param)
        cut_inside = isinstance(direction, DTensor) and tuple(sizes) != tuple(param.shape[1:])
        held = direction.full_tensor() if cut_inside else local(direction)
        stack = self._whole(piece, held)
        scale = max(1.0, stack.size(1) / stack.size(2)) ** 0.5
        made = [orthogonalise(matrix)[piece.within(1)] * scale for matrix in stack]
        if not made:
            return local(direction)
        if cut_inside:
            made = [m[tuple(slice(o, o + n) for o, n in zip(inner, sizes, strict=True))] for m in made]
            made = made[first : first + count]
        return torch.stack(made)


class Optimizer:
    """The optimisers of a job as one: `step(lr_factor)`, and every state tensor with its parameter's name.

    Weight decay is decoupled and spares norms and biases, that is, every parameter with less than two dimensions; their
    moments are float32 whatever `precision.moments` says.
    """

    def __init__(self, module: nn.Module, job: Job, mesh: Mesh) -> None:
        train, kind = job.train, job.precision.moments
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        inner = ("blocks.", "mtp.")
        hidden = {n for n, p in named if train.optimizer == "muon" and n.startswith(inner) and p.ndim >= 2}
        narrow = {n: p for n, p in named if kind != "fp32" and p.ndim >= 2}
        self.params = dict(module.named_parameters())  # those without a gradient are state too
        groups: dict[tuple[bool, object], list[nn.Parameter]] = {}  # a fused update is of one mesh's tensors
        for name, p in named:
            if name not in hidden and name not in narrow:
                mesh_of = p.device_mesh if isinstance(p, DTensor) else None
                groups.setdefault((p.ndim >= 2, mesh_of), []).append(p)
        adamw = torch.optim.AdamW(
            [
                {"params": params, "weight_decay": train.weight_decay if decayed else 0.0}
                for (decayed, _), params in groups.items()
            ],
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
            fused=True,
        )
        self._base_lr: list[tuple[torch.optim.Optimizer, float]] = [(adamw, train.lr)]
        self._kinds: dict[str, tuple[torch.optim.Optimizer, tuple[str, ...]]] = {
            n: (adamw, ADAMW_MOMENTS) for n, _ in named if n not in hidden and n not in narrow
        }
        self._narrow: NarrowAdamW | None = None
        if kind != "fp32":
            self._narrow = NarrowAdamW(module, narrow, train, kind)
            self._base_lr.append((self._narrow, train.lr))
        if hidden:
            muon = self._muon(module, train, hidden, mesh)
            self._base_lr.append((muon, train.muon_lr or MUON_LR))
            self._kinds |= dict.fromkeys(hidden, (muon, MUON_MOMENTS))
        for name, (optimizer, keys) in self._kinds.items():
            state = optimizer.state[self.params[name]]
            for key in keys:
                state[key] = torch.zeros_like(self.params[name], memory_format=torch.preserve_format)
        self.set_steps(0)

    def _muon(self, module: nn.Module, train: TrainSection, hidden: set[str], mesh: Mesh) -> Muon:
        matrices: dict[nn.Parameter, list[Piece]] = {}
        for piece in pieces(module):
            if piece.param in hidden:
                matrices.setdefault(self.params[piece.param], []).append(piece)
        return Muon(
            [self.params[n] for n in sorted(hidden)],
            matrices,
            partial(whole_block, mesh=mesh),
            lr=train.muon_lr or MUON_LR,
            momentum=train.muon_momentum if train.muon_momentum is not None else MUON_MOMENTUM,
            weight_decay=train.weight_decay,
        )

    def set_steps(self, steps: int) -> None:
        """Tell AdamW's bias correction how many updates its moments have seen."""
        for name, (optimizer, keys) in self._kinds.items():
            if keys is ADAMW_MOMENTS:
                param = self.params[name]
                # a fused update reads it where it runs
                optimizer.state[param]["step"] = torch.tensor(float(steps), device=param.device)
        if self._narrow is not None:
            self._narrow.steps = steps

    def state_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """{state name: {parameter name: tensor of the parameter's shape and sharding}}: the state itself, but copies in
        bfloat16 of moments in FP8 (`take` keeps what was written into them)."""
        found: dict[str, dict[str, torch.Tensor]] = {} if self._narrow is None else self._narrow.state_tensors()
        for name, (optimizer, keys) in self._kinds.items():
            for key in keys:
                found.setdefault(key, {})[name] = optimizer.state[self.params[name]][key]
        return found

    def take(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Go on from the values that were written into what `state_tensors` gave."""
        if self._narrow is not None:
            self._narrow.take(state)

    def kept(self) -> Iterator[torch.Tensor]:
        """The tensors that really hold the state."""
        for name, (optimizer, keys) in self._kinds.items():
            yield from (optimizer.state[self.params[name]][key] for key in keys)
        if self._narrow is not None:
            yield from self._narrow.kept()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by parameter, sharded like it; a parameter without one is left out."""
        return {n: p.grad for n, p in self.params.items() if p.grad is not None}

    def step(self, factor: float) -> None:
        """One update with each base learning rate times `factor`; gradients are cleared after it."""
        for optimizer, base in self._base_lr:
            for group in optimizer.param_groups:
                group["lr"] = base * factor
            optimizer.step()
        self.clear()

    def clear(self) -> None:
        for param in self.params.values():
            param.grad = None
