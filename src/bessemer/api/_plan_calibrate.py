"""The verb `plan calibrate`. Measuring imports torch; writing a machine from a data sheet does not."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.api._extras import need
from bessemer.core.errors import ConfigError, RequestError
from bessemer.core.machine import DTYPES, Machine, Origin, Peaks, cpu_local_file, load_machine
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, nearest
from bessemer.core.units import format_rate
from bessemer.plan.axes import shared_machine
from bessemer.plan.local import calibration_file, write_calibration
from bessemer.plan.local_fit import AttentionTime, LayerTime, Measured, ProductTime, fit_constants, summary
from bessemer.plan.units_check import unit_problems

if TYPE_CHECKING:
    from bessemer.runtime.device import Device

__all__ = ["Calibrated", "calibrate"]

PROBES = ((192, 4, 512), (320, 8, 896))
"""Hidden size, heads and feed-forward width of the small models whose layers are timed."""
PROBE_BATCH, PROBE_SEQ, PROBE_VOCAB = 4, 256, 4096
_SHEET = (
    "memory_bytes",
    "memory_bytes_per_s",
    "scaleup_bidirectional_bytes_per_s",
    "scaleup_domain",
    "nic_bytes_per_s",
    "host_bytes_per_s",
    "tdp_w",
    "gpus_per_node",
)


@dataclass(frozen=True)
class Calibrated:
    """What was written, and the figures in it. `rough`: from a data sheet, nothing measured."""

    machine: Machine
    files: tuple[str, ...]
    constants: tuple[tuple[str, float], ...]
    rough: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine.name,
            "files": list(self.files),
            "peak_flops_per_s": self.machine.peak_flops_per_s.model_dump(exclude_none=True),
            "memory_bytes_per_s": self.machine.memory_bytes_per_s,
            "constants": dict(self.constants),
            "kind": "published" if self.rough else "measured",
            "rough": self.rough,
        }

    def __str__(self) -> str:
        peaks = self.machine.peak_flops_per_s.model_dump(exclude_none=True)
        lines = [
            f"{self.machine.name}: {'from a data sheet, rough' if self.rough else 'measured under sustained load'}"
        ]
        lines += [f"  peak {name:<6} {format_rate(value, 'FLOP')}" for name, value in peaks.items()]
        if self.machine.memory_bytes_per_s is not None:
            lines.append(f"  memory      {format_rate(self.machine.memory_bytes_per_s, 'B')}")
        lines += [f"  {name:<20} {value:.4g}" for name, value in self.constants]
        return "\n".join([*lines, *(f"wrote {file}" for file in self.files)])


def calibrate(
    *,
    device: str = "cpu",
    seconds: float = 24.0,
    out: str | None = None,
    name: str | None = None,
    sheet: Sequence[str] = (),
) -> Calibrated:
    """Measure the machine at hand for the planner, under sustained load, and write it as a machine file.

    Products, attention, memory, layers of small models and the optimizer's update are timed, and the constants of the
    cost model fitted to them, in a file beside it. A CPU is measured on one core, as a rank has it; its file is that of
    `cpu-local`, unless --out says otherwise. With --sheet nothing is measured: a rough machine is written from a data
    sheet, and marked so.

    device: What is measured: cpu, cuda or musa.
    seconds: Time to measure for.
    out: The machine file to write; needed for GPUs and with --sheet.
    name: The name of the machine; default: that of the device.
    sheet: A figure of a data sheet: --sheet bf16=400e12 --sheet memory_bytes=80e9. May be repeated.
    """
    if sheet:
        return _from_sheet(sheet, out, name)
    need("plan calibrate", "train")
    if seconds <= 0:
        raise ConfigError([_wrong("seconds", f"seconds = {seconds:g}", "--seconds 24")], "the request")
    if device != "cpu" and out is None:
        raise ConfigError(
            [_wrong("out", f"a machine file for {device} needs a path", "--out my-gpu.toml")], "the request"
        )
    from bessemer.runtime.device import pick_device

    picked = pick_device(device)
    machine, measured, words = _measure(picked, seconds, name)
    file = cpu_local_file() if out is None else Path(out)
    constants = fit_constants(measured, words)
    file.parent.mkdir(parents=True, exist_ok=True)
    stored = machine.model_copy(update={"memory_bytes": None, "origins": {}}) if out is None else machine
    file.write_text(stored.to_toml(), encoding="utf-8")
    beside = calibration_file(machine, None if out is None else out)
    write_calibration(beside, _device_words(machine), constants)
    return Calibrated(machine, (str(file), str(beside)), tuple(summary(constants)), rough=False)


def _device_words(machine: Machine) -> str:
    """What a calibration file must have been measured on to be used: of a CPU the words that its peaks name too, else
    the name of the machine whose file it lies beside."""
    return machine.origin.source.partition(";")[0] if machine.name == "cpu-local" else machine.name


def _measure(device: Device, seconds: float, name: str | None) -> tuple[Machine, Measured, str]:
    import torch

    from bessemer.runtime import sustained
    from bessemer.runtime.host import usable_cores
    from bessemer.runtime.peaks import ensure_peaks

    part = seconds / 8
    cpu = device.kind == "cpu"
    products = sustained.GEMM_SHAPES if cpu else sustained.GPU_GEMM_SHAPES
    attentions = sustained.ATTENTION_SHAPES if cpu else sustained.GPU_ATTENTION_SHAPES
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    threads = torch.get_num_threads()
    cores = usable_cores() if cpu else 1
    if cpu:  # as ranks share it: one core each while the others work too; each has its part of the computer's rates
        machine = ensure_peaks(load_machine("cpu-local"))
        device.set_threads(1)
    words = f"measured under sustained load on {device.name}, {today}: bessemer plan calibrate"
    dtypes = [d for d in ("bf16", "fp32") if device.supports({"bf16": torch.bfloat16, "fp32": torch.float32}[d])]
    try:
        with sustained.neighbours(cores - 1):
            gemms = sustained.measure_gemms(device, dtypes, 2 * part, products)
            copy = cores * sustained.measure_copy(device, part, 1 << 26 if cpu else 1 << 29)
            attention = sustained.measure_attention(device, dtypes[0], part, attentions)
            layers = [_probe(device, shape, dtypes[0], part) for shape in PROBES]
            gap_s, update_s = sustained.measure_gap(device, part / 2), sustained.measure_update(device, part / 2)
        exchange = _exchange(part) if cores > 1 else None
    finally:
        torch.set_num_threads(threads)
    machine = (machine if cpu else _gpu(device, gemms, name, words)).model_copy(update={"memory_bytes_per_s": copy})
    measured = Measured(
        machine=shared_machine(machine, cores), products=[ProductTime(**vars(g)) for g in gemms],
        attention=[AttentionTime(**vars(a)) for a in attention], layers=layers, gap_s=gap_s, update_s=update_s,
        exchange_bytes_per_s=exchange,
    )  # fmt: skip
    return machine, measured, words


def _gpu(device: Device, gemms: Sequence[Any], name: str | None, words: str) -> Machine:
    """A GPU's declared peak isn't measurable: the best rate that was seen stands for it."""
    best: dict[str, float] = {}
    for g in gemms:
        best[g.dtype] = max(best.get(g.dtype, 0.0), 2.0 * g.rows * g.outputs * g.depth / g.seconds)
    import torch

    memory = int(getattr(torch, device.kind).get_device_properties(device.torch_device).total_memory)
    return Machine(
        name=(name or device.name).lower().replace(" ", "-"), device=device.kind,  # type: ignore[arg-type]
        origin=Origin(kind="measured", source=words), peak_flops_per_s=Peaks(**best), memory_bytes=memory,
    )  # fmt: skip


def _probe(device: Device, shape: tuple[int, int, int], recipe: str, seconds: float) -> LayerTime:
    """Times a model of two and of six layers in turns: the difference is four layers, what is left are the ends."""
    import torch

    from bessemer.models.build import build
    from bessemer.runtime.sustained import DTYPES as TORCH_DTYPES
    from bessemer.runtime.sustained import paired_s

    hidden, heads, ffn = shape
    tokens = torch.randint(0, PROBE_VOCAB, (PROBE_BATCH, PROBE_SEQ), device=device.torch_device)
    specs, steps = [], []
    for layers in (2, 6):
        spec = ModelSpec(
            family="llama", vocab_size=PROBE_VOCAB, hidden_size=hidden, num_layers=layers, num_heads=heads,
            num_kv_heads=heads // 2, head_dim=hidden // heads, ffn_size=ffn, max_positions=PROBE_SEQ,
            tied_embeddings=True,
        )  # fmt: skip
        model = build(spec, seed=1, compute_dtype=TORCH_DTYPES[recipe]).to(device.torch_device)
        specs.append(spec)
        steps.append(lambda model=model: model(tokens, tokens)[0].backward())
    small, more = paired_s(steps[0], steps[1], device, seconds)
    layer = max(more / 4, 1e-9)
    return LayerTime(specs[1], recipe, PROBE_BATCH, PROBE_SEQ, layer, max(small - 2 * layer, 1e-9))


def _exchange(seconds: float) -> float:
    """Bus bandwidth in bytes/s of a gloo all-reduce between two processes of this computer."""
    from bessemer.runtime.exchange import measure_all_reduce

    return measure_all_reduce(seconds)


def _from_sheet(sheet: Sequence[str], out: str | None, name: str | None) -> Calibrated:
    figures: dict[str, float] = {}
    problems = (
        [_wrong("out", "a rough machine needs a file and a name", "--out card.toml --name card")]
        if not (out and name)
        else []
    )
    for text in sheet:
        key, _, value = text.partition("=")
        if key not in (*DTYPES, *_SHEET):
            near = nearest(key, (*DTYPES, *_SHEET), count=1)
            fix = f"--sheet {near[0]}=..." if near else "figures: " + ", ".join((*DTYPES, *_SHEET))
            problems.append(_wrong("sheet", f"{key!r} is no figure of a machine", fix))
            continue
        try:
            figures[key] = float(value)
        except ValueError:
            problems.append(_wrong("sheet", f"{text!r} holds no number", f"--sheet {key}=1e12"))
    if problems:
        raise ConfigError(problems, "the request")
    assert out is not None and name is not None, "asked for above"
    own: dict[str, Any] = {k: int(v) if k in ("memory_bytes", "scaleup_domain", "gpus_per_node") else v
                           for k, v in figures.items() if k in _SHEET}  # fmt: skip
    origin = Origin(kind="published", source="rough: typed in from a data sheet; efficiencies were not measured")
    peaks = Peaks(**{k: v for k, v in figures.items() if k in DTYPES})
    machine = Machine(name=name, device="cuda", origin=origin, peak_flops_per_s=peaks, **own)
    wrong = unit_problems(machine)
    if wrong:
        raise ConfigError(wrong, "the data sheet")
    if Path(out).exists():
        raise RequestError(f"{out} is there already", code="machine-exists", fix="another --out, or delete it")
    Path(out).write_text(machine.to_toml(), encoding="utf-8")
    return Calibrated(machine, (out,), (), rough=True)


def _wrong(where: str, what: str, fix: str) -> Problem:
    return Problem(code="plan-calibrate", where=where, what=what, why="", fix=fix)
