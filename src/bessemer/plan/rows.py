"""Measured rows: a CSV in the format of `data/measured_training.csv` -> what the cost model needs, or why not.

Columns are described in docs/validation.md. An empty field means that the source didn't print it. What a row lacks is
filled by a rule that depends on source, software and neighbouring fields only, and the row lists it in `assumed`; a row
that still lacks something is skipped with a reason. Known slips of sources are mended in `data/row_fixes.csv`.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING

from bessemer.core.errors import BessemerError, DataError
from bessemer.core.machine import load_machine
from bessemer.core.recipes import RECIPES
from bessemer.plan.calibration import gpu_of
from bessemer.plan.rates import Rates, rates_of
from bessemer.plan.row_layout import cell_era, cell_layout, family, imbalance, nic_rate
from bessemer.plan.row_model import SkipError, cell_dims, number, peak_memory, step_time

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bessemer.plan.dims import Dims

__all__ = ["Row", "Skipped", "read_rows"]

_MACHINES = (
    (r"V100", "v100"),
    (r"A100.*40", "a100-40gb"),
    (r"A100", "a100-80gb"),
    (r"A800", "a100-80gb"),
    (r"H100-96|H100.*96 ?GB", "h100-96gb"),
    (r"H100", "h100"),
    (r"H800", "h800"),
    (r"H200", "h200"),
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"S5000", "mtt-s5000"),
    (r"S4000", "mtt-s4000"),
)


@dataclass
class Row:
    """One measured step. `layout` are columns of `Layouts.of`; `assumed` lists what the source didn't print."""

    id: str
    source: str
    model: str
    gpu: str
    dtype: str
    dims: Dims
    rates: Rates
    gpus: tuple[str, ...]
    era: str
    layout: dict[str, int | str]
    global_batch: float
    seq: float
    attention_share: float
    frozen: float
    imbalance: float
    measured_s: float | None
    measured_bytes: float | None
    allocated_only: bool
    one_layer: bool
    configuration: tuple[str, ...]
    assumed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Skipped:
    """A row that can't be predicted, and why."""

    id: str
    source: str
    reason: str


def read_rows(path: Path, *, excluded: bool = False) -> tuple[list[Row], list[Skipped]]:
    """All rows of the file. Rows named in the fixes as not usable are skipped unless `excluded`.

    DataError where the file is no CSV with at least the columns id and source.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            raw = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"can't read {path}: {error}", code="rows-file", fix="a CSV file (RFC 4180) with a header"
        ) from error
    if not raw or not {"id", "seq_len", "gpu"} <= set(raw[0]):
        raise DataError(
            f"{path} has no rows with the columns id, gpu, seq_len", code="rows-file", fix="see docs/validation.md"
        )
    fixes = _fixes()
    rows: list[Row] = []
    skipped: list[Skipped] = []
    siblings = _siblings(raw)
    for line in raw:
        cells = {k: (v or "").strip() for k, v in line.items() if k is not None and isinstance(v, (str, type(None)))}
        source = cells.get("source_id") or cells.get("id", "").rsplit("-", 1)[0]
        cells["source_id"] = source
        notes = fixes.get(cells["id"], {})
        try:
            if "exclude" in notes and not excluded:
                raise SkipError(f"excluded: {notes['exclude']}")
            rows.append(_row(cells, notes, siblings))
        except SkipError as error:
            skipped.append(Skipped(cells["id"], source, str(error)))
        except (BessemerError, ValueError, ZeroDivisionError, OverflowError) as error:
            skipped.append(Skipped(cells["id"], source, f"malformed: {str(error).splitlines()[0][:80]}"))
    return rows, skipped


def _fixes() -> dict[str, dict[str, str]]:
    """Row id -> {column: value, or "exclude": reason}, each with its reason in the file."""
    text = (resources.files("bessemer.plan") / "data" / "row_fixes.csv").read_text(encoding="utf-8")
    fixes: dict[str, dict[str, str]] = {}
    for line in csv.DictReader(x for x in text.splitlines() if not x.startswith("#")):
        value = line["reason"] if line["column"] == "exclude" else line["value"]
        fixes.setdefault(line["id"], {})[line["column"]] = value
    return fixes


def _siblings(raw: list[dict[str, str]]) -> dict[tuple[str, ...], str]:
    """The vpp printed for a source, model, GPU, tp and pp, in this file or in those that the package knows."""
    text = (resources.files("bessemer.plan") / "data" / "vpp_siblings.csv").read_text(encoding="utf-8")
    known = list(csv.DictReader(x for x in text.splitlines() if not x.startswith("#")))
    found: dict[tuple[str, ...], str] = {}
    for line in [*raw, *known]:
        vpp = line.get("vpp") or ""
        if vpp not in ("", "1") and line.get("pp") not in ("", "1", None):
            found.setdefault(family(line), vpp)
    return found


def _mend(cells: dict[str, str], assumed: list[str]) -> None:
    """What a row's own notes say against its cells; SkipError where they make it useless."""
    notes, framework = cells.get("notes", "").lower(), cells.get("framework", "").lower()
    if "swapped against" in notes:
        raise SkipError("excluded: columns are swapped in the source")
    if "zero-3" in framework and (number(cells, "year") or 9999) <= 2021:
        raise SkipError("excluded: DeepSpeed ZeRO-3 of 2021 gathers parameter by parameter")
    says = re.search(r"text says gbs=(\d+)", notes)
    if says:
        cells["gbs"] = says.group(1)
        assumed.append(f"gbs {says.group(1)} (the source's text)")


