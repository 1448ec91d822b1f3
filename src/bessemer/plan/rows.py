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
from bessemer.plan.calibration import gpu_of
from bessemer.plan.dims import Dims
from bessemer.plan.rates import Rates, rates_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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
)

# Published facts of models whose rows leave columns empty, by what the model's name starts with (lower case, letters
# and digits only): xAI's Grok-1 release; Meta's Llama 4 model card (every second layer MoE, expert and shared expert
# 8192 wide); config.json of the others. Values stand where the row has none.
_KNOWN: tuple[tuple[str, dict[str, float]], ...] = (
    ("grok1", {"num_experts": 8, "topk": 2, "moe_ffn": 32768, "head_dim": 128, "dense_layers": 0}),
    ("llama4maverick", {"moe_ffn": 8192, "shared_expert_ffn": 8192, "moe_every": 2, "head_dim": 128}),
    ("llama4scout", {"num_experts": 16, "topk": 1, "moe_ffn": 8192, "shared_expert_ffn": 8192, "head_dim": 128}),
    ("qwen3", {"vocab": 151936}),
    ("gptoss", {"vocab": 201088, "window": 128, "window_share": 0.5}),
    (
        "mixtral8x22b",
        {
            "layers": 56,
            "hidden": 6144,
            "heads": 48,
            "kv_heads": 8,
            "vocab": 32768,
            "num_experts": 8,
            "topk": 2,
            "moe_ffn": 16384,
        },
    ),
    (
        "mixtral8x7b",
        {
            "layers": 32,
            "hidden": 4096,
            "heads": 32,
            "kv_heads": 8,
            "vocab": 32000,
            "num_experts": 8,
            "topk": 2,
            "moe_ffn": 14336,
        },
    ),
    ("nemotron8b", {"vocab": 256000, "kv_heads": 32}),
    ("nemotron22b", {"vocab": 256000, "kv_heads": 48}),
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


class _SkipError(Exception):
    """Carries the reason for which a row is left out."""


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
                raise _SkipError(f"excluded: {notes['exclude']}")
            rows.append(_row(cells, notes, siblings))
        except _SkipError as error:
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
    """The vpp printed for a source, model, GPU, tp and pp: what a sibling row without one is taken to have."""
    found: dict[tuple[str, ...], str] = {}
    for line in raw:
        vpp = line.get("vpp") or ""
        if vpp not in ("", "1"):
            found.setdefault(_family(line), vpp)
    return found


def _family(line: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(line.get(k) or "" for k in ("source_id", "model", "gpu", "tp", "pp"))


def _number(cells: Mapping[str, str], name: str) -> float | None:
    text = cells.get(name, "").replace(",", "")
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise _SkipError(f"{name} is not a number") from None


def _row(cells: dict[str, str], fixes: Mapping[str, str], siblings: Mapping[tuple[str, ...], str]) -> Row:
    assumed: list[str] = []
    for column, value in fixes.items():
        if column != "exclude":
            cells[column] = value
            assumed.append(f"{column} {value} (source mended)")
    machine_name = next((name for pattern, name in _MACHINES if re.search(pattern, cells["gpu"], re.I)), None)
    if machine_name is None:
        raise _SkipError("gpu not known")
    dims = _dims(cells, assumed)
    seq = _number(cells, "seq_len")
    if not seq:
        raise _SkipError("no seq_len")
    machine = load_machine(machine_name)
    per_node = _number(cells, "gpus_per_node")
    rates = rates_of(machine, gpus_per_node=int(per_node) if per_node else None, nic_bytes_per_s=_nic(cells))
    era = _era(cells)
    one_layer = "one layer" in cells.get("task", "")
    layout, batch = _layout(cells, dims, era, siblings, assumed, one_layer=one_layer)
    task = cells.get("task", "")
    packed = task.startswith(("sft", "lora"))
    if packed:
        assumed.append("packed short sequences: a fifth of the causal attention")
    measured = None if one_layer and not cells.get("step_time_s") else _step_time(cells, dims, batch, seq, assumed)
    memory = _memory(cells)
    if measured is None and memory is None:
        raise _SkipError("no step time, rate or memory")
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
        imbalance=_imbalance(cells, assumed),
        measured_s=measured,
        measured_bytes=memory,
        allocated_only=era == "megatron-plain",
        one_layer=one_layer,
        configuration=config,
        assumed=assumed,
    )


def _dims(cells: Mapping[str, str], assumed: list[str]) -> Dims:
    name = re.sub(r"[^a-z0-9]", "", cells.get("model", "").lower())
    known = next((facts for start, facts in _KNOWN if name.startswith(start)), {})

    def get(column: str, default: float | None = None) -> float:
        value = _number(cells, column)
        if value is None and column in known:
            assumed.append(f"{column} {known[column]:g} (published)")
            return known[column]
        if value is None and default is None:
            raise _SkipError("architecture not printed")
        return value if value is not None else float(default or 0)

    hidden, heads = get("hidden"), _number(cells, "heads") or known.get("heads")
    if heads is None:
        heads = hidden // 128
        assumed.append(f"heads {heads:g} (hidden / 128)")
    layers = get("layers")
    kv = _number(cells, "kv_heads") or known.get("kv_heads") or heads
    head_dim = _number(cells, "head_dim") or known.get("head_dim") or hidden / heads
    experts = get("num_experts", 0)
    gated = cells.get("ffn_gated", "") == "yes" or (experts > 0 and cells.get("ffn_gated", "") != "no")
    moe_ffn = _number(cells, "moe_ffn") or known.get("moe_ffn") or 0.0
    ffn = _number(cells, "ffn") or (0.0 if moe_ffn else 4 * hidden)
    if experts and not moe_ffn:
        moe_ffn = ffn
    if not cells.get("ffn") and not moe_ffn:
        assumed.append("ffn 4 x hidden")
    vocab = _number(cells, "vocab") or known.get("vocab")
    if vocab is None:
        vocab = 0.0 if "one layer" in cells.get("task", "") else 51200.0
        if vocab:
            assumed.append("vocab 51200")
    dense = get("dense_layers", 0)
    every = known.get("moe_every", 1)
    latent = dict(re.findall(r"(\w+)=(\d+)", cells.get("mla", "")))
    rank = {k: float(v) for k, v in latent.items()}
    with_mtp = "w/o mtp" not in cells.get("model", "").lower()
    return Dims(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else kv,
        qk_dim=rank.get("qk_nope", 0) + rank.get("qk_rope", 0) if latent else head_dim,
        v_dim=rank.get("v", head_dim) if latent else head_dim,
        q_rank=rank.get("q_lora", 0),
        kv_rank=rank.get("kv_lora", 0),
        rope_dim=rank.get("qk_rope", 0),
        ffn=ffn,
        up_mats=2 if gated else 1,
        vocab=vocab,
        tied=0 if gated or "qwen" in name or "bloom" not in cells.get("source_id", "").lower() else 1,
        window=known.get("window", 0),
        window_share=known.get("window_share", 0),
        moe_layers=(layers - dense) / every if experts else 0,
        dense_front=dense if experts else 0,
        experts=experts,
        top_k=get("topk", 0) if experts else 0,
        expert_ffn=moe_ffn if experts else 0,
        shared_ffn=(_number(cells, "shared_expert_ffn") or known.get("shared_expert_ffn", 0)) if experts else 0,
        top_groups=4 if latent and experts >= 256 else 0,
        mtp_layers=1
        if name.startswith("deepseekv3") and layers >= 61 and with_mtp and "mbridge" in cells["source_id"].lower()
        else 0,
        learned_positions=0,
        norm_params=1 if gated else 2,
        bias=0,
        expert_bias=float(name.startswith("gptoss")),
    )


def _imbalance(cells: Mapping[str, str], assumed: list[str]) -> float:
    if "natural routing" not in cells.get("notes", "").lower():
        return 1.0
    assumed.append("expert imbalance 1.5 (natural routing)")
    return 1.5


def _nic(cells: Mapping[str, str]) -> float | None:
    """Bytes/s of one GPU's share of the network, from texts like "8x 200 Gb/s HDR IB per node", "400 Gb/s per GPU"."""
    text = cells.get("network", "")
    per_node = _number(cells, "gpus_per_node") or 8.0
    if "omni-path" in text.lower():  # links of 100 Gb/s
        links = re.search(r"(\d+)x", text)
        return float(links.group(1)) * 12.5e9 / per_node if links else None
    in_bytes = re.search(r"(\d+)x(\d+) GB/s", text)
    if in_bytes:
        return float(in_bytes.group(1)) * float(in_bytes.group(2)) * 1e9 / per_node
    many = re.search(r"(\d+)x ?(\d+) ?Gb/s", text)
    if many:
        return float(many.group(1)) * float(many.group(2)) / 8 * 1e9 / per_node
    one = re.search(r"(\d+) ?Gb/s", text)
    if one:
        rate = float(one.group(1)) / 8 * 1e9
        return rate / per_node if "per node" in text else rate
    return None


def _era(cells: Mapping[str, str]) -> str:
    """The software's era, from framework, year and release."""
    framework, source = cells.get("framework", "").lower(), cells["source_id"]
    notes, year = cells.get("notes", "").lower(), int(_number(cells, "year") or 2025)
    release = re.search(r"(2[3-9])\.(\d\d)", framework + " " + notes)
    if "deepspeed" in framework and "megatron" in framework:
        return "megatron-deepspeed-2022"
    if "foundry" in framework or "composer" in framework:
        return "composer-2023"
    if "torchtitan" in framework:
        return "torchtitan-eager-2024" if "eager" in notes else "torchtitan-2024" if year <= 2024 else "torchtitan-2025"
    if "paxml" in framework:
        return "paxml-2024"
    if "maxtext" in framework or "jax" in framework or source == "JAXTB":
        return "jax-2024"
    if "overlap off" in framework:
        return "megatron-plain"
    if year <= 2020:
        return "megatron-2020"
    if year == 2021:
        return "megatron-2021"
    if year <= 2023 and "megatron" in framework:
        return "megatron-2022"
    if release:
        when = int(release.group(1)) * 100 + int(release.group(2))
        if when < 2410:
            return "megatron-2024"
        return "megatron-2025" if when < 2600 else "megatron-2026" if when < 2606 else "megatron-2026.06"
    return "megatron-2024" if year <= 2024 else "megatron-2025" if year == 2025 else "megatron-2026"


_RECIPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}


