"""Reading one checkpoint, under any sharding: each target slice is filled from the stored slices that it meets."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bessemer.core.errors import CheckpointError
from bessemer.keep.manifest import (
    MANIFEST,
    Manifest,
    StoredSlice,
    coverage_faults,
    damaged,
    step_folder,
    step_of,
    steps_in,
)
from bessemer.keep.slices import DTYPE_BYTES, Slice, dtype_name, intersect, torch_dtype
from bessemer.keep.verify import check_file, check_slices

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "Differences", "TensorInfo"]

_POPULATE_READ = 22  # madvise(2), Linux 5.14: map the pages now, in one call


@dataclass(frozen=True)
class TensorInfo:
    """The shape of a whole stored tensor and its safetensors dtype."""

    shape: tuple[int, ...]
    dtype: str


@dataclass
class Differences:
    """How a wanted state differs from the stored one; empty lists when it doesn't."""

    missing: list[str] = field(default_factory=list)  # wanted, not stored
    unexpected: list[str] = field(default_factory=list)  # stored, not wanted
    mismatched: list[str] = field(default_factory=list)  # one line each: name, stored and wanted shape or dtype

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = (("missing from the checkpoint", self.missing), ("unexpected in the checkpoint", self.unexpected),
                 ("of another shape or dtype", self.mismatched))  # fmt: skip
        return "".join(f"\n    {title} ({len(names)}): " + ", ".join(names) for title, names in parts if names)


