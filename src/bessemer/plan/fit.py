"""Fits the calibration's constants to measured rows: `python -m bessemer.plan.fit --rows CSV [--write] [--folds 10]`.

Least squares of log(predicted / measured) with a soft-L1 loss, rows of a source weighted by 1/sqrt(rows / 10), and a
log-normal prior on every constant (`prior`, `spread` in the files). Starting point and prior are the same, so that a
constant that no row speaks about stays where it was put. Errors that count are those of configurations that were not
in the fit: all rows of a (source, model, GPU, dtype, tp, pp, cp, ep) leave together, in `folds` groups.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bessemer.plan.calibration import ERAS, Calibration, Constant, Constants, default_calibration
from bessemer.plan.rows import Row, read_rows
from bessemer.plan.validate import Batch, batch_of, predict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Problem", "fit", "leave_out", "write_calibration"]

NOISE = 0.05
"""Standard deviation of a well-modelled row's log error: weighs data against priors."""


class Problem:
    """Rows, the free constants, and which constant each field of each row reads."""

    def __init__(self, rows: Sequence[Row], calibration: Calibration) -> None:
        self.rows = [r for r in rows if r.measured_s]
        self.calibration = calibration
        self.batch: Batch = batch_of(self.rows)
        self.measured = np.array([r.measured_s for r in self.rows], float)
        self.fields = [f.name for f in dataclasses.fields(Constants)]
        table: dict[str, int] = {}
        self.index = {
            f: np.array([table.setdefault(calibration.key(f, r.gpus, r.era), len(table)) for r in self.rows])
            for f in self.fields
        }
        self.keys = list(table)
        self.values = np.array([calibration.constants[k].value for k in self.keys])
        self.prior = np.array([calibration.constants[k].prior for k in self.keys])
        self.spread = np.array([calibration.constants[k].spread for k in self.keys])
        self.free = np.flatnonzero(self.spread > 0)
        counts = {s: sum(r.source == s for r in self.rows) for s in {r.source for r in self.rows}}
        self.weight = np.array([min(1.0, 1 / np.sqrt(counts[r.source] / 10)) for r in self.rows])

    def constants(self, values: NDArray[np.float64]) -> Constants:
        return Constants(**{f: values[self.index[f]] for f in self.fields})

    def log_error(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        seconds, _ = predict(self.batch, self.constants(values), memory=False)
        return np.log(seconds / self.measured)


def fit(
    problem: Problem, train: NDArray[np.bool_], *, rounds: int = 12, start: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Levenberg-Marquardt over the logarithms of the free constants; all values, fitted ones replaced."""
    prior = np.log(problem.prior[problem.free])
    spread = problem.spread[problem.free]
    x = prior.copy() if start is None else np.log(start[problem.free])

    def expand(at: NDArray[np.float64]) -> NDArray[np.float64]:
        values = problem.values.copy()
        values[problem.free] = np.exp(at)
        return values

    def residuals(at: NDArray[np.float64]) -> NDArray[np.float64]:
        return problem.log_error(expand(at)) * train / NOISE

    def cost(res: NDArray[np.float64], at: NDArray[np.float64]) -> float:
        soft = 2 * (np.sqrt(1 + res**2) - 1)
        return float((problem.weight * soft).sum() + (((at - prior) / spread) ** 2).sum())

    damping, res = 1e-2, residuals(x)
    best = cost(res, x)
    for _ in range(rounds):
        step = 1e-4
        jacobian = np.stack([(residuals(x + step * unit) - res) / step for unit in np.eye(len(x))], axis=1)
        robust = problem.weight / np.sqrt(1 + res**2)
        hessian = (jacobian * robust[:, None]).T @ jacobian + np.diag(1 / spread**2)
        gradient = jacobian.T @ (robust * res) + (x - prior) / spread**2
        improved = False
        for _ in range(6):
            trial = x - np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            trial_res = residuals(trial)
            trial_cost = cost(trial_res, trial)
            if np.isfinite(trial_cost) and trial_cost < best:
                gain, x, res, best = best - trial_cost, trial, trial_res, trial_cost
                damping, improved = damping / 4, True
                break
            damping *= 5
        if not improved or gain < 1e-3 * best * 0.1:
            break
    return expand(x)


def leave_out(
    problem: Problem, folds: int, start: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log errors of each row from the fit that didn't see its configuration, and [folds, keys] the constants."""
    names = sorted({r.configuration for r in problem.rows})
    order = np.random.default_rng(7).permutation(len(names))
    fold_of = {names[i]: n % folds for n, i in enumerate(order)}
    fold = np.array([fold_of[r.configuration] for r in problem.rows])
    errors = np.zeros(len(problem.rows))
    values = []
    for f in range(folds):
        found = fit(problem, fold != f, start=start)
        errors[fold == f] = problem.log_error(found)[fold == f]
        values.append(found)
    return errors, np.array(values)


def write_calibration(problem: Problem, values: NDArray[np.float64], folds: NDArray[np.float64], folder: Path) -> None:
    """Puts the fitted values into the files of `folder`; the band is the range over the folds, 2 % at least."""
    constants = dict(problem.calibration.constants)
    for i in problem.free:
        old, found = constants[problem.keys[i]], float(values[i])
        low, high = float(min(folds[:, i].min(), found * 0.98)), float(max(folds[:, i].max(), found * 1.02))
        rows = int(sum(np.any(problem.index[f] == i) * (problem.index[f] == i).sum() for f in problem.fields))
        source = f"fitted to {rows} published training steps (bessemer.plan.fit)"
        constants[problem.keys[i]] = Constant(_round(found), _round(low), _round(high), old.prior, old.spread, source)
    heads = {"common": "all GPUs and eras", "gpu": "a GPU or its generation", "era": "software of a time"}
    for part, what in heads.items():
        lines = [f"# Constants of {what}. Fields: bessemer.plan.calibration.Constants; fitted by bessemer.plan.fit."]
        for key in sorted(k for k in constants if k.split(".")[0] == part):
            lines += ["", f"[{_toml_path(key)}]", *(f"{k} = {json.dumps(v)}" for k, v in vars(constants[key]).items())]
        name = {"common": "common", "gpu": "gpus", "era": "eras"}[part]
        (folder / f"{name}.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _toml_path(key: str) -> str:
    """A dotted key with the eras that hold a dot quoted."""
    for era in ERAS:
        if "." in era and key.startswith(f"era.{era}."):
            return f'era."{era}".' + key[len(f"era.{era}.") :]
    return key


def main() -> None:
    """The command line: fits, prints the errors by source, and with --write stores constants and left-out errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows, _ = read_rows(args.rows)
    problem = Problem(rows, default_calibration())
    values = fit(problem, np.ones(len(problem.rows), bool))
    errors, folds = leave_out(problem, args.folds)
    inside = problem.log_error(values)
    for source in sorted({r.source for r in problem.rows}):
        at = np.array([r.source == source for r in problem.rows])
        ape = [np.abs(np.exp(e[at]) - 1) * 100 for e in (inside, errors)]
        print(f"{source:10s} {at.sum():4d} in {ape[0].mean():5.1f} left out {ape[1].mean():5.1f} % mean")
    if args.write:
        here = Path(__file__).parent
        write_calibration(problem, values, folds, here / "calibrations")
        lines = ["id,predicted_s"] + [
            f"{r.id},{r.measured_s * float(np.exp(e)):.6g}"
            for r, e in zip(problem.rows, errors, strict=True)
            if r.measured_s
        ]
        (here / "data" / "left_out.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
