"""One checkpoint written by the vaults of several hosts into one shared folder.

Each vault writes its ranks' shards, then a sealed `part-R.json` (R its lowest rank). The vault with rank 0 waits until
the parts cover the world, writes the manifest and renames; the others wait for that manifest to hold their part. All
vaults of an attempt are given the same token, and every attempt another one, so that they meet in one folder aside.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bessemer.core.errors import CheckpointError
from bessemer.keep.manifest import MANIFEST, Manifest, StoredFile, seal, slice_from_json, step_folder, unseal
from bessemer.keep.writer import Shards, WriteOptions, aside_folder, write_sealed

__all__ = ["give_up", "wait_for_manifest", "wait_for_parts", "write_part"]

_LOOK_S = 0.05
_SETTLE_S = 2.0  # a network file system may show a rename's two sides at different times


def write_part(aside: Path, shards: Mapping[int, Shards], options: WriteOptions) -> None:
    """What the ranks of this host wrote, durable."""
    body = {
        "ranks": sorted(shards),
        "files": [asdict(f) for s in shards.values() for f in s.files],
        "slices": [asdict(x) for s in shards.values() for x in s.slices],
    }
    write_sealed(aside / f"part-{min(shards)}.json", seal(body), options)


def give_up(aside: Path, ranks: Collection[int], message: str) -> None:
    """Remove the shards of these ranks and tell the other hosts by a mark; where even that can't be written they find
    out when their patience ends."""
    with contextlib.suppress(OSError):
        for rank in ranks:
            for path in (*aside.glob(f"rank-{rank}.safetensors"), *aside.glob(f"rank-{rank}-*.safetensors")):
                path.unlink()
        aside.mkdir(exist_ok=True)
        (aside / f"failed-{min(ranks)}.json").write_text(json.dumps({"message": message}))


def wait_for_parts(aside: Path, world_size: int, timeout_s: float) -> Shards:
    """All shards of the world, parts removed. CheckpointError (checkpoint-parts): a host failed, or none came."""
    deadline = time.monotonic() + timeout_s
    while True:
        _raise_reported(aside)
        parts = [unseal(path.read_bytes(), str(path)) for path in sorted(aside.glob("part-*.json"))]
        absent = set(range(world_size)).difference(*(part["ranks"] for part in parts))
        if not absent:
            break
        _check_deadline(deadline, timeout_s, f"{aside}: nothing came from the hosts of ranks {_short(sorted(absent))}")
        time.sleep(_LOOK_S)
    for path in aside.glob("part-*.json"):
        path.unlink()
    return Shards(
        tuple(StoredFile(**f) for part in parts for f in part["files"]),
        tuple(slice_from_json(s) for part in parts for s in part["slices"]),
    )


def wait_for_manifest(
    root: Path, step: int, shards: Mapping[int, Shards], options: WriteOptions, timeout_s: float
) -> Path:
    """The finished checkpoint that holds these shards. CheckpointError (checkpoint-parts) if it never comes."""
    aside, target = aside_folder(root, step, options.token), root / step_folder(step)
    mine = {f for s in shards.values() for f in s.files}
    deadline = time.monotonic() + timeout_s
    gone_s = 0.0
    while True:
        if aside.exists():
            _raise_reported(aside)
        elif _holds(target, mine):
            return target
        elif gone_s > _SETTLE_S:
            raise CheckpointError(f"{target}: the host of rank 0 gave it up", code="checkpoint-parts")
        else:
            gone_s += _LOOK_S
        _check_deadline(deadline, timeout_s, f"{target}: the host of rank 0 has not completed it")
        time.sleep(_LOOK_S)


def _holds(target: Path, mine: set[StoredFile]) -> bool:
    try:
        raw = (target / MANIFEST).read_bytes()
    except OSError:
        return False
    return mine.issubset(Manifest.from_bytes(raw, str(target / MANIFEST)).files)


def _raise_reported(aside: Path) -> None:
    for path in aside.glob("failed-*.json"):
        with contextlib.suppress(OSError, ValueError):  # being written or removed at this moment: seen at the next look
            found: dict[str, Any] = json.loads(path.read_text())
            raise CheckpointError(f"another host failed: {found['message']}", code="checkpoint-parts")


def _check_deadline(deadline: float, timeout_s: float, message: str) -> None:
    if time.monotonic() > deadline:
        raise CheckpointError(
            f"{message} after {timeout_s:g} s",
            code="checkpoint-parts",
            fix="see that all hosts mount the same run folder, and that their vaults run",
        )


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
