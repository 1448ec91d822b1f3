"""The answer to `bessemer plan goodput`, as an object, as JSON and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bessemer.core.units import format_seconds
from bessemer.plan.faults import FLEETS, Sourced, mean_time_to_failure
from bessemer.plan.goodput import Estimate, Mode
from bessemer.plan.goodput_advice import Advice, ModeAdvice
from bessemer.plan.goodput_inputs import Asked
from bessemer.plan.goodput_simulation import Simulated

__all__ = ["Goodput"]

WAYS = {
    "disk": "disk: all restart",
    "memory": "memory: all restart",
    "zero": "zero: survivors go on",
}
LOSSES = {
    "recovery": "recovery",
    "fallback": "fall-backs",
    "no_spare": "no spare",
    "capacity": "missing",
    "checkpoints": "saving",
    "redone": "redone",
}


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What becomes of the time of a job: by mode, with the advice for a target, and every input with its source.

    `simulated`: the Monte Carlo of each mode's estimate.
    """

    asked: Asked
    advice: Advice
    simulated: dict[Mode, Simulated]

    @property
    def mttf_by_fleet(self) -> dict[str, Sourced]:
        """Mean time to failure, seconds, of a job of this size by every fleet that is known."""
        return {name: mean_time_to_failure(of, self.asked.inputs.gpus) for name, of in FLEETS.items()}

    def as_json(self) -> dict[str, Any]:
        """All figures; times in seconds, shares as fractions. `effective_time` and `spares` are the choice's, or the
        best mode's where none reaches the target."""
        shown = self._shown()
        return {
            "gpus": self.asked.inputs.gpus,
            "fleet": self.asked.fleet.name,
            "target": self.advice.target,
            "reached": self.advice.choice is not None,
            "mode": shown.mode,
            "spares": shown.estimate.spares,
            "interval_s": shown.estimate.interval_s,
            "effective_time": shown.estimate.effective_time,
            "effective_time_all_devices": shown.estimate.effective_time_all_devices,
            "goodput": shown.estimate.goodput,
            "mttf_s": self.asked.inputs.mttf_s,
            "mttf_by_fleet_s": {name: s.value for name, s in self.mttf_by_fleet.items()},
            "failures": [asdict(rate) for rate in self.asked.layers],
            "modes": {m.mode: self._mode_json(m) for m in self.advice.modes},
            "inputs": {name: asdict(source) for name, source in self.asked.sources.items()},
            "kind": "modelled",
        }

    def _shown(self) -> ModeAdvice:
        choices = [m for m in self.advice.modes if m.mode == self.advice.choice]
        return choices[0] if choices else max(self.advice.modes, key=lambda m: m.estimate.effective_time_all_devices)

    def _mode_json(self, m: ModeAdvice) -> dict[str, Any]:
        simulated = self.simulated[m.mode]
        return {
            "reaches": m.reaches,
            **asdict(m.estimate),
            "goodput": m.estimate.goodput,
            "with_spares_enough": m.best.effective_time,
            "overcome_s": m.overcome_s,
            "overcome_limit_s": m.overcome_limit_s,
            "young_interval_s": m.estimate.young_interval_s,
            "daly_interval_s": m.estimate.daly_interval_s,
            "simulated": asdict(simulated),
        }

    def __str__(self) -> str:
        return "\n".join(
            [*self._head(), "", *self._failures(), "", *self._modes(), "", *self._answer(), "", *self._said()]
        )

    def _head(self) -> list[str]:
        inputs = self.asked.inputs
        mttf = self.asked.sources["mttf_s"]
        others = ", ".join(
            f"{name} {format_seconds(s.value)}"
            for name, s in self.mttf_by_fleet.items()
            if name != self.asked.fleet.name
        )
        return [
            f"goodput of {inputs.gpus:,} accelerators ({inputs.nodes:,} nodes, {inputs.replicas} replicas of "
            f"{inputs.unit}); modelled",
            f"  a failure every {format_seconds(inputs.mttf_s)} ({mttf.kind}: {mttf.source})",
            f"  by other fleets: {others}",
        ]

    def _failures(self) -> list[str]:
        lines = [f"{'failures of':<12} {'share':>7} {'a day':>8} {'noticed after':>15}  causes"]
        for rate in self.asked.layers:
            causes = ", ".join(rate.causes[:3]) + (" ..." if len(rate.causes) > 3 else "")
            noticed = format_seconds(rate.detection_s)
            lines.append(f"  {rate.layer:<10} {100 * rate.share:>5.1f} % {rate.per_day:>8.3g} {noticed:>15}  {causes}")
        return lines

    def _modes(self) -> list[str]:
        lines = [_row("mode", ["spares", "save every", "effective", "all devices", "simulated"])]
        for m in self.advice.modes:
            e, s = m.estimate, self.simulated[m.mode]
            cells = [
                f"{e.spares:,}" if e.spares is not None else "enough",
                format_seconds(e.interval_s),
                _percent(e.effective_time),
                _percent(e.effective_time_all_devices),
                f"{100 * s.effective_time:.2f}+-{100 * s.standard_error:.2f}",
            ]
            lines.append(_row("  " + WAYS[m.mode], cells))
        lines += ["", _row("time lost to", list(LOSSES.values()))]
        for m in self.advice.modes:
            lines.append(_row("  " + WAYS[m.mode], [_percent(m.estimate.losses[name]) for name in LOSSES]))
        e = self._shown().estimate
        lines.append(
            f"  Waiting for the slowest of {self.asked.inputs.nodes:,} nodes takes {_percent(1 - e.pace)} of each step "
            f"beside: goodput of all devices in mode {e.mode} {_percent(e.goodput)}."
        )
        return lines

    def _answer(self) -> list[str]:
        goal = f"{100 * self.advice.target:g} %"
        if self.advice.choice is not None:
            e = self._shown().estimate
            young, daly = e.young_interval_s, e.daly_interval_s
            rules = f" (Young {format_seconds(young)}, Daly {format_seconds(daly)})" if young and daly else ""
            lines = [
                f"{goal} effective time: mode {e.mode}, {_nodes(e)}, a save every "
                f"{format_seconds(e.interval_s)}{rules}: {_percent(e.effective_time)}"
            ]
        else:
            lines = [f"{goal} effective time is out of reach:"]
        for m in self.advice.modes:
            if not m.reaches:
                lines.append(f"  mode {m.mode}: {_percent(m.best.effective_time)} with spares enough; {_obstacle(m)}")
        return lines

    def _said(self) -> list[str]:
        lines = ["inputs (another value: --set NAME=VALUE)"]
        for name, s in self.asked.sources.items():
            lines.append(f"  {name:<17} {s.value:>10,.5g}  {s.kind}: {s.source}")
        return lines


def _row(title: str, cells: list[str]) -> str:
    return f"{title:<24}" + "".join(f"{cell:>14}" for cell in cells)


def _nodes(e: Estimate) -> str:
    return f"{e.spares:,} spare node{'' if e.spares == 1 else 's'}" if e.spares is not None else "spares enough"


def _obstacle(m: ModeAdvice) -> str:
    if m.overcome_limit_s is None:
        loss = max(m.at_once.losses, key=lambda name: m.at_once.losses[name])
        what = f"{LOSSES[loss]} {_percent(m.at_once.losses[loss])}"
        return f"even if training went on at once it would be {_percent(m.at_once.effective_time)} ({what})"
    if m.overcome_s <= m.overcome_limit_s:
        return "it lacks spares"
    now, most = format_seconds(m.overcome_s), format_seconds(m.overcome_limit_s)
    return f"a failure may take {most} until training goes on, and takes {now}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
