"""What may be deleted, and that never the last good checkpoint goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_tools import make_state, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.core.errors import CheckpointError
from bessemer.keep.checkpoint import CheckpointFolder, Retention, write_checkpoint
from bessemer.keep.writer import WriteOptions


def _save(root: Path, step: int, retention: Retention | None = None) -> None:
    write_checkpoint(root, step, whole({"x": make_state(step)["mask"]}), {}, retention=retention)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, 0, [70]),
        (3, 0, [50, 60, 70]),
        (9, 0, [10, 20, 30, 40, 50, 60, 70]),
        (1, 20, [20, 40, 60, 70]),
        (2, 30, [30, 60, 70]),
        (2, 1, [10, 20, 30, 40, 50, 60, 70]),
    ],
)
def test_the_newest_and_every_nth_stay(tmp_path, keep_last, keep_every, kept):
    for step in range(10, 80, 10):
        _save(tmp_path, step, Retention(keep_last, keep_every))
    assert CheckpointFolder(tmp_path).steps() == kept
    assert sorted(os.listdir(tmp_path)) == sorted(f"step-{s}" for s in kept)


def test_damaged_ones_do_not_count_among_those_to_keep(tmp_path):
    for step in (10, 20, 30, 40):
        _save(tmp_path, step)
    (tmp_path / "step-30" / "manifest.json").unlink()
    os.truncate(tmp_path / "step-40" / "rank-0.safetensors", 5)
    _save(tmp_path, 50, Retention(2))
    assert CheckpointFolder(tmp_path).steps() == [20, 30, 40, 50]
    _save(tmp_path, 60, Retention(2))
    assert CheckpointFolder(tmp_path).steps() == [50, 60]


def test_newer_ones_of_another_past_are_left_alone(tmp_path):
    for step in (10, 20, 90):
        _save(tmp_path, step)
    _save(tmp_path, 30, Retention(1))
    assert CheckpointFolder(tmp_path).steps() == [30, 90]


@settings(max_examples=10, deadline=None)
@given(
    steps=st.lists(st.integers(1, 30), unique=True, min_size=1, max_size=7),
    torn=st.sets(st.integers(0, 6)),
    keep_last=st.integers(1, 4),
    keep_every=st.sampled_from([0, 2, 5]),
)
def test_after_any_history_the_newest_good_one_is_the_one_just_saved(
    tmp_path_factory, steps, torn, keep_last, keep_every
):
    root = tmp_path_factory.mktemp("history")
    retention = Retention(keep_last, keep_every)
    for i, step in enumerate(sorted(steps)):
        _save(root, step, retention)
        folder = CheckpointFolder(root)
        assert folder.newest_verified().checkpoint.step == step
        assert [s for s in folder.steps() if s <= step][-1] == step
        if i in torn:
            (root / f"step-{step}" / "manifest.json").unlink()


def test_a_write_that_fails_deletes_nothing(tmp_path, monkeypatch):
    for step in (10, 20):
        _save(tmp_path, step)
    monkeypatch.setattr("bessemer.keep.writer.check_slices", _damaged)
    with pytest.raises(CheckpointError):
        _save(tmp_path, 30, Retention(1))
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-20"]


def _damaged(*_: object, **__: object) -> None:
    raise CheckpointError("read back differently", code="checkpoint-damaged")


def test_deleting_by_hand_is_possible(tmp_path):
    for step in (10, 20):
        _save(tmp_path, step)
    CheckpointFolder(tmp_path).delete(20)
    assert os.listdir(tmp_path) == ["step-10"]


def test_senseless_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_last = 0"):
        Retention(0)
    with pytest.raises(ValueError, match="keep_every = -1"):
        Retention(1, -1)
    assert Retention(1).apply(tmp_path, 5, WriteOptions("t")) == []
