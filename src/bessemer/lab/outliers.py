"""What loud SwiGLU channels do to training under FP8, and whether Smooth-SwiGLU mends it: the arms of the study, what
came out, and how it reads. Imports no torch.

In every block two channels have gate = up scaled by A and their column of `down` divided by A^2, and stay so: their
part of h grows by A^2 (how outliers arise in long runs: Fishman et al., arXiv 2409.12517), so that one scale has to
serve it and all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bessemer.core.errors import RequestError
from bessemer.core.job import Job
from bessemer.lab.parity import DIVERGED, curves
from bessemer.lab.plots import difference_plot, standalone
from bessemer.lab.statistics import LEVEL, Comparison, compare, deviation
from bessemer.plan.text import table

__all__ = ["ARMS", "BASE", "CHANNELS", "PLAIN", "SMOOTH", "Outliers", "OutlierRun", "difference_of", "gather", "study"]

CHANNELS = 2
"""Loud channels of each block: one and its negative."""

BASE, PLAIN, SMOOTH = "bf16", "fp8-current", "fp8-current smooth"
ARMS = {BASE: ("bf16", False), PLAIN: ("fp8-current", False), "fp8-delayed": ("fp8-delayed", False),
        SMOOTH: ("fp8-current", True)}  # fmt: skip
"""Name -> recipe, and whether with Smooth-SwiGLU."""

QUANTITIES = {"val_loss": "validation loss", "train_loss": "training loss, second half"}

GEMM_COLUMNS = {"bf16": "bf16", "tensor": "per tensor", "stale": "stale scale", "row": "per row", "block": "block128",
                "mx": "MXFP8", "nvfp4": "NVFP4", "smooth": "smooth"}  # fmt: skip

MODEL = {
    "family": "llama",
    "vocab_size": 257,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class OutlierRun:
    """One arm with one seed."""

    arm: str
    amplification: float
    job: Job

    @property
    def key(self) -> dict[str, Any]:
        """What its numbers follow from."""
        return {"job": self.job.identity, "amplification": self.amplification, "channels": CHANNELS}

    @property
    def title(self) -> str:
        return f"{self.arm} seed {self.job.train.seed}"

    @property
    def kind(self) -> str:
        return self.arm

    @property
    def steps(self) -> int:
        return self.job.train.steps


def study(amplification: float, steps: int, seeds: int) -> list[OutlierRun]:
    """The runs, seed by seed: a Llama of 2.9 M parameters on the bytes of the Python standard library, 512 tokens a
    step. RequestError where they couldn't answer."""
    for wrong, name, value, why, fix in (
        (not 1 <= amplification <= 1e6, "amplification", amplification, "it is a factor from 1 to a million", "1024"),
        (steps < 20, "steps", steps, "the means of the second half need some steps", "100"),
        (seeds < 2, "seeds", seeds, "the spread between seeds can't be seen with fewer than two", "5"),
    ):
        if wrong:
            raise RequestError(f"--{name} {value:g}: {why}", code=f"lab-{name}", fix=f"--{name} {fix}")
    runs = []
    for seed in range(seeds):
        for arm, (recipe, smooth) in ARMS.items():
            job = Job.model_validate(
                {
                    "model": MODEL,
                    "data": {"corpus": "python-stdlib", "tokenizer": "bytes", "seq_len": 128},
                    "train": {"steps": steps, "global_batch": 4, "micro_batch": 4, "lr": 1.5e-3, "warmup_steps": 10,
                              "lr_schedule": "constant", "seed": seed, "eval_sequences": 128},
                    "precision": {"recipe": recipe, "smooth": smooth},
                }
            )  # fmt: skip
            runs.append(OutlierRun(arm, amplification, job))
    return runs


