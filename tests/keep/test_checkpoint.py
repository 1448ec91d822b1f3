"""The format: what is written is read back bit for bit, under any cut, and whatever is wrong is said at once."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_tools import META, assert_holds, blank, leftovers, make_state, rows, same, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from bessemer.core.errors import CheckpointError
from bessemer.keep.checkpoint import CheckpointFolder, Slice, write_checkpoint
from bessemer.keep.manifest import Manifest, StoredFile, StoredSlice, seal, unseal
from bessemer.keep.slices import DTYPE_BYTES, Box, intersect, tiling_faults, torch_dtype
from bessemer.keep.writer import WriteOptions, own_token


def test_what_is_written_is_read_back_bit_for_bit(tmp_path):
    state = make_state(1)
    path = write_checkpoint(tmp_path, 5, whole(state), META)
    found = CheckpointFolder(tmp_path).newest_verified()
    assert path == tmp_path / "step-5" == found.checkpoint.path
    assert found.refused == ()
    assert found.checkpoint.meta == {**META, "step": 5}
    assert_holds(found.checkpoint, state)
    assert leftovers(tmp_path) == []


def test_the_first_log_line_says_what_was_loaded_from_where_and_why(tmp_path):
    folder = CheckpointFolder(tmp_path / "none")
    assert folder.newest_verified().line == "starting at step 0: there is no checkpoint yet"
    write_checkpoint(tmp_path, 5, whole(make_state(1)), META)
    line = CheckpointFolder(tmp_path).newest_verified().line
    assert line == f"loaded step 5 from {tmp_path}/step-5: the newest checkpoint, verified"
    write_checkpoint(tmp_path, 6, whole(make_state(2)), META)
    (tmp_path / "step-6" / "manifest.json").unlink()
    line = CheckpointFolder(tmp_path).newest_verified().line
    assert line.startswith(f"loaded step 5 from {tmp_path}/step-5: the newest that verifies; refused step-6: ")


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_survives(tmp_path, dtype):
    raw = torch.arange(64, dtype=torch.uint8) % 2 if dtype == "BOOL" else torch.arange(64, dtype=torch.uint8)
    tensor = raw.view(torch_dtype(dtype)).reshape(2, -1)
    write_checkpoint(tmp_path, 1, [Slice.whole("x", tensor)], {})
    back = CheckpointFolder(tmp_path).open(1).read_tensor("x")
    assert back.dtype == tensor.dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_shards_are_plain_safetensors_files(tmp_path):
    state = make_state(2)
    path = write_checkpoint(tmp_path, 1, whole(state), {})
    loaded = load_file(path / "rank-0.safetensors")
    assert sorted(loaded) == sorted(state)
    assert all(same(loaded[name], state[name]) for name in state)
    cut = write_checkpoint(tmp_path, 2, [s for r in range(2) for s in rows(state, r, 2)], {})
    assert same(load_file(cut / "rank-0.safetensors")["embed.weight[6:12, 0:8]"], state["embed.weight"][6:])


def test_shards_have_a_bounded_size(tmp_path):
    state = make_state(3)
    path = write_checkpoint(tmp_path, 1, whole(state), {}, options=WriteOptions(own_token(), shard_bytes=200))
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == "rank-0-0.safetensors"
    assert_holds(CheckpointFolder(tmp_path).open(1), state)


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 1), (2, 5), (5, 2), (4, 4), (16, 3)])
def test_any_number_of_row_shards_reads_any_other(tmp_path, writers, readers):
    state = make_state(4)
    write_checkpoint(tmp_path, 1, [s for r in range(writers) for s in rows(state, r, writers)], {})
    with CheckpointFolder(tmp_path).open(1) as checkpoint:
        for rank in range(readers):
            wanted = rows(state, rank, readers)
            targets = blank(wanted)
            checkpoint.read_into(targets, expected=state)
            assert all(same(t.tensor, w.tensor) for t, w in zip(targets, wanted, strict=True))


def _grid(name: str, tensor: torch.Tensor, cuts: list[list[int]]) -> list[Slice]:
    """The blocks between the cuts of each dimension."""
    spans = [list(itertools.pairwise(sorted({0, size, *(c % (size + 1) for c in cut)})))
             for size, cut in zip(tensor.shape, cuts, strict=True)]  # fmt: skip
    return [
        Slice(
            name, tuple(tensor.shape), tuple(a for a, _ in block), tensor[tuple(slice(*s) for s in block)].contiguous()
        )
        for block in itertools.product(*spans)
    ]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_grid_of_blocks_reads_any_other(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    cut = st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=len(shape), max_size=len(shape))
    tensor = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    root = tmp_path_factory.mktemp("grid")
    write_checkpoint(root, 1, _grid("x", tensor, data.draw(cut)), {})
    targets = blank(_grid("x", tensor, data.draw(cut)))
    with CheckpointFolder(root).open(1, verify=False) as checkpoint:
        checkpoint.read_into(targets)
    for t in targets:
        assert torch.equal(t.tensor, tensor[t.box.within(Box((0,) * len(shape), tuple(shape)))])


def test_reading_fills_parameters_that_require_gradients_and_strided_views(tmp_path):
    weight = torch.randn(6, 4)
    write_checkpoint(tmp_path, 1, [Slice.whole("w", weight)], {})
    parameter = torch.nn.Parameter(torch.zeros(12, 4))
    CheckpointFolder(tmp_path).open(1).read_into([Slice("w", (6, 4), (3, 0), parameter[8:11])])
    assert torch.equal(parameter[8:11], weight[3:])
    assert parameter[:8].abs().sum() == 0
    assert parameter.is_leaf


def test_all_differences_are_reported_at_once_and_nothing_is_written(tmp_path):
    state = make_state(5)
    write_checkpoint(tmp_path, 1, whole(state), {})
    wanted = {**state, "more": torch.zeros(2), "most": torch.zeros(2), "scale": torch.zeros(3), "mask": torch.zeros(9)}
    del wanted["steps"], wanted["experts"]
    targets = [Slice.whole(name, torch.zeros_like(t)) for name, t in wanted.items()]
    with pytest.raises(CheckpointError) as raised:
        CheckpointFolder(tmp_path).open(1).read_into(targets)
    text = str(raised.value)
    assert raised.value.code == "checkpoint-keys"
    assert "missing from the checkpoint (2): more, most" in text
    assert "unexpected in the checkpoint (2): " in text and "steps" in text and "experts" in text
    assert "scale (stored F32 [], wanted F32 [3])" in text
    assert "mask (stored BOOL [9], wanted F32 [9])" in text
    assert all(t.tensor.abs().sum() == 0 for t in targets)


def test_a_part_of_the_state_can_be_read_on_purpose(tmp_path):
    state = make_state(6)
    write_checkpoint(tmp_path, 1, whole(state), {})
    target = Slice.whole("embed.weight", torch.zeros(12, 8))
    checkpoint = CheckpointFolder(tmp_path).open(1)
    with pytest.raises(CheckpointError, match="unexpected"):
        checkpoint.read_into([target])
    checkpoint.read_into([target], partial=True)
    assert torch.equal(target.tensor, state["embed.weight"])
    target.tensor.zero_()
    checkpoint.read_into([target], expected=state)  # a rank that holds only some names of the whole state
    assert torch.equal(target.tensor, state["embed.weight"])


def test_an_explicitly_named_but_missing_checkpoint_is_an_error(tmp_path):
    write_checkpoint(tmp_path, 5, whole(make_state(1)), {})
    folder = CheckpointFolder(tmp_path)
    for which in (7, tmp_path / "step-7", str(tmp_path / "step-7")):
        with pytest.raises(
            CheckpointError, match=r"step-7: there is no such checkpoint\n  -> there are: step-5"
        ) as raised:
            folder.open(which)
        assert raised.value.code == "checkpoint-missing"
    with pytest.raises(CheckpointError, match="holds no tensor 'nope'"):
        folder.open(5).read_tensor("nope")


def test_a_state_with_a_hole_or_a_doubled_part_is_not_saved(tmp_path):
    state = {"a": torch.randn(6, 4), "b": torch.randn(3)}
    write_checkpoint(tmp_path, 1, whole(state), {})
    hole = [Slice("a", (6, 4), (0, 0), state["a"][:4]), Slice.whole("b", state["b"])]
    double = [Slice("a", (6, 4), (0, 0), state["a"][:4]), Slice("a", (6, 4), (3, 0), state["a"][3:])]
    other = [Slice("b", (6,), (0,), state["b"]), Slice("b", (6,), (3,), state["b"].double())]
    for slices, text in (
        (hole, r"tensor 'a': 8 of 24 elements are stored nowhere"),
        (double, r"tensor 'a': \[3:4, 0:4\] is stored twice"),
        (other, r"tensor 'b' is stored as F32 \[6\] and as F64 \[6\]"),
    ):
        with pytest.raises(CheckpointError, match=text) as raised:
            write_checkpoint(tmp_path, 2, slices, {})
        assert raised.value.code == "checkpoint-coverage"
        assert os.listdir(tmp_path) == ["step-1"]


def test_a_slice_outside_its_tensor_is_refused():
    with pytest.raises(ValueError, match="does not lie within"):
        Slice("a", (4, 4), (2, 0), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="does not lie within"):
        Slice("a", (4, 4), (0,), torch.zeros(3, 4))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.lists(st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in shape)), max_size=4),
        )
    )
)
def test_tiling_agrees_with_counting_every_element(case):
    shape, raw = case
    boxes = [Box(tuple(min(a, b) for a, b in box), tuple(abs(a - b) for a, b in box)) for box in raw]
    count = torch.zeros(shape, dtype=torch.int32)
    for box in boxes:
        count[box.within(Box((0,) * len(shape), tuple(shape)))] += 1
    assert (tiling_faults(shape, [(b, "f") for b in boxes]) == []) == bool((count == 1).all())


def test_boxes_outside_the_tensor_do_not_tile_it():
    assert "lies outside" in tiling_faults((4,), [(Box((2,), (3,)), "f")])[0]
    assert intersect(Box((0, 0), (2, 2)), Box((2, 0), (2, 2))) is None


# ---- writing under difficulties


def test_a_full_disk_is_said_before_the_first_byte(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 1, whole(make_state(1)), {})
    real = os.statvfs(tmp_path)
    full = os.statvfs_result([*real[:4], 0, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(CheckpointError, match=r"[0-9,]+ bytes are needed and 0 are free") as raised:
        write_checkpoint(tmp_path, 2, whole(make_state(2)), {})
    assert raised.value.code == "disk-full" and raised.value.step == 2
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize("limit", [10, 600, 1000])
def test_a_disk_that_fills_while_writing_leaves_nothing_torn(tmp_path, limit):
    write_checkpoint(tmp_path, 1, whole(make_state(1)), {})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large") as raised:
            write_checkpoint(tmp_path, 2, whole(make_state(2)), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert raised.value.code == "disk-full" and "rank-0.safetensors" in raised.value.message
    assert os.listdir(tmp_path) == ["step-1"]
    assert_holds(CheckpointFolder(tmp_path).newest_verified().checkpoint, make_state(1))


def test_a_disk_that_returns_other_bytes_is_noticed_before_the_rename(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, 1, whole(make_state(1)), {})
    real = os.preadv

    def lying(descriptor, buffers, offset):
        count = real(descriptor, buffers, offset)
        buffers[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", lying)
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors: tensor 'steps' .* does not match") as raised:
        write_checkpoint(tmp_path, 2, whole(make_state(2)), {})
    assert raised.value.code == "checkpoint-damaged"
    assert os.listdir(tmp_path) == ["step-1"]


def test_saving_a_step_again_replaces_it(tmp_path):
    write_checkpoint(tmp_path, 1, whole(make_state(1)), {})
    write_checkpoint(tmp_path, 1, whole(make_state(2)), {})
    assert os.listdir(tmp_path) == ["step-1"]
    assert_holds(CheckpointFolder(tmp_path).open(1), make_state(2))


def test_an_unwritable_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as raised:
        write_checkpoint(tmp_path / "file", 2, whole(make_state(2)), {})
    assert raised.value.code == "checkpoint-write"


def test_meta_that_is_no_json_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_checkpoint(tmp_path, 1, whole(make_state(1)), {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


# ---- the manifest


def _manifest(file: str = "rank-0.safetensors", offset: int = 16, size: int = 24) -> bytes:
    stored = StoredSlice("x", (2,), "F32", (0,), (2,), file, offset, "0" * 16)
    return Manifest({"step": 1}, (StoredFile(file, size, 16, "0" * 16),), (stored,)).to_bytes()


def test_a_manifest_reads_back():
    manifest = Manifest.from_bytes(_manifest(), "here")
    assert manifest.slices[0].global_shape == (2,) and manifest.files[0].size == 24
    assert json.loads(_manifest())["format"] == "bessemer-checkpoint-1"


def test_no_bit_of_a_manifest_can_change_unseen():
    raw = _manifest()
    unseal(raw, "here")
    for at in range(len(raw)):
        for bit in range(8):
            altered = bytearray(raw)
            altered[at] ^= 1 << bit
            with pytest.raises(CheckpointError, match="here: torn or altered"):
                unseal(bytes(altered), "here")
    for length in range(len(raw)):
        with pytest.raises(CheckpointError, match="here: torn or altered"):
            unseal(raw[:length], "here")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (_manifest("../rank-0.safetensors"), "is not the name of a shard"),
        (_manifest(".hidden.safetensors"), "is not the name of a shard"),
        (_manifest(offset=20), "does not lie within"),
        (_manifest(offset=8), "does not lie within"),
        (_manifest(size=20), "does not lie within"),
        (seal({"format": "bessemer-checkpoint-2"}), "is not known here"),
        (seal({"format": "bessemer-checkpoint-1", "files": [{}]}), "malformed"),
        (seal({}), "is not known here"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(raw, text):
    with pytest.raises(CheckpointError, match=text):
        Manifest.from_bytes(raw, "here")


def test_the_vault_and_the_manifest_need_no_torch():
    code = "import sys, bessemer.keep.vault, bessemer.keep.checkpoint; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
