"""The grid of small models behind a scaling law: which are trained, how one is trained, and what it is known by.

Llama blocks on bytes of Python's standard library. Weights and inputs of all linear layers of the blocks are rounded
in the forward pass, and read so by the backward pass; gradients, sums, attention, embedding, head and norms stay as
under bf16, parameters and optimizer in float32. A point is known by everything that decides its loss, so a finished
one is never trained again. Formats of the same size share a seed; the intervals take it that they err together.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.core.errors import NonFinite, RequestError
from bessemer.core.job import Job
from bessemer.core.resolve import resolve_model
from bessemer.keep.records import read_records

__all__ = [
    "DEFAULT_MORE",
    "GridPoint",
    "GridSpec",
    "bits_of",
    "finished",
    "grid",
    "quantised_parameters",
    "train_point",
]

LAYERS, HEAD = 2, 32
SEQ, BATCH = 128, 4
"""Sequences of a step, each of so many bytes. Few, since what small models need is steps."""
EVAL_SEQUENCES = 512
BASE_LR, BASE_WIDTH, LR_POWER = 1.8e-3, 128, 0.8
"""Found by a few runs in bf16 of widths 64 to 256: about the best of each at 0.25 M tokens."""
HIGH = "bf16"


def bits_of(name: str) -> tuple[int, int]:
    """(exponent, mantissa) bits of "e2m1" or "bf16"; RequestError for another word."""
    word = "e8m7" if name == HIGH else name
    exponent, _, mantissa = word.removeprefix("e").partition("m")
    if word[:1] == "e" and exponent.isdigit() and mantissa.isdigit() and 1 <= int(exponent) <= 8 >= int(mantissa) + 1:
        return int(exponent), int(mantissa)
    what = f"{name!r} is no format of 1 to 8 exponent and 0 to 7 mantissa bits"
    raise RequestError(what, code="lab-format", fix="for instance e4m3, e2m1, e1m1 (a 3-bit integer) or bf16")


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One model: `weight` and `inputs` are formats (e2m1, bf16), `block` the elements to a scale (0: the tensor)."""

    width: int
    tokens: int
    weight: str
    inputs: str
    block: int = 0
    repeat: int = 0

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / (SEQ * BATCH)))

    @property
    def high(self) -> bool:
        """Whether nothing is quantised."""
        return self.weight == self.inputs == HIGH

    @property
    def name(self) -> str:
        formats = self.weight if self.weight == self.inputs else f"{self.weight} weights, {self.inputs} inputs"
        blocks = f" in blocks of {self.block}" if self.block else ""
        return f"width {self.width}, {self.tokens / 1e6:.3g} M tokens, {formats}{blocks}"

    @property
    def effort(self) -> float:
        """Relative time: measured on a Zen 4 core, where small products cost more than their arithmetic."""
        dear = 1.0 if self.high else 2.0 + 0.5 * (self.block > 0)
        return self.tokens * (10 + self.width * (1 + self.width / 400) / 8) * dear

    def job(self, cache: str) -> Job:
        """The training job, in bf16 but for what `how` of `train_point` replaces."""
        fields = self._fields()
        return Job.model_validate({**fields, "data": {**fields["data"], "cache": cache}})

    def _fields(self) -> dict[str, dict[str, Any]]:
        alike = f"{self.width} {self.tokens} {self.repeat}"
        seed = int.from_bytes(hashlib.sha256(alike.encode()).digest()[:4], "big")
        return {
            "model": {
                "family": "llama", "vocab_size": 257, "hidden_size": self.width, "intermediate_size": 2 * self.width,
                "num_hidden_layers": LAYERS, "num_attention_heads": self.width // HEAD,
                "num_key_value_heads": self.width // HEAD, "max_position_embeddings": SEQ,
                "tie_word_embeddings": False,
            },
            "data": {"corpus": "python-stdlib", "tokenizer": "bytes", "seq_len": SEQ, "workers": 0},
            "train": {
                "steps": self.steps, "global_batch": BATCH, "micro_batch": BATCH, "seed": seed,
                "lr": BASE_LR * (BASE_WIDTH / self.width) ** LR_POWER, "warmup_steps": max(1, self.steps // 10),
                "eval_sequences": EVAL_SEQUENCES,
            },
        }  # fmt: skip

    @property
    def key(self) -> str:
        """16 hex digits over what decides the loss; the corpus comes with Python. Fields of a job that aren't set here
        are at defaults which change nothing."""
        decides = [self._fields(), self.weight, self.inputs, self.block, platform.python_version()]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """Every width with every number of tokens in every format, the same for weights and inputs. `probes` adds, at the
    second width, what the laws need to tell their constants apart: one operand alone, other divisions of the bits,
    blocks, and repetitions with other seeds."""

    widths: Sequence[int] = (64, 96, 160, 256)
    tokens: Sequence[int] = (100_000, 200_000, 400_000)
    formats: Sequence[str] = ("bf16", "e2m2", "e2m1", "e1m1")
    probes: bool = True
    more: Sequence[GridPoint] = field(default=())


DEFAULT_MORE = tuple(
    GridPoint(width=width, tokens=800_000, weight=name, inputs=name)
    for width in (64, 96)
    for name in ("bf16", "e2m1", "e1m1")
)
"""Long runs of the small models, where tokens are many for each parameter."""


def grid(spec: GridSpec) -> list[GridPoint]:
    """The points in an order that mixes them, so that a grid that was stopped spans what the whole one does.
    RequestError for what can't be trained."""
    for name in spec.formats:
        bits_of(name)
    if bad := [w for w in spec.widths if w < HEAD or w % HEAD]:
        raise RequestError(f"width {bad[0]} is no multiple of {HEAD}", code="lab-width", fix=f"--widths {HEAD * 2},...")
    if bad := [d for d in spec.tokens if d < 10 * SEQ * BATCH]:
        what = f"{bad[0]} tokens are fewer than ten steps of {SEQ * BATCH}"
        raise RequestError(what, code="lab-tokens", fix=f"--tokens {100 * SEQ * BATCH},...")
    points = [
        GridPoint(width=width, tokens=tokens, weight=name, inputs=name)
        for width in spec.widths
        for tokens in spec.tokens
        for name in spec.formats
    ]
    if spec.probes:
        points += _probes(sorted(spec.widths)[min(1, len(spec.widths) - 1)], sorted(spec.tokens))
    return sorted(dict.fromkeys([*points, *spec.more]), key=lambda p: p.key)


def _probes(width: int, tokens: Sequence[int]) -> Iterable[GridPoint]:
    middle = tokens[len(tokens) // 2]
    for count in tokens:
        for weight, inputs in (("e1m1", HIGH), (HIGH, "e1m1"), ("e2m1", HIGH), (HIGH, "e2m1")):
            if count >= middle:
                yield GridPoint(width=width, tokens=count, weight=weight, inputs=inputs)
        for name in ("e4m3", "e3m2"):
            yield GridPoint(width=width, tokens=count, weight=name, inputs=name)
    for name in ("e2m0", "e3m0", "e1m2", "e3m1", "e1m3"):
        yield GridPoint(width=width, tokens=middle, weight=name, inputs=name)
    for name in ("e2m1", "e1m1"):
        for count in (middle, tokens[-1]):
            yield GridPoint(width=width, tokens=count, weight=name, inputs=name, block=32)
    for name in (HIGH, "e2m1", "e1m1"):
        for repeat in (1, 2):
            yield GridPoint(width=width, tokens=middle, weight=name, inputs=name, repeat=repeat)


def finished(path: Path) -> dict[str, dict[str, Any]]:
    """Key -> record of each finished point. A torn last line doesn't count."""
    return {record["key"]: record for record in read_records(path)}


def quantised_parameters(width: int) -> int:
    """Elements of the matrices of the blocks: 4 w^2 of attention and 3 w (2 w) of the MLP in each."""
    return LAYERS * 10 * width * width


def train_point(point: GridPoint, cache: str, alive: Callable[[], None] = lambda: None) -> Mapping[str, Any]:
    """Trains a model in this process, on its own, and tells its record. `alive` is called before each step.

    A loss that isn't finite ends the training: the record then has "loss": None. Seconds are of training alone.
    """
    import torch

    from bessemer.data import open_dataset, prepare
    from bessemer.parallel.mesh import build_mesh
    from bessemer.train.assembly import assemble
    from bessemer.train.evaluate import evaluate, to_tensors
    from bessemer.train.step import rank_micro_batches

    job = point.job(cache)
    spec = resolve_model(job.model)
    mesh = build_mesh(job, 0, torch.device("cpu"), spec)
    prepared = prepare(job)
    data, held_out = open_dataset(job, "train", prepared), open_dataset(job, "val", prepared)
    wall, cpu = time.perf_counter(), time.process_time()
    parts = assemble(job, spec, mesh, _quantising(point, spec))
    loss: float | None = None
    try:
        for step in range(point.steps):
            alive()
            lists = rank_micro_batches(job, step, 0, 0)
            batches = (to_tensors(data.batch(ids), mesh.device) for ids in lists)
            parts.step.run(step, batches, len(lists))
        loss = evaluate(parts.step.passes, held_out, sequences=EVAL_SEQUENCES, micro_batch=16).loss
    except NonFinite:
        pass
    return {
        "key": point.key,
        **vars(point),
        "parameters": quantised_parameters(point.width),
        "trained_tokens": point.steps * SEQ * BATCH,
        "loss": loss,
        "cpu_s": round(time.process_time() - cpu, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "pid": os.getpid(),
    }


def _quantising(point: GridPoint, spec: Any) -> Any:
    """What `assemble` quantises: every matrix of every block, or nothing for bf16."""
    from bessemer.models.quantise import Quantising, why_kept
    from bessemer.precision.formats import float_format
    from bessemer.precision.numerics import emulated
    from bessemer.precision.scaled import TENSOR, Grain

    if point.high:
        return None
    grain = Grain(1, point.block) if point.block else TENSOR
    weight, inputs = (float_format(*bits_of(name)) for name in (point.weight, point.inputs))
    how = Quantising(emulated(inputs, weight, grain=grain))
    kept = [name for (_, name), why in why_kept(spec, how).items() if why and name != "head"]
    assert not kept, f"{kept} would stay in bf16"
    return how