def _row(cells: dict[str, str], fixes: Mapping[str, str], siblings: Mapping[tuple[str, ...], str]) -> Row:
    assumed: list[str] = []
    for column, value in fixes.items():
        if column != "exclude":
            cells[column] = value
            assumed.append(f"{column} {value or 'dropped'} (source mended)")
    _mend(cells, assumed)
    machine_name = next((name for pattern, name in _MACHINES if re.search(pattern, cells["gpu"], re.I)), None)
    if machine_name is None:
        raise SkipError("gpu not known")
    dims = cell_dims(cells, assumed)
    seq = number(cells, "seq_len")
    if not seq:
        raise SkipError("no seq_len")
    machine = load_machine(machine_name)
    per_node = number(cells, "gpus_per_node")
    rates = rates_of(machine, gpus_per_node=int(per_node) if per_node else None, nic_bytes_per_s=nic_rate(cells))
    era = cell_era(cells)
    one_layer = "one layer" in cells.get("task", "")
    layout, batch = cell_layout(cells, dims, era, siblings, assumed, one_layer=one_layer)
    units = RECIPES[str(layout["recipe"])].gemm
    if units in ("fp8", "fp4") and not getattr(rates, units):
        raise SkipError(f"no {units} units on this GPU")
    task = cells.get("task", "")
    packed = task.startswith(("sft", "lora"))
    if packed:
        assumed.append("packed short sequences: a fifth of the causal attention")
    measured = None if one_layer and not cells.get("step_time_s") else step_time(cells, dims, batch, seq, assumed)
    memory = peak_memory(cells)
    if measured is None and memory is None:
        raise SkipError("no step time, rate or memory")
    config = tuple(cells.get(k, "") for k in ("source_id", "model", "gpu", "dtype", "tp", "pp", "cp", "ep"))
    return Row(
        id=cells["id"],
        source=cells["source_id"],
        model=cells.get("model", ""),
        gpu=machine_name,
        dtype=cells.get("dtype", ""),
        dims=dims,
        rates=rates,
        gpus=gpu_of(machine),
        era=era,
        layout=layout,
        global_batch=batch,
        seq=seq,
        attention_share=0.2 if packed else 1.0,
        frozen=1.0 if task.startswith("lora") else 0.0,
        imbalance=imbalance(cells, assumed),
        measured_s=measured,
        measured_bytes=memory,
        allocated_only=era == "megatron-plain",
        one_layer=one_layer,
        configuration=config,
        assumed=assumed,
    )