@dataclass(frozen=True, kw_only=True)
class Outliers:
    """`gemm[A]` as `precision.outliers.down_errors` gives it. `losses[arm][quantity]`: a value a seed; `curves[arm]`:
    training losses [seeds, steps]. `mended`: Smooth-SwiGLU against the plain recipe, of the same seeds; empty where
    one of them diverged. `diverged`: the seeds without a loss of each arm that has such; it stands nowhere else."""

    amplification: float
    steps: int
    gemm: Mapping[float, Mapping[str, float]]
    losses: dict[str, dict[str, tuple[float, ...]]]
    curves: dict[str, NDArray[np.float64]]
    comparisons: dict[str, dict[str, Comparison]]
    mended: dict[str, Comparison]
    diverged: dict[str, tuple[int, ...]]

    def as_json(self) -> dict[str, Any]:
        """Losses in nats a byte, errors relative."""
        compared = {
            arm: {key: {**c.as_json(), "finding": _finding(c)} for key, c in by.items()}
            for arm, by in self.comparisons.items()
        }
        return {
            "gemm": {f"{a:g}": dict(errors) for a, errors in self.gemm.items()},
            "amplification": self.amplification,
            "steps": self.steps,
            "level": LEVEL,
            "arms": {
                arm: {
                    "losses": self.losses.get(arm, {}),
                    "comparisons": compared.get(arm, {}),
                    "diverged_seeds": list(self.diverged.get(arm, ())),
                }
                for arm in self._arms
            },
            "smooth_against_plain": {key: c.as_json() for key, c in self.mended.items()},
        }

    def __str__(self) -> str:
        return "\n".join([*_gemm_text(self.gemm), "", *self._training_text()])

    @property
    def _arms(self) -> tuple[str, ...]:
        return (*self.losses, *self.diverged)

    def _training_text(self) -> list[str]:
        seeds = len(self.losses[BASE]["val_loss"])
        lines = [f"training at A = {self.amplification:g}: {self.steps} steps, {seeds} seeds, paired by seed"]
        for key, words in QUANTITIES.items():
            noise = deviation(self.losses[BASE][key])
            lines += ["", f"{words}, nats a byte (seed noise {noise:.4f})"]
            heads = ("arm", "mean", f"- {BASE}", f"{1 - 2 * LEVEL:.0%} interval", "p", "finding")
            lines += table(heads, [self._row(arm, key) for arm in self._arms])
            if key in self.mended:
                c = self.mended[key]
                lines.append(f"  {SMOOTH} - {PLAIN}: {c.mean:+.4f} ({c.low:+.4f} to {c.high:+.4f}), p {c.p_value:.4f}")
        return lines

    def _row(self, arm: str, key: str) -> tuple[str, ...]:
        if arm in self.diverged:
            seeds = len(self.losses[BASE][key])
            return arm, "", "", "", "", f"{DIVERGED} in {len(self.diverged[arm])} of {seeds} seeds"
        mean = f"{float(np.mean(self.losses[arm][key])):.4f}"
        if arm == BASE:
            return arm, mean, "", "", "", ""
        c = self.comparisons[arm][key]
        return arm, mean, f"{c.mean:+.4f}", f"{c.low:+.4f} to {c.high:+.4f}", f"{c.p_value:.4f}", _finding(c)


def _finding(c: Comparison) -> str:
    """Whether the difference was measured at all: on which side of zero its interval lies."""
    if c.low > 0:
        return "measurably worse"
    return "measurably better" if c.high < 0 else "no measurable difference"


def _gemm_text(gemm: Mapping[float, Mapping[str, float]]) -> list[str]:
    rows = [
        (f"{a:g}", *(f"{e[key]:.4f}" for key in GEMM_COLUMNS), f"{e['zeros']:.1%}", f"{e['smooth-zeros']:.1%}")
        for a, e in gemm.items()
    ]
    heads = ("A", *GEMM_COLUMNS.values(), "zeros", "smooth zeros")
    return [
        "the down projection's relative error against float64, two of 512 channels amplified",
        *table(heads, rows),
        "  zeros: what per-tensor scaling flushes to zero of h, without and with Smooth-SwiGLU",
    ]


def difference_of(found: Outliers) -> str:
    """The text of an SVG file: training losses less those of bf16 over the steps."""
    smooth = curves(found.curves)
    return standalone(difference_plot(smooth.steps.tolist(), smooth.losses, BASE))


def gather(
    runs: Sequence[OutlierRun], records: Sequence[Mapping[str, Any]], gemm: Mapping[float, Mapping[str, float]]
) -> Outliers:
    """From the record of each run: `losses`, a value a step, and `val_loss`, which is None where it diverged."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    pairs = list(zip(runs, records, strict=True))
    gone = {arm: tuple(u.job.train.seed for u, r in pairs if u.arm == arm and r["val_loss"] is None) for arm in arms}
    diverged = {arm: seeds for arm, seeds in gone.items() if seeds}
    by_arm = {arm: [r for run, r in pairs if run.arm == arm] for arm in arms if arm not in diverged}
    curves = {arm: np.array([r["losses"] for r in found], dtype=np.float64) for arm, found in by_arm.items()}
    half = runs[0].steps // 2
    losses = {
        arm: {
            "val_loss": tuple(float(r["val_loss"]) for r in found),
            "train_loss": tuple(float(v) for v in curves[arm][:, half:].mean(axis=1)),
        }
        for arm, found in by_arm.items()
    }
    return Outliers(
        amplification=runs[0].amplification,
        steps=runs[0].steps,
        gemm=gemm,
        losses=losses,
        curves=curves,
        comparisons={
            arm: {key: compare(losses[arm][key], losses[BASE][key]) for key in QUANTITIES}
            for arm in by_arm
            if arm != BASE
        },
        mended={}
        if diverged.keys() & {SMOOTH, PLAIN}
        else {key: compare(losses[SMOOTH][key], losses[PLAIN][key]) for key in QUANTITIES},
        diverged=diverged,
    )
