"""Layouts of quantised recipes against one process: what a step makes, with sums in float32.

The codes of two layouts are the same where their scales are, so that only the order of sums is left; where a sum stands
within its rounding of the border between two codes, one code differs. `excess` therefore measures each gradient's
error as a share of its own norm: a flipped code moves it by 2^-4 / sqrt(elements), that is up to 2e-3 here.

Scales are powers of two, so that most numbers come out alike under any of them: only what falls below the format's
normal numbers shows a wrong one. `uneven` makes half of each matrix that tensor parallelism divides 2^14 times smaller:
under its own scale such a half is exact to 2^-4, under the whole tensor's it is coarse or zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from parallel.parity import first_gradients, plain, whole
from ranks import run_ranks
from router_margin import smallest_margin
from train.toy import MODELS, run_steps, toy_job, toy_parts

from bessemer.core.job import Job
from bessemer.models.canonical import held
from bessemer.models.quantise import histories
from bessemer.models.quantised import QuantisedExperts
from bessemer.train.state import state_slices

STEPS = 3
Sabotage = Callable[[], None]
FAMILIES = {
    "llama": MODELS["llama"] | {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False},
    "deepseek_v3": MODELS["deepseek_v3"],
    "mixtral": MODELS["mixtral"] | {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False},
}
COLUMNS = (".q.weight", ".k.weight", ".v.weight", ".gate.weight", ".up.weight")
ROWS = (".o.weight", ".down.weight")


def job_of(recipe: str, family: str = "llama", *, train: dict[str, Any] | None = None, **layout: Any) -> Job:
    """A job of a model wide enough for blocks of 128; `precision` and `keep` may be named beside the degrees."""
    sections = {name: layout.pop(name, {}) for name in ("precision", "keep", "model")}
    return toy_job(
        model=FAMILIES[family] | sections["model"],
        layout=layout,
        keep=sections["keep"],
        train={"global_batch": 4, "micro_batch": 2, "clip": 0.5} | (train or {}),
        precision={"recipe": recipe} | sections["precision"],
    )


@dataclass(frozen=True)
class Case:
    job: Job
    steps: int = STEPS
    uneven: bool = False
    sabotage: Sabotage | None = None


def record(rank: int, world: int, case: Case) -> dict[str, Any]:
    """What a rank has after some steps, and the first step's gradients; sums in float32."""
    if case.sabotage is not None:
        case.sabotage()
    parts = toy_parts(case.job, rank)
    parts.module.compute_dtype = torch.float32
    if case.uneven:
        _make_uneven(parts.module)
    first = first_gradients(parts)
    scales = _scales_of_experts(parts.module)
    with smallest_margin(parts.module) if world == 1 else nullcontext([]) as margins:
        results = list(run_steps(parts, 0, case.steps))
    return {
        "scales": scales,
        "margin": min(margins, default=1.0),
        "losses": [r.loss for r in results],
        "gradients": first[0],
        "state": plain(state_slices(parts.module, parts.optimizer)),
        "histories": {name: history.clone().numpy() for name, history in histories(parts.module)},
    }


def _scales_of_experts(module: Any) -> dict[tuple[str, int], list[list[np.ndarray]]]:
    """Fills up as the model runs: by stacked tensor and number of the expert in the layer, what each call scaled by, in
    the order of calls: x and the weight, then the gradient."""
    found: dict[tuple[str, int], list[list[np.ndarray]]] = {}

    def watched(held: QuantisedExperts) -> None:
        make = held.products

        def products(x: Any, counts: Any, dtype: Any, split: Any, **more: Any) -> Any:
            made = make(x, counts, dtype, split, **more)
            if made is None:
                return made
            agreed, first = made._agreed, split.experts.rank * len(counts)

            def noted(roles: Any, own: Any) -> Any:
                amaxes = agreed(roles, own)
                for place, name in enumerate(held.names):
                    mine = [a for (role, at), a in zip(roles, amaxes, strict=True) if at == place or role == "x"]
                    for expert in range(len(counts)):
                        values = [a[expert].clone().numpy() for a in mine]
                        found.setdefault((name, first + expert), []).append(values)
                return amaxes

            made._agreed = noted
            return made

        held.products = products  # type: ignore[method-assign]

    for part in module.modules():
        if isinstance(part, QuantisedExperts):
            watched(part)
    return found


@torch.no_grad()
def _make_uneven(module: Any) -> None:
    for block in held(module):
        name, shape = block.piece.name, block.piece.shape
        if name.startswith("layers.") and name.endswith(COLUMNS + ROWS):
            rows = name.endswith(ROWS)
            dim = len(shape) - (1 if rows else 2)  # of stacked experts too
            place = torch.arange(block.tensor.shape[dim]) + block.offset[dim]
            factor = torch.where(place < shape[dim] // 2, 1.0, 2.0**-14)
            block.tensor.mul_(factor if rows else factor[:, None])


@functools.lru_cache
def one_process(job_json: str, steps: int, uneven: bool) -> dict[str, Any]:
    return record(0, 1, Case(Job.model_validate_json(job_json), steps, uneven))


def both(case: Case) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one process and each rank of the job's layout record."""
    job = case.job
    alone = job.model_copy(update={"layout": type(job.layout)(), "keep": type(job.keep)()})
    ranks = run_ranks(job.layout.world_size, record, case, timeout_s=100)
    return one_process(alone.model_dump_json(), case.steps, case.uneven), ranks


def one_history(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The histories of all ranks; those of one tensor must be the same bits."""
    found: dict[str, np.ndarray] = {}
    for rank in ranks:
        for name, history in rank["histories"].items():
            assert (found.setdefault(name, history) == history).all(), f"ranks differ in the history of {name}"
    return found


def excess(one: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Relative errors: of the first loss, all losses, and of the worst gradient of the first step, by name; of a matrix
    the worst of its quarters."""
    wanted, found = whole([one["gradients"]]), whole([r["gradients"] for r in ranks])
    assert wanted.keys() == found.keys()
    norms = {n: max(map(_error, _quarters(found[n]), _quarters(g))) for n, g in wanted.items()}
    worst = max(norms, key=lambda n: norms[n])
    losses = [abs(a / b - 1) for a, b in zip(ranks[0]["losses"], one["losses"], strict=True)]
    return {"first loss": losses[0], "losses": max(losses), "gradient": norms[worst], worst: norms[worst]}


def _quarters(matrix: np.ndarray) -> list[np.ndarray]:
    return [part for half in np.array_split(matrix, 2) for part in np.array_split(half, 2, axis=half.ndim - 1)]


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / (np.linalg.norm(wanted) + 1e-30))
