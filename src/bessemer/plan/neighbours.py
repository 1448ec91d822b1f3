"""Around one layout: what each single change costs and why, what breaks first when the job grows, and which of the
machine's figures the step hangs on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bessemer.core.recipes import RECIPES
from bessemer.plan.axes import NAMED, Request, axis_values, divisors
from bessemer.plan.calibration import default_calibration, gpu_of
from bessemer.plan.dims import dims_of
from bessemer.plan.enumerate import rules_of
from bessemer.plan.figures import Priced, prices_of
from bessemer.plan.price import price_arrays
from bessemer.plan.rates import rates_of
from bessemer.plan.replayed import with_replay
from bessemer.plan.space import Layouts

__all__ = ["Limit", "Neighbour", "limits_of", "neighbours_of", "sensitivity_of"]

Row = dict[str, int | str]
_DEGREES = ("dp", "tp", "pp", "cp")


@dataclass(frozen=True)
class Neighbour:
    """One change of a layout. `rules`: codes that it breaks (then it has no price). `delta_s`: seconds it adds to a
    step; `reasons`: the parts of the step that change most, in seconds; `over_bytes`: by how much it doesn't fit."""

    change: str
    layout: Row
    rules: tuple[str, ...] = ()
    delta_s: float | None = None
    memory_bytes: float | None = None
    over_bytes: float = 0.0
    reasons: tuple[tuple[str, float], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "change": self.change,
            "layout": self.layout,
            "rules": list(self.rules),
            "delta_s": self.delta_s,
            "memory_bytes": self.memory_bytes,
            "over_bytes": self.over_bytes,
            "reasons": dict(self.reasons),
        }


def neighbours_of(priced: Priced, index: int) -> list[Neighbour]:
    """Every layout one change away: those that fit by cost, then those that don't fit, then the impossible."""
    request, row = priced.request, priced.layouts.row(index)
    found: list[Neighbour] = []
    changed, texts = [], []
    for text, other in _changes(request, row):
        one = Layouts.of(1, **other)
        broken = rules_of(request, one)
        if broken:
            found.append(Neighbour(text, other, tuple(broken)))
        else:
            changed.append(other)
            texts.append(text)
    if changed:
        many = Layouts.of(len(changed), **{k: [r[k] for r in changed] for k in changed[0]})
        others = with_replay(prices_of(request, many))
        found += [_compared(priced, index, others, i, texts[i]) for i in range(len(changed))]
    return sorted(found, key=lambda n: (bool(n.rules), n.over_bytes > 0, n.delta_s or 0.0))


def _compared(priced: Priced, index: int, others: Priced, i: int, text: str) -> Neighbour:
    before, after = priced.breakdown(index), others.breakdown(i)
    gains = {k: after.get(k, 0.0) - before.get(k, 0.0) for k in {*before, *after}}
    largest = sorted(gains.items(), key=lambda item: -abs(item[1]))[:3]
    return Neighbour(
        change=text,
        layout=others.layouts.row(i),
        delta_s=float(others.prices.step_s[i] - priced.prices.step_s[index]),
        memory_bytes=float(others.prices.memory_bytes[i]),
        over_bytes=max(-float(others.headroom_bytes[i]), 0.0),
        reasons=tuple((k, v) for k, v in largest if abs(v) > 1e-3 * priced.prices.step_s[index]),
    )