def _recipe(cells: Mapping[str, str], era: str, assumed: list[str]) -> str:
    dtype, notes = cells.get("dtype", "").lower(), cells.get("notes", "").lower()
    if dtype in _RECIPES:
        return _RECIPES[dtype]
    if not dtype:
        assumed.append("dtype bf16")
        return "bf16"
    if not dtype.startswith("fp8"):
        raise _SkipError(f"dtype {dtype} not known")
    if "row" in dtype or "rowwise" in notes:
        return "fp8-row"
    if "block" in dtype or "blockwise" in notes:
        return "fp8-block128"
    if "parenthesised" in notes and re.search(r"B200|B300", cells["gpu"]):
        assumed.append("the other FP8 granularity is MXFP8 on Blackwell")
        return "mxfp8"
    if "mx" in dtype:
        return "mxfp8"
    assumed.append("per-tensor scales")
    return (
        "fp8-current"
        if era in ("megatron-2025", "megatron-2026", "megatron-2026.06", "torchtitan-2024")
        else "fp8-delayed"
    )


def _layout(
    cells: Mapping[str, str],
    dims: Dims,
    era: str,
    siblings: Mapping[tuple[str, ...], str],
    assumed: list[str],
    *,
    one_layer: bool,
) -> tuple[dict[str, int | str], float]:
    gpus = _number(cells, "n_gpus")
    if not gpus:
        raise _SkipError("no GPU count")

    def degree(name: str, default: float) -> int:
        value = _number(cells, name)
        if value is None:
            if default != 1:
                assumed.append(f"{name} {default:g}")
            return int(default)
        return int(value)

    if not cells.get("tp") and not cells.get("pp") and "fsdp" not in cells.get("dp_sharding", "").lower():
        raise _SkipError("parallel configuration not printed")
    tp, pp, cp = degree("tp", 1), degree("pp", 1), degree("cp", 1)
    dp, left = int(gpus) // (tp * pp * cp), int(gpus) % (tp * pp * cp)
    printed = _number(cells, "dp")
    if left or dp < 1 or (printed is not None and printed != dp and not cells.get("ep")):
        raise _SkipError("degrees don't multiply to the GPU count")
    if (
        re.search(r": (fsdp|tp \+ ep)", cells.get("framework", "").lower())
        and not cells.get("dp")
        and not cells.get("mbs")
    ):
        raise _SkipError("baseline whose degrees aren't printed")
    ep = degree("ep", 1)
    nemo = "nemo" in cells.get("framework", "").lower() and "bridge" not in cells.get("framework", "").lower()
    etp_default = tp if nemo and dims.experts and ep * tp <= dp * cp * tp else 1  # Megatron-Core's default; Bridge: 1
    etp = degree("etp", etp_default) if dims.experts else 1
    if dims.experts and (ep * etp > dp * cp * tp or dims.experts % ep):
        raise _SkipError("experts don't divide over ep")
    virtual = _virtual(cells, siblings, assumed, pp)
    sharding = cells.get("dp_sharding", "").lower()
    micro, batch = _batch(cells, era, dp, pp, sharding, assumed, one_layer=one_layer)
    layout: dict[str, int | str] = {
        "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp,
        "micro_batch": micro, "virtual_stages": virtual,
        "dp_shard": _shard(sharding, era, assumed),
        "recompute": _recompute(cells, era, assumed),
        "recipe": _recipe(cells, era, assumed),
        "sequence_parallel": _sequence_parallel(cells, era, tp, assumed),
        "cp_kind": "ulysses" if era == "megatron-plain" else "ring",
        "tp_overlap": _tp_overlap(cells, era),
        "replicas": _replicas(sharding, dp * cp),
        "graph": int("tokendrop" in cells.get("model", "").lower()),  # fixed shapes: launched as graphs
    }  # fmt: skip
    return layout, batch