class Checkpoint:
    """One complete checkpoint. Open it by `Checkpoint.open(path)` or through `CheckpointFolder`.

    meta: what was saved beside the tensors; step: its step; path: its folder; manifest: everything.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.meta: dict[str, Any] = manifest.meta
        self.step = int(manifest.meta["step"])
        self._by_name: dict[str, list[StoredSlice]] = defaultdict(list)
        for s in manifest.slices:
            self._by_name[s.name].append(s)
        self._verified: set[StoredSlice] = set()
        self._maps: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Check all but the tensors' bytes: manifest, step, presence, size and header of each file, coverage.

        CheckpointError: checkpoint-missing, checkpoint-format or checkpoint-damaged, saying what and where.
        """
        path = Path(path)
        manifest_path = path / MANIFEST
        try:
            raw = manifest_path.read_bytes()
        except FileNotFoundError as error:
            what = "no manifest.json: it was never completed" if path.is_dir() else "there is no such checkpoint"
            steps = steps_in(path.parent)
            there = ", ".join(step_folder(s) for s in steps if step_folder(s) != path.name)
            raise CheckpointError(
                f"{path}: {what}", code="checkpoint-missing", fix=f"there are: {there}" if there else ""
            ) from error
        except OSError as error:
            raise damaged(f"{manifest_path}: can't be read ({error.strerror})") from error
        manifest = Manifest.from_bytes(raw, str(manifest_path))
        step, named = manifest.meta.get("step"), step_of(path.name)
        if type(step) is not int or (named is not None and named != step):
            raise damaged(f"{manifest_path}: is the manifest of step {step}")
        for stored in manifest.files:
            check_file(path, stored)
        faults = coverage_faults(manifest.slices)
        if faults:
            raise CheckpointError(f"{path}: " + "; ".join(faults), code="checkpoint-coverage")
        return cls(path, manifest)

    def verify(self) -> None:
        """Compare every byte of every tensor with its checksum; CheckpointError naming file and tensor."""
        self._verify(self.manifest.slices)

    # ---- what is in it

    def names(self) -> list[str]:
        return list(self._by_name)

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a stored tensor; CheckpointError (checkpoint-keys) when there is none."""
        first = self._slices_of(name)[0]
        return TensorInfo(first.global_shape, first.dtype)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that are not stored."""
        return [n for n in dict.fromkeys(names) if n not in self._by_name]

    def unexpected(self, names: Iterable[str]) -> list[str]:
        """Stored names that are not among `names`."""
        wanted = set(names)
        return [n for n in self._by_name if n not in wanted]

    def differences(
        self, slices: Sequence[Slice], *, expected: Iterable[str] | None = None, partial: bool = False
    ) -> Differences:
        """All that `read_into` with the same arguments would complain about."""
        wanted = [*dict.fromkeys([*(s.name for s in slices), *(expected or ())])]
        found = Differences(self.missing(wanted), [] if partial else self.unexpected(wanted))
        for s in {s.name: s for s in slices if s.name in self._by_name}.values():
            stored = self.info(s.name)
            target = TensorInfo(tuple(s.global_shape), dtype_name(s.tensor.dtype))
            if stored != target:
                found.mismatched.append(
                    f"{s.name} (stored {stored.dtype} {list(stored.shape)}, wanted {target.dtype} {list(target.shape)})"
                )
        return found

    # ---- reading

    def read_into(
        self, slices: Sequence[Slice], *, expected: Iterable[str] | None = None, partial: bool = False
    ) -> None:
        """Fill the tensor of every slice from the stored slices it meets, verifying those not verified yet.

        `expected`: the names of the whole state over all ranks, where `slices` are only this rank's (default: the
        names of `slices`). `partial`: other stored tensors are no error (the weights without the optimiser).
        CheckpointError: checkpoint-keys lists every missing and unexpected name and every other shape or dtype at
        once, before anything is written; checkpoint-damaged names file and tensor.
        """
        import torch

        found = self.differences(slices, expected=expected, partial=partial)
        if found:
            raise CheckpointError(
                f"{self.path} is not a state of this model:{found}",
                code="checkpoint-keys",
                fix="use the job that wrote it (job.toml in its run folder), or start a run of its own",
            )
        meets = [(s, stored, common) for s in slices for stored in self._by_name[s.name]
                 if (common := intersect(s.box, stored.box)) is not None]  # fmt: skip
        self._verify([stored for _, stored, _ in meets])
        with torch.no_grad():
            for s, stored, common in meets:
                source = self._view(stored)
                if common == s.box == stored.box:
                    s.tensor.copy_(source)
                else:
                    s.tensor[common.within(s.box)].copy_(source[common.within(stored.box)])

    def read_tensor(self, name: str) -> torch.Tensor:
        """The whole tensor `name`, in memory of its own, of the stored dtype."""
        import torch

        info = self.info(name)
        whole = Slice.whole(name, torch.empty(info.shape, dtype=torch_dtype(info.dtype)))
        self.read_into([whole], partial=True)
        return whole.tensor

    def close(self) -> None:
        """Drop the mappings; those that a tensor still shows stay until it goes."""
        for mapping in self._maps.values():
            with contextlib.suppress(BufferError):  # a view of it is still in use: the collector ends it
                mapping.close()
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _slices_of(self, name: str) -> list[StoredSlice]:
        if name not in self._by_name:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}", code="checkpoint-keys")
        return self._by_name[name]

    def _verify(self, slices: Iterable[StoredSlice]) -> None:
        fresh = [s for s in dict.fromkeys(slices) if s not in self._verified]
        check_slices(self.path, fresh)
        self._verified.update(fresh)

    def _view(self, stored: StoredSlice) -> torch.Tensor:
        """A tensor over the mapped file: nothing is copied until it is read."""
        import torch

        mapping = self._maps.get(stored.file)
        if mapping is None:
            with (self.path / stored.file).open("rb") as file:
                # Private and writable, since torch warns of a tensor over memory that it may not write.
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[stored.file] = mapping
        count = math.prod(stored.shape)
        if count == 0:
            return torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
        first = stored.byte_offset // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # older kernels fault the pages in one by one: slower, not wrong
            mapping.madvise(_POPULATE_READ, first, stored.byte_offset + stored.nbytes - first)
        assert stored.byte_offset % DTYPE_BYTES[stored.dtype] == 0
        flat = torch.frombuffer(mapping, dtype=torch_dtype(stored.dtype), count=count, offset=stored.byte_offset)
        return flat.view(stored.shape)
