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

from bessemer.plan.calibration import Calibration, Constant, Constants, default_calibration
from bessemer.plan.rows import Row, read_rows
from bessemer.plan.validate import Batch, batch_of, predict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Problem", "fit", "leave_out"]

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
