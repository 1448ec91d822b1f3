"""The job file: TOML in, one frozen `Job` out. Every field has a default that works on a laptop CPU.

    job = load_job("job.toml", sets=["train.steps=50"])

Spelling mistakes, wrong types and misplaced keys are all reported at once as a `ConfigError`; whether the values
fit together is the business of each room's `problems.py`, which `bessemer check` runs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from bessemer.core.layout import Layout
from bessemer.core.model import Frozen
from bessemer.core.paths import user_path
from bessemer.core.recompute import PartName

__all__ = [
    "Corpus",
    "DataSection",
    "InspectSection",
    "Job",
    "KeepSection",
    "MachineSection",
    "ModelSection",
    "PrecisionSection",
    "RunSection",
    "TrainSection",
]


class RunSection(Frozen):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: str = "runs"  # the run folder is dir/name
    resume: str = "auto"  # "auto" | "never" | the path of a checkpoint folder (step-N)
    tensorboard: bool = False
    takeoff: Literal["auto", "always", "never"] = "auto"  # the short check before training; auto: on several hosts

    @property
    def folder(self) -> Path:
        return user_path(self.dir) / self.name


class ModelSection(Frozen):
    """One of `preset`, `hf` or `family`; further keys are named as in Hugging Face's config.json.

    With `family` they describe the model; with `preset` or `hf` they override (a layer cut, a smaller vocabulary).
    """

    model_config = ConfigDict(extra="allow")

    preset: str | None = None
    hf: str | None = None  # a folder with config.json
    family: str | None = None
    weights: str | None = None  # a Hugging Face folder to start from; else initialised

    @property
    def config_keys(self) -> dict[str, Any]:
        """The keys named as in config.json, in the order of the file."""
        return dict(self.model_extra or {})


class Corpus(Frozen):
    """A part of a mixture: exactly one of `corpus` or `paths`, and its weight."""

    corpus: str | None = None
    paths: tuple[str, ...] = ()
    weight: float = Field(default=1.0, gt=0)


class DataSection(Frozen):
    corpus: str | None = None  # "python-stdlib"; the default when paths and mixture are absent too
    paths: tuple[str, ...] = ()  # globs of .txt .md .py .jsonl .parquet, or Megatron prefixes (x.bin beside x.idx)
    mixture: tuple[Corpus, ...] = ()
    tokenizer: str = "bpe-4096"  # "bpe-N" | "bytes" | the path of a tokenizer.json
    seq_len: int = Field(default=256, gt=0)
    val_fraction: float = Field(default=0.02, ge=0, lt=1)  # of documents, chosen by hash
    document_mask: bool = True  # a token attends only to its own document
    text_key: str = "text"  # of .jsonl lines and .parquet columns
    cache: str = "~/.cache/bessemer"  # tokenised shards and trained tokenizers
    workers: int = Field(default=1, ge=0)  # threads that read ahead; 0: read in the step loop


class TrainSection(Frozen):
    steps: int = Field(default=100, gt=0)
    global_batch: int = Field(default=16, gt=0)  # sequences a step
    micro_batch: int = Field(default=8, gt=0, le=1_000_000)  # sequences a forward pass
    batch_ramp: tuple[tuple[int, int], ...] = ()  # (until step, sequences a step before it), ascending
    lr: float = Field(default=3e-3, gt=0)
    lr_schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)  # of lr, at the last step
    warmup_steps: int | None = Field(default=None, ge=0)  # default: see `warmup`
    decay_fraction: float | None = Field(default=None, gt=0, le=1)  # wsd: the last part of the run; default 0.2
    optimizer: Literal["adamw", "muon"] = "adamw"
    muon_lr: float | None = Field(default=None, gt=0)  # of the hidden matrices; default 0.02
    muon_momentum: float | None = Field(default=None, ge=0, lt=1)  # default 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, ge=0)  # global gradient norm; 0: no clipping
    seed: int = Field(default=1234, ge=0)
    eval_every: int = Field(default=0, ge=0)  # steps; 0: only at the end
    eval_sequences: int = Field(default=64, gt=0)
    compile: Literal["none", "inductor", "aot_eager"] = "none"  # torch.compile's backend for the blocks
    recompute: Literal["none", "full", "block", "mlp", "selective", "ops", "fine", "budget"] = "none"
    recompute_layers: int | None = Field(default=None, gt=0)  # block: of each pipeline rank, the first ones
    recompute_modules: tuple[PartName, ...] | None = None  # fine: the parts of a layer; default: see `FINE`
    recompute_gb: float | None = Field(default=None, gt=0)  # budget: 10^9 bytes of a rank for what blocks keep

    @property
    def warmup(self) -> int:
        """Steps over which lr rises from 0: as given, else a tenth of the run, at most 10. So lr is always reached."""
        return min(10, self.steps // 10) if self.warmup_steps is None else self.warmup_steps


class PrecisionSection(Frozen):
    recipe: str = "bf16"
    history: int | None = Field(default=None, gt=0, le=4096)  # fp8-delayed: steps whose amax counts; default 16
    amax: Literal["max", "most_recent"] | None = None  # fp8-delayed: which of the history scales; default the largest
    margin: int | None = Field(default=None, ge=0, le=16)  # fp8-delayed: 2^margin of room above it; default 0
    stochastic: bool = False  # gradients are rounded up or down by chance, so that their mean is right
    high_first: int = Field(default=0, ge=0)  # of the blocks the first ones that a quantised recipe leaves alone
    high_last: int = Field(default=0, ge=0)  # the last ones
    smooth: bool = False  # Smooth-SwiGLU: a scale for each channel that enters a down projection
    saved: Literal["compute", "fp8"] = "compute"  # what the blocks keep for the backward pass
    gather: Literal["fp32", "bf16", "fp8"] = "fp32"  # the weights that sharded data parallelism gathers
    dispatch: Literal["compute", "fp8"] = "compute"  # rows on their way to experts; results come back as computed
    moments: Literal["fp32", "bf16", "fp8"] = "fp32"  # the optimizer's
    emulate: bool = False  # a device without the recipe's matrix units may emulate it, many times slower
    watch_every: int = Field(default=0, ge=0)  # steps between samples of what quantising did; 0: none
    fall_back: bool = False  # a layer that the watch finds misbehaving goes on without quantising


class KeepSection(Frozen):
    every: int = Field(default=50, ge=0)  # steps between durable checkpoints; 0: only at the end
    keep_last: int = Field(default=3, gt=0)
    keep_every: int = Field(default=0, ge=0)  # checkpoints of steps divisible by this are never deleted; 0: none
    mode: Literal["restart", "zero-interruption"] = "restart"
    replicas: int | None = Field(default=None, gt=0)  # copies of the model; default: dp without sharding, else 1
    min_replicas: int | None = Field(default=None, gt=0)
    spares: int = Field(default=0, ge=0)
    unit: int | None = Field(default=None, gt=0)  # samples whose gradient is taken together; default: see `Job.unit`
    memory_every: int = Field(default=0, ge=0)  # steps between copies in memory, which outlive the ranks; 0: none
    restarts: int = Field(default=0, ge=0)  # how often in a row all ranks are started again after one has died
    sums: Literal["fast", "exact"] | None = None  # across groups: floating point (default), or independent of grouping
    lease_s: float | None = Field(default=None, gt=0)  # how long a host or a stopped rank may be silent; default: 1.5


class InspectSection(Frozen):
    dumps: int = Field(default=4, ge=0)  # faults of the run whose operator and inputs are kept for a replay; 0: none
    dump_mb: float = Field(default=256.0, gt=0)  # of tensors in one dump, 10^6 bytes
    redact: bool = False  # token ids and quoted texts don't go into dumps
    trace_every: int = Field(default=0, ge=0)  # steps between those that torch's profiler records; 0: none
    trace_on: Literal["none", "file", "signal"] = "none"  # what else has the next step recorded
    traces: int = Field(default=4, gt=0)  # the newest that each rank keeps
    flight: Literal["off", "tell", "evict"] = "tell"  # what is done about what is found while the run goes on
    hash_every: int = Field(default=50, ge=0)  # steps between comparisons of the parameters of copies; 0: none
    rerun_every: int = Field(default=0, ge=0)  # steps between those of which all copies run one unit too; 0: none


class MachineSection(Frozen):
    name: str = "cpu-local"  # or the path of a machine.toml
    gpus: int | None = Field(default=None, gt=0)  # must equal the world size when given
    gpus_per_node: int = Field(default=8, gt=0)


class Job(Frozen):
    """A whole training job. `hash` covers every field; `identity` only what decides the numbers of the run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    layout: Layout = Layout()
    train: TrainSection = TrainSection()
    precision: PrecisionSection = PrecisionSection()
    keep: KeepSection = KeepSection()
    inspect: InspectSection = InspectSection()
    machine: MachineSection = MachineSection()

    @property
    def replicas(self) -> int:
        """Full copies of the model: the groups over which gradients are reduced last."""
        if self.keep.replicas is not None:
            return self.keep.replicas
        return self.layout.dp // self.layout.expert_span if self.layout.dp_shard == "none" else 1

    @property
    def shard(self) -> int:
        """Data-parallel ranks inside one copy of the model, over which its state or its experts are divided."""
        return self.layout.dp // self.replicas

    @property
    def unit(self) -> int:
        """Samples of one unit. By default one micro-batch on each rank of the shard axis; with a pipeline, which is
        filled and emptied once a unit, all that a replica takes in a step."""
        if self.keep.unit is not None:
            return self.keep.unit
        least = self.train.micro_batch * self.shard
        if self.layout.pp == 1:
            return least
        whole = math.gcd(self.train.global_batch, *(size for _, size in self.train.batch_ramp))
        return max(least, whole // self.replicas // least * least)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one unit on a rank."""
        return self.unit // (self.train.micro_batch * self.shard)

    def global_batch_at(self, step: int) -> int:
        """Sequences of step `step` (from 0). A ramp entry (until, size) rules the steps before `until`."""
        for until_step, size in self.train.batch_ramp:
            if step < until_step:
                return size
        return self.train.global_batch

    def samples_before(self, step: int) -> int:
        """The cursor at the start of step `step`: samples that all earlier steps took."""
        total, at = 0, 0
        for until_step, size in self.train.batch_ramp:
            total += size * (min(step, until_step) - at)
            at = min(step, until_step)
        return total + self.train.global_batch * (step - at)

    @property
    def hash(self) -> str:
        """16 hex digits over the whole resolved job."""
        return _digest(self.model_dump(mode="json"))

    @property
    def identity(self) -> str:
        """16 hex digits over what decides the run's numbers: model, data, training, precision.

        Layout, machine, run folder and checkpoint policy are left out, as the same run may go on under others; so are
        what only some layouts have (gather, dispatch), the grouping into micro-batches, the reading threads and the
        compiler, and where and how often it is evaluated.
        """
        return _digest(self.identity_fields())

    def identity_fields(self) -> dict[str, Any]:
        """The nested fields that `identity` covers, for telling two jobs apart by name."""
        dump = self.model_dump(mode="json")
        kept = {k: dump[k] for k in ("model", "data", "train", "precision")}
        for section, key in (
            ("data", "cache"),
            ("data", "workers"),
            ("train", "micro_batch"),
            ("train", "eval_every"),
            ("train", "eval_sequences"),
            ("train", "compile"),
            ("train", "recompute"),
            ("train", "recompute_layers"),
            ("train", "recompute_modules"),
            ("train", "recompute_gb"),
            ("precision", "emulate"),
            ("precision", "gather"),
            ("precision", "dispatch"),
        ):
            kept[section].pop(key)
        if not self.precision.fall_back:
            kept["precision"].pop("watch_every")  # looking changes nothing
        kept["train"]["warmup_steps"] = self.train.warmup  # a default that is written out changes nothing
        return kept


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