def _changes(request: Request, row: Row) -> Iterator[tuple[str, Row]]:
    """(what is changed, the layout) for each step along one axis; degrees trade a prime factor with another degree."""
    for source in _DEGREES:
        size = int(row[source])
        if size == 1:
            continue
        prime = divisors(size)[1]
        for target in _DEGREES:
            if target != source:
                moved = {source: size // prime, target: int(row[target]) * prime}
                text = ", ".join(f"{k} {row[k]} -> {v}" for k, v in moved.items())
                yield text, _settled(row, moved)
    for name in ("micro_batch", "virtual_stages", "ep", "etp"):
        values = sorted({*axis_values(replace(request, fixed={}, space="wide"), name), int(row[name])})
        if name == "virtual_stages":
            values = [v for v in values if request.spec.num_layers % (v * int(row["pp"])) == 0 or v == row[name]]
        at = values.index(int(row[name]))
        for value in (*values[max(at - 1, 0) : at], *values[at + 1 : at + 2]):
            yield f"{name} {row[name]} -> {value}", {**row, name: value}
    for name in ("schedule", "dp_shard", "recompute", "recipe", "cp_kind"):
        for word in NAMED[name]:
            if word != row[name] and _told_apart(request, row, name, word):
                other: Row = {**row, name: word}
                if name == "schedule" and word != "1f1b":
                    other["virtual_stages"] = 1
                yield f"{name} {row[name]} -> {word}", other
    for name in ("sequence_parallel", "tp_overlap", "offload_optimizer", "offload_activations"):
        if int(row["tp"]) > 1 or name.startswith("offload"):
            on = int(row[name]) == 0
            yield f"{name} {'on' if on else 'off'}", _settled(row, {name: int(on)})


def _told_apart(request: Request, row: Row, name: str, word: str) -> bool:
    """Whether another name on an axis is another layout at all, and one that this machine can do."""
    if name == "schedule":
        return int(row["pp"]) > 1
    if name == "cp_kind":
        return int(row["cp"]) > 1
    if name == "dp_shard":
        return int(row["dp"]) * int(row["cp"]) > 1
    if name == "recompute":
        return word != "block"
    recipe = RECIPES[word]
    return word != "fp16" and request.machine.peak(recipe.gemm) is not None


def _settled(row: Row, changed: dict[str, int]) -> Row:
    """The layout after a change, with what has no effect any more at its default."""
    out: Row = {**row, **changed}
    if out["pp"] == 1:
        out.update(schedule="1f1b", virtual_stages=1, first_layers=0, last_layers=0)
    if out["tp"] == 1:
        out.update(sequence_parallel=0, tp_overlap=1)
    elif row["tp"] == 1:
        out.update(sequence_parallel=1, tp_overlap=1)
    elif out["sequence_parallel"] == 0:
        out["tp_overlap"] = 0
    if row["etp"] == row["tp"] and int(row["etp"]) > 1:
        out["etp"] = out["tp"]
    if out["cp"] == 1:
        out["cp_kind"] = "ring"
    if int(out["dp"]) * int(out["cp"]) == 1:
        out["dp_shard"] = "none"
    return out


@dataclass(frozen=True)
class Limit:
    """How far one size of the job may grow (or the cluster shrink) before this layout breaks: at `most` it still
    works, at the next step `breaks` says what does not. `factor`: most / now, for telling what breaks first."""

    size: str
    now: int
    most: int
    factor: float
    breaks: str

    def as_json(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("size", "now", "most", "factor", "breaks")}


def limits_of(priced: Priced, index: int) -> list[Limit]:
    """What breaks first: the sizes by how little they may change, nearest first."""
    request, row = priced.request, priced.layouts.row(index)
    unit = int(row["cp"]) * int(row["tp"]) * 2
    longer = sorted({request.seq_len + max(unit, request.seq_len * k // 8 // unit * unit) for k in range(1, 121)})
    larger = [m for m in divisors(request.global_batch) if m > int(row["micro_batch"])]
    found = [
        _grown("seq_len", request.seq_len, longer,
               lambda s: (replace(request, seq_len=s), row)),
        _grown("micro_batch", int(row["micro_batch"]), larger,
               lambda m: (request, {**row, "micro_batch": m})),
        _shrunk(request, row),
    ]  # fmt: skip
    return sorted((f for f in found if f is not None), key=lambda f: f.factor)


def _grown(size: str, now: int, values: list[int], changed: Any) -> Limit:
    """The last of `values` before the first that breaks, found by bisection: a larger one needs no less."""
    broken = {at: _breaks(*changed(values[at])) for at in (len(values) - 1,)} if values else {}
    if not values or not broken[len(values) - 1]:
        most = values[-1] if values else now
        return Limit(size, now, most, most / now, "nothing in the range that was tried")
    low, high = -1, len(values) - 1
    while high - low > 1:
        middle = (low + high) // 2
        broken[middle] = _breaks(*changed(values[middle]))
        low, high = (low, middle) if broken[middle] else (middle, high)
    most = now if low < 0 else values[low]
    return Limit(size, now, most, most / now, f"{size} {values[high]}: {broken[high]}")


def _shrunk(request: Request, row: Row) -> Limit | None:
    """Fewer data-parallel ranks: less to shard state over."""
    if int(row["dp"]) == 1:
        return None
    least, why = (
        request.num_gpus,
        f"fewer devices than one copy of the model takes ({request.num_gpus // int(row['dp'])})",
    )
    for dp in reversed(divisors(int(row["dp"]))[:-1]):
        gpus = request.num_gpus // int(row["dp"]) * dp
        broken = _breaks(replace(request, num_gpus=gpus), _settled(row, {"dp": dp}))
        if broken:
            why = f"{gpus} devices: {broken}"
            break
        least = gpus
    return Limit("devices", request.num_gpus, least, request.num_gpus / least, why)


def _breaks(request: Request, row: Row) -> str:
    """Why a layout doesn't work for a request; "" where it does."""
    one = Layouts.of(1, **row)
    broken = rules_of(request, one)
    if broken:
        return f"rule {broken[0]}"
    priced = prices_of(request, one)
    over = -float(priced.headroom_bytes[0])
    if over <= 0:
        return ""
    line = next(iter(priced.memory(0)))
    return f"{over / 2**30:.1f} GiB too much memory (stage {int(priced.prices.memory.stage[0])}, most of it {line})"


_KNOBS = {
    "compute rate": ("clock",),
    "memory bandwidth": ("hbm",),
    "scale-up links": ("nvlink",),
    "network cards": ("nic", "nic_alltoall"),
    "kernel gaps": ("gap_s",),
    "host's pace": ("host_dense_s", "host_moe_s"),
}


def sensitivity_of(priced: Priced, index: int, change: float = 0.1) -> dict[str, float]:
    """Share of the step time that is saved where a figure of the machine gets `change` better, largest first."""
    request, one = priced.request, priced.layouts.take(np.array([index]))
    gpus = gpu_of(request.machine)
    constants = (request.calibration or default_calibration()).resolve(gpus, request.era)
    rates, dims, work = rates_of(request.rank_machine), dims_of(request.padded), request.work
    batch = np.array([float(request.global_batch)])

    def step(names: tuple[str, ...]) -> float:
        better = {n: getattr(constants, n) * ((1 - change) if n.endswith("_s") else (1 + change)) for n in names}
        found = price_arrays(one, dims, work, rates, replace(constants, **better), batch, memory=False)
        return float(found.step_s[0])

    base = step(())
    saved = {name: 1 - step(names) / base for name, names in _KNOBS.items()}
    return dict(sorted(saved.items(), key=lambda item: -item[1]))
