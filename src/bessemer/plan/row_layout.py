"""Cells of a measured row -> software era, layout and batch; see `bessemer.plan.rows` for the rules' purpose."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bessemer.plan.row_model import SkipError, number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bessemer.plan.dims import Dims

__all__ = ["cell_era", "cell_layout", "family", "imbalance", "nic_rate"]


def cell_era(cells: Mapping[str, str]) -> str:
    """The software's era, from framework, year and release."""
    framework, source = cells.get("framework", "").lower(), cells["source_id"]
    notes, year = cells.get("notes", "").lower(), int(number(cells, "year") or 2025)
    release = re.search(r"(2[3-9])\.(\d\d)", framework + " " + notes)
    if "deepspeed" in framework and "megatron" in framework:
        return "megatron-deepspeed-2022"
    if "foundry" in framework or "composer" in framework:
        return "composer-2023"
    if "torchtitan" in framework:
        return "torchtitan-eager-2024" if "eager" in notes else "torchtitan-2024" if year <= 2024 else "torchtitan-2025"
    if (
        "megatron" not in framework
        and "nemo" not in framework
        and re.search(r"fsdp|pytorch|deepspeed|hugging", framework)
    ):
        return "composer-2023" if year <= 2023 else "torchtitan-2024" if year == 2024 else "torchtitan-2025"
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
        if when < 2409:
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
        raise SkipError(f"dtype {dtype} not known")
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


def cell_layout(
    cells: Mapping[str, str],
    dims: Dims,
    era: str,
    siblings: Mapping[tuple[str, ...], str],
    assumed: list[str],
    *,
    one_layer: bool,
) -> tuple[dict[str, int | str], float]:
    gpus = number(cells, "n_gpus")
    if not gpus:
        raise SkipError("no GPU count")

    def degree(name: str, default: float) -> int:
        value = number(cells, name)
        if value is None:
            if default != 1:
                assumed.append(f"{name} {default:g}")
            return int(default)
        return int(value)

    if not cells.get("tp") and not cells.get("pp") and "fsdp" not in cells.get("dp_sharding", "").lower():
        raise SkipError("parallel configuration not printed")
    tp, pp, cp = degree("tp", 1), degree("pp", 1), degree("cp", 1)
    dp, left = int(gpus) // (tp * pp * cp), int(gpus) % (tp * pp * cp)
    printed = number(cells, "dp")
    if left or dp < 1 or (printed is not None and printed != dp and not cells.get("ep")):
        raise SkipError("degrees don't multiply to the GPU count")
    if (
        re.search(r": (fsdp|tp \+ ep)", cells.get("framework", "").lower())
        and not cells.get("dp")
        and not cells.get("mbs")
    ):
        raise SkipError("baseline whose degrees aren't printed")
    ep = degree("ep", 1) if dims.experts else 1
    nemo = "nemo" in cells.get("framework", "").lower() and "bridge" not in cells.get("framework", "").lower()
    etp_default = tp if nemo and dims.experts and ep * tp <= dp * cp * tp else 1  # Megatron-Core's default; Bridge: 1
    etp = degree("etp", etp_default) if dims.experts else 1
    if dims.experts and (ep * etp > dp * cp * tp or dims.experts % ep):
        raise SkipError("experts don't divide over ep")
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
    value = number(cells, "vpp")
    if value is not None or pp == 1:
        return int(value or 1) if pp > 1 else 1
    sibling = siblings.get(family(cells))
    if sibling and not cells.get("num_experts"):
        assumed.append(f"vpp {sibling} (as its sibling)")
        return int(float(sibling))
    if re.search(r"interleaved 1f1b|interleaved schedule with v stages", cells.get("notes", "").lower()):
        assumed.append("vpp 2 (interleaved, degree not printed)")
        return 2
    assumed.append("vpp 1")
    return 1


def _batch(
    cells: Mapping[str, str], era: str, dp: int, pp: int, sharding: str, assumed: list[str], *, one_layer: bool
) -> tuple[int, float]:
    micro, batch = number(cells, "mbs"), number(cells, "gbs")
    accumulate = number(cells, "grad_accum")
    if batch is None and micro and accumulate:
        batch = micro * accumulate * dp
        assumed.append(f"gbs {batch:g} (mbs x accumulation x dp)")
    if batch is None and one_layer and micro:
        batch = micro * dp
    if batch is None:
        raise SkipError("no global batch")
    if micro is None and era.startswith("torchtitan") and pp > 1:
        micro = max(batch // dp // pp, 1)  # its default then: as many micro-batches as stages
        assumed.append(f"mbs {micro:g} (pp micro-batches)")
    if micro is None:
        micro = 2.0 if era == "megatron-2021" and pp == 1 and batch % (2 * dp) == 0 else 1.0
        assumed.append(f"mbs {micro:g}")
    if batch / (micro * dp) < 1:
        raise SkipError("global batch smaller than micro-batch x dp")
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
        return "every-second"
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


def nic_rate(cells: Mapping[str, str]) -> float | None:
    """Bytes/s of one GPU's share of the network, from texts like "8x 200 Gb/s HDR IB per node", "400 Gb/s per GPU"."""
    text = cells.get("network", "")
    per_node = number(cells, "gpus_per_node") or 8.0
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


def imbalance(cells: Mapping[str, str], assumed: list[str]) -> float:
    if "natural routing" not in cells.get("notes", "").lower():
        return 1.0
    assumed.append("expert imbalance 1.5 (natural routing)")
    return 1.5


def family(line: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(line.get(k) or "" for k in ("source_id", "model", "gpu", "tp", "pp"))