def _virtual(cells: Mapping[str, str], siblings: Mapping[tuple[str, ...], str], assumed: list[str], pp: int) -> int:
    value = _number(cells, "vpp")
    if value is not None or pp == 1:
        return int(value or 1) if pp > 1 else 1
    sibling = siblings.get(_family(cells))
    if sibling and not cells.get("num_experts"):
        assumed.append(f"vpp {sibling} (as its sibling)")
        return int(float(sibling))
    assumed.append("vpp 1")
    return 1


def _batch(
    cells: Mapping[str, str], era: str, dp: int, pp: int, sharding: str, assumed: list[str], *, one_layer: bool
) -> tuple[int, float]:
    micro, batch = _number(cells, "mbs"), _number(cells, "gbs")
    accumulate = _number(cells, "grad_accum")
    if batch is None and micro and accumulate:
        batch = micro * accumulate * dp
        assumed.append(f"gbs {batch:g} (mbs x accumulation x dp)")
    if batch is None and one_layer and micro:
        batch = micro * dp
    if batch is None:
        raise _SkipError("no global batch")
    if micro is None and era.startswith("torchtitan") and pp > 1:
        micro = max(batch // dp // pp, 1)  # its default then: as many micro-batches as stages
        assumed.append(f"mbs {micro:g} (pp micro-batches)")
    if micro is None:
        micro = 2.0 if era == "megatron-2021" and pp == 1 and batch % (2 * dp) == 0 else 1.0
        assumed.append(f"mbs {micro:g}")
    if batch / (micro * dp) < 1:
        raise _SkipError("global batch smaller than micro-batch x dp")
    return int(micro), batch


def _shard(sharding: str, era: str, assumed: list[str]) -> str:
    if "shard_grad_op" in sharding or "zero-2" in sharding or "no reshard" in sharding:
        return "gradient"
    if "fsdp" in sharding or "zero-3" in sharding:
        return "full"
    if "zero-0" in sharding or sharding == "none":
        return "none"
    if "optimizer" in sharding or "zero-1" in sharding:
        return "optimizer"
    shard = (
        "none"
        if era in ("megatron-2020", "megatron-2021", "megatron-2022")
        else "full"
        if era in ("jax-2024", "paxml-2024")
        else "optimizer"
    )
    assumed.append(f"dp_shard {shard}")
    return shard


def _replicas(sharding: str, group: int) -> int:
    found = re.search(r"(?:fsdp|group) (\d+)", sharding)
    return max(group // int(found.group(1)), 1) if found and group % int(found.group(1)) == 0 else 1


def _recompute(cells: Mapping[str, str], era: str, assumed: list[str]) -> str:
    value, detail = cells.get("recompute", ""), cells.get("recompute_detail", "").lower()
    if era.startswith("torchtitan") and (value == "selective" or "selective ac" in cells.get("notes", "").lower()):
        return "ops"
    if value == "selective" and era.startswith("jax"):
        return "full"
    if (
        value == "selective"
        and ("norm" in detail or "act" in detail.replace("activation", ""))
        and "attention" not in detail
    ):
        return "fine"
    if value in ("none", "full", "selective"):
        return value
    policy = "full" if era in ("jax-2024", "paxml-2024", "megatron-2021", "megatron-deepspeed-2022") else "none"
    assumed.append(f"recompute {policy}")
    return policy


def _sequence_parallel(cells: Mapping[str, str], era: str, tp: int, assumed: list[str]) -> int:
    if tp == 1:
        return 0
    value = cells.get("sp", "").lower()
    if value in ("yes", "no"):
        return int(value == "yes")
    on = era not in ("megatron-2020", "megatron-2021", "megatron-2022", "megatron-deepspeed-2022")
    assumed.append(f"sequence parallel {'on' if on else 'off'}")
    return int(on)


def _tp_overlap(cells: Mapping[str, str], era: str) -> int:
    if era.startswith("torchtitan"):
        return int("async" in cells.get("notes", "").lower())
    return int(
        era not in ("megatron-2020", "megatron-2021", "megatron-2022", "megatron-deepspeed-2022", "megatron-plain")
    )


def _step_time(cells: Mapping[str, str], dims: Dims, batch: float, seq: float, assumed: list[str]) -> float | None:
    """Printed, else from tokens/s, else from the rate in model FLOPs, with attention counted in full."""
    step, tokens, gpus = _number(cells, "step_time_s"), _number(cells, "tokens_per_s_per_gpu"), _number(cells, "n_gpus")
    if step:
        return step
    if tokens and gpus:
        return batch * seq / (tokens * gpus)
    rate, share = _number(cells, "tflops_per_gpu"), _number(cells, "mfu_pct")
    if not rate and share and "989" in cells.get("flops_convention", ""):
        rate = share / 100 * 989.5
    if not rate or not gpus:
        return None
    causal = _counts_causal(cells)
    assumed.append(f"step time from model FLOPs with {'causal' if causal else 'full'} attention")
    layer = float(dims.attention_params + dims.latent_params)
    dense = (dims.layers - dims.moe_layers) * dims.dense_params
    active = (dims.up_mats + 1) * dims.hidden * (dims.top_k * dims.expert_ffn + dims.shared_ffn)
    weights = dims.layers * layer + dense + dims.moe_layers * active + dims.hidden * dims.vocab
    attention = dims.layers * seq * dims.heads * (dims.qk_dim + dims.v_dim) * (0.5 if causal else 1.0)
    return float(batch * seq * (6 * weights + 6 * attention) / (rate * 1e12 * gpus))


def _counts_causal(cells: Mapping[str, str]) -> bool:
    """Whether the source's model FLOPs count half of the attention; Megatron-Core does since 2025."""
    text = cells.get("flops_convention", "").lower()
    if "full" in text or "non-causal" in text or "989" in text:  # papers' MFU counts it in full
        return False
    if "causal" in text:
        return True
    return "megatron" in cells.get("framework", "").lower() and (_number(cells, "year") or 0) >= 2025


def _memory(cells: Mapping[str, str]) -> float | None:
    value = _number(cells, "peak_mem")
    return (
        None if value is None else value * {"GiB": 2**30, "GB": 1e9, "MiB": 2**20}.get(cells.get("mem_unit", ""), 2**30)
    )
