"""docs/validation.md: predicted against measured by source, with the errors of configurations left out of the fit.

The errors of left-out configurations are read from `data/left_out.csv`, which `bessemer.plan.fit --write` stores.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from bessemer.plan.calibration import default_calibration
from bessemer.plan.price import BANDS
from bessemer.plan.rows import Row, Skipped, read_rows
from bessemer.plan.validate import batch_of, constants_of, predict, validate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Group", "accuracy_table", "page"]

BARS = {  # what was asked for: mean, median, 90th percentile in per cent; the second is a quick prototype's figure
    "SIMUMAX": ("2.5 mean", "3.9 mean"),
    "SEQPAR22": ("2.7 mean", "2.7 mean"),
    "MLM21": ("4 / 7", "5.9 / 6.7"),
    "BLOOM": ("5 / 12", "5.2 / 10.7"),
    "MPT H100": ("2 / 6", "2.0 / 8.9"),
    "MPT A100": ("4 / 10", "4.5 / 11.4"),
    "NEMO2407": ("5 / 10", "5.5 / 11.8"),
    "DGXC dense": ("3.5 / 7", "4.4 / 8.3"),
    "DGXC MoE": ("5 / 15", "4.5 / 17.7"),
    "MBRIDGE dense": ("4 / 10", "4.9 / 11.8"),
    "MBRIDGE MoE": ("9 / 20", "13 / 20"),
    "TITAN": ("6 / 15", "11 / 20"),
}
MEMORY_BARS = {"SIMUMAX": "0.5", "BLOOM": "4", "TITAN": "5"}


@dataclass(frozen=True)
class Group:
    """Errors in per cent of a group of rows: (mean, median, 90th percentile of |error|, signed mean, largest)."""

    name: str
    rows: int
    inside: tuple[float, ...]
    left_out: tuple[float, ...]


def _groups() -> list[tuple[str, Callable[[Row], bool]]]:
    def source(name: str) -> Callable[[Row], bool]:
        return lambda row: row.source == name

    def part(name: str, which: Callable[[Row], bool]) -> Callable[[Row], bool]:
        return lambda row: row.source == name and which(row)

    def moe(row: Row) -> bool:
        return bool(row.dims.experts > 0)

    def jax(row: Row) -> bool:
        return row.era.startswith(("jax", "paxml"))

    named = [(n, source(n)) for n in ("SIMUMAX", "SEQPAR22", "SEQPAR22L", "MLM21", "MLM20", "BLOOM")]
    named += [
        ("MPT H100", part("MPT", lambda r: r.gpu == "h100")),
        ("MPT A100", part("MPT", lambda r: r.gpu != "h100")),
        ("NEMO2407", source("NEMO2407")),
        ("DGXC dense", part("DGXC", lambda r: not moe(r) and not jax(r))),
        ("DGXC JAX", part("DGXC", jax)),
        ("DGXC MoE", part("DGXC", moe)),
        ("MBRIDGE dense", part("MBRIDGE", lambda r: not moe(r))),
        ("MBRIDGE MoE", part("MBRIDGE", moe)),
    ]
    named += [(n, source(n)) for n in ("TITAN", "MCORE24", "MOEZOO", "MOEFOLD", "NEMOLONG", "LLAMA3", "MLMEX", "JAXTB")]
    return [*named, ("all dense", lambda r: not moe(r)), ("all MoE", moe), ("all", lambda r: True)]


def accuracy_table(path: Path) -> list[Group]:
    """The groups of docs/validation.md over the rows of `path` that have a step time."""
    rows = [r for r in read_rows(path)[0] if r.measured_s]
    seconds, _ = predict(batch_of(rows), constants_of(rows, default_calibration()), memory=False)
    measured = np.array([r.measured_s for r in rows], float)
    text = (resources.files("bessemer.plan") / "data" / "left_out.csv").read_text(encoding="utf-8")
    stored = {line["id"]: float(line["predicted_s"]) for line in csv.DictReader(text.splitlines())}
    left_out = np.array([stored.get(r.id, np.nan) for r in rows])
    table = []
    for name, which in _groups():
        at = np.array([which(r) for r in rows])
        if at.any():
            inside, outside = seconds[at] / measured[at] - 1, left_out[at] / measured[at] - 1
            table.append(Group(name, int(at.sum()), _statistics(inside), _statistics(outside[np.isfinite(outside)])))
    return table


def _statistics(errors: NDArray[np.float64]) -> tuple[float, ...]:
    if not len(errors):
        return (np.nan,) * 5
    size = np.abs(errors) * 100
    return (
        float(size.mean()),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(errors.mean() * 100),
        float(size.max()),
    )


def page(path: Path) -> str:
    """The whole of docs/validation.md as Markdown."""
    rows, skipped = read_rows(path)
    found = validate(path)
    lines = [
        "# How far the planner is off",
        "",
        f"{len(rows)} published training steps, predicted by `bessemer plan validate --rows {path.as_posix()}`;",
        "written by `make docs`. Where the rows come from: `tests/plan/measured_sources.csv`. Errors are",
        "predicted / measured - 1, in per cent. *In the fit*: all rows were used to fit the constants.",
        "*Left out*: the row's configuration (source, model, GPU, dtype, tp, pp, cp, ep) was not, in ten",
        "groups of configurations; all releases and scales of a",
        "configuration left together. The model's structure and the rules for fields that a source doesn't print were",
        "chosen while looking at these rows, so even the left-out errors are a little optimistic. Fitted with",
        "`python -m bessemer.plan.fit --rows tests/plan/measured_training.csv --write`.",
        "",
        "## Step time",
        "",
        "| source | rows | in the fit: mean / median / p90 | left out: mean / median / p90 | left out, signed "
        "| largest | asked for (median / p90) | prototype |",
        "| --- | --: | --- | --- | --: | --: | --- | --- |",
    ]
    for group in accuracy_table(path):
        inside, outside = (" / ".join(f"{x:.1f}" for x in g[:3]) for g in (group.inside, group.left_out))
        asked, prototype = BARS.get(group.name, ("", ""))
        lines.append(
            f"| {group.name} | {group.rows} | {inside} | {outside} | {group.left_out[3]:+.1f} "
            f"| {group.left_out[4]:.0f} | {asked} | {prototype} |"
        )
    lines += _memory(found["sources"])
    lines += _reading()
    lines += _skipped(skipped)
    lines += _columns()
    return "\n".join(lines) + "\n"


def _memory(sources: dict[str, dict[str, float]]) -> list[str]:
    lines = [
        "",
        "## Peak memory",
        "",
        "| source | rows | mean absolute error | asked for |",
        "| --- | --: | --: | --: |",
    ]
    for name, found in sources.items():
        if found["mem_rows"]:
            bar = MEMORY_BARS.get(name, "")
            lines.append(f"| {name} | {found['mem_rows']} | {found['mem_mean_ape'] * 100:.2f} | {bar} |")
    return [
        *lines,
        "",
        "The memory constants (fixed part, activations, bytes a logit) of BLOOM and TITAN were set on these rows.",
        "SIMUMAX has none but two counted coefficients of the loss; it measured allocated memory, the others what the",
        "device reports.",
    ]


def _reading() -> list[str]:
    bands = ", ".join(f"{name} +-{width * 100:.0f} %" for name, width in BANDS.items())
    return [
        "",
        "## How to read it",
        "",
        f"* The band that every price carries: {bands}.",
        "  Uncalibrated means a GPU of which no row was in the fit.",
        "* The same printed configuration across software releases differs by 4.9 % in MBRIDGE, 1.9 % in DGXC",
        "  and 2.2 % in BLOOM (mean distance from the group's mean): no predictor without a release gets below that.",
        "* Weak: MOEFOLD (micro-batch, virtual stages, dp are not printed), MOEZOO left out (its GB200 and GB300 rows",
        "  are of configurations that nothing else resembles), DeepSeek-V3 on B200 over InfiniBand (its exchanges hide",
        "  far better than the one fitted share says), GPT-OSS (needs a separate constant for experts with biases),",
        "  Qwen3-30B with one sequence a micro-batch on B200 (host-bound, and it alone shows how much), steps under",
        "  0.7 s on 512 GPUs in MPT.",
        "",
        "## Vendors' end-to-end claims, modelled",
        "",
        "On the uncalibrated machine `full-mesh-8` (`tests/plan/test_collectives.py`): all-reduce of eight in 7.8",
        "us in one step against 53 us in a ring, and 194 GB/s between hosts, are reproduced within 2 %. An engine",
        "for exchanges (published: about 10 % on Llama) is worth 13 % (8B, tp 8), 15 % (8B, FSDP) and 8 % (70B, tp",
        "8). FP8 (published: 20-30 %) is worth 30 % on Llama-3-8B, 29 % on Qwen3-8B, 21 % on DeepSeek-V3, and 18 %",
        "on DeepSeek-V2: less than published there.",
    ]


def _skipped(skipped: list[Skipped]) -> list[str]:
    counts: dict[tuple[str, str], int] = {}
    for s in skipped:
        counts[s.source, s.reason] = counts.get((s.source, s.reason), 0) + 1
    lines = ["", "## Rows left out", "", "| source | rows | why |", "| --- | --: | --- |"]
    lines += [f"| {source} | {count} | {reason} |" for (source, reason), count in sorted(counts.items())]
    return lines


def _columns() -> list[str]:
    return [
        "",
        "## The file of rows",
        "",
        "CSV with a header; an empty field means that the source doesn't print it. Needed: `id`, `gpu`, `seq_len`,",
        "`n_gpus`, `gbs` (sequences), an architecture (`layers`, `hidden`, `heads`, and `ffn`, `vocab`, `kv_heads`,",
        "`head_dim`, `num_experts`, `topk`, `moe_ffn`, `shared_expert_ffn`, `dense_layers`, `mla` where",
        "needed), degrees (`tp pp cp ep etp`, `vpp`: model chunks a pipeline rank) or `dp_sharding`, and one of",
        "`step_time_s`, `tokens_per_s_per_gpu`, `tflops_per_gpu`, `mfu_pct` or `peak_mem` with `mem_unit`. Used where",
        "given: `mbs`, `recompute`, `recompute_detail`, `sp`, `dtype`, `framework`, `year`, `network`,",
        "`gpus_per_node`, `task`, `notes`, `flops_convention`. What is missing is filled by a rule on",
        "source, software and the other",
        "fields, and the row lists it under `assumed`.",
    ]
