"""Whatever happened to the newest checkpoint, the right one is chosen, and the reason for each refusal is said."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from checkpoint_tools import META, WAIT_S, assert_holds, leftovers, make_state, rows, running_vault, whole

from bessemer.core.errors import CheckpointError
from bessemer.keep.checkpoint import CheckpointFolder, write_checkpoint
from bessemer.keep.vault_client import VaultClient
from bessemer.keep.writer import WriteOptions, clean_leftovers, own_token

DEAD_TOKEN = own_token().rsplit("-", 2)[0] + "-1-1"  # as if written by another process 1 of this host


def _save_all(vault, steps: list[int]) -> None:
    """Both ranks of a world of two save these steps, one after the other."""
    with VaultClient(vault.socket, rank=0, world_size=2) as a, VaultClient(vault.socket, rank=1, world_size=2) as b:
        for step in steps:
            state = make_state(step)
            a.save(step, rows(state, 0, 2), META)
            b.save(step, rows(state, 1, 2), META)
            a.wait(WAIT_S)
            b.wait(WAIT_S)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A run folder with steps 10, 20 and 30, all sound."""
    run = tmp_path_factory.mktemp("sound")
    with running_vault(run) as vault:
        _save_all(vault, [10, 20, 30])
        assert vault.finish() == 0
    return run


@pytest.fixture
def run(sound, tmp_path) -> Path:
    shutil.copytree(sound / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def _truncate(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def _data(folder: Path, rank: int = 0) -> int:
    with (folder / f"rank-{rank}.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _exchange(folder: Path) -> None:
    a, b, aside = folder / "rank-0.safetensors", folder / "rank-1.safetensors", folder / "x"
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


DAMAGE = {
    "data, first bit": (lambda p: _flip(p / "rank-0.safetensors", _data(p)), "rank-0.safetensors: tensor 'steps'"),
    "data, last bit": (lambda p: _flip(p / "rank-1.safetensors", -1), "rank-1.safetensors: tensor 'mask'"),
    "header length": (lambda p: _flip(p / "rank-0.safetensors", 0), "rank-0.safetensors: its header"),
    "header text": (lambda p: _flip(p / "rank-1.safetensors", 40), "rank-1.safetensors: its header"),
    "header padding": (lambda p: _flip(p / "rank-1.safetensors", _data(p, 1) - 1), "rank-1.safetensors: its header"),
    "shard one byte short": (lambda p: _truncate(p / "rank-0.safetensors", -1), "the manifest says"),
    "shard cut in the header": (lambda p: _truncate(p / "rank-0.safetensors", 20), "20 bytes, the manifest says"),
    "shard of no length": (lambda p: _truncate(p / "rank-1.safetensors", 0), "0 bytes, the manifest says"),
    "shard with a tail": (lambda p: _append(p / "rank-1.safetensors"), "the manifest says"),
    "shard missing": (lambda p: (p / "rank-1.safetensors").unlink(), "No such file"),
    "shard is a folder": (lambda p: _to_folder(p / "rank-1.safetensors"), "Is a directory"),
    "shards exchanged": (_exchange, "the manifest says"),
    "shard of another step": (
        lambda p: shutil.copy(p.parent / "step-20" / "rank-1.safetensors", p / "rank-1.safetensors"),
        "does not match its checksum",
    ),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "never completed"),
    "manifest of no length": (lambda p: _truncate(p / "manifest.json", 0), "torn or altered (0 bytes"),
    "manifest cut in half": (lambda p: _truncate(p / "manifest.json", 700), "torn or altered (700 bytes"),
    "manifest without its last byte": (lambda p: _truncate(p / "manifest.json", -1), "torn or altered"),
    "manifest, a bit of its text": (lambda p: _flip(p / "manifest.json", 30), "torn or altered"),
    "manifest, a bit of its checksum": (lambda p: _flip(p / "manifest.json", -6), "torn or altered"),
    "manifest with a tail": (lambda p: _append(p / "manifest.json"), "torn or altered"),
    "manifest is a folder": (lambda p: _to_folder(p / "manifest.json"), "Is a directory"),
    "manifest of another step": (
        lambda p: shutil.copy(p.parent / "step-20" / "manifest.json", p / "manifest.json"),
        "is the manifest of step 20",
    ),
    "folder empty": (lambda p: [f.unlink() for f in p.iterdir()], "never completed"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(run, what):
    act, reason = DAMAGE[what]
    act(run / "checkpoints" / "step-30")
    found = CheckpointFolder(run / "checkpoints").newest_verified()
    assert found.checkpoint.step == 20
    assert_holds(found.checkpoint, make_state(20))
    assert [r.step for r in found.refused] == [30]
    assert reason in found.refused[0].reason
    assert "step-30" in found.line and reason in found.line


@pytest.mark.parametrize("file", ["rank-0.safetensors", "rank-1.safetensors"])
def test_no_byte_of_a_shard_can_change_unseen(run, file):
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.root / "step-30" / file
    raw = path.read_bytes()
    for at in range(0, len(raw), 7):
        _flip(path, at)
        with pytest.raises(CheckpointError, match=file):
            folder.open(30)
        path.write_bytes(raw)
    folder.open(30)


def test_reading_verifies_what_it_reads_when_nothing_was_verified_before(run):
    path = run / "checkpoints" / "step-30"
    _flip(path / "rank-1.safetensors", -1)
    checkpoint = CheckpointFolder(path.parent).open(30, verify=False)
    checkpoint.read_tensor("embed.weight")
    with pytest.raises(CheckpointError, match=r"rank-1.safetensors: tensor 'mask' \[5:9\] does not match"):
        checkpoint.read_tensor("mask")


def test_damage_is_passed_over_until_one_verifies_and_if_none_does_each_reason_is_listed(run):
    folder = CheckpointFolder(run / "checkpoints")
    _flip(folder.root / "step-30" / "rank-0.safetensors", -1)
    (folder.root / "step-20" / "manifest.json").unlink()
    found = folder.newest_verified()
    assert found.checkpoint.step == 10 and [r.step for r in found.refused] == [30, 20]
    _truncate(folder.root / "step-10" / "rank-1.safetensors", 0)
    with pytest.raises(CheckpointError) as raised:
        folder.newest_verified()
    assert raised.value.code == "checkpoint-none"
    text = str(raised.value)
    assert "none of the 3 checkpoints" in text
    for part in ("step-30: ", "step-20: ", "step-10: ", "never completed", "does not match", "0 bytes"):
        assert part in text


def test_what_is_not_covered_by_the_manifest_is_not_read(run):
    root = run / "checkpoints"
    shutil.copy(root / "step-10" / "rank-1.safetensors", root / "step-30" / "rank-2.safetensors")
    (root / "step-30" / "notes.txt").write_text("x")
    shutil.copytree(root / "step-30", root / f".step-40.tmp-{DEAD_TOKEN}")
    shutil.copytree(root / "step-30", root / "step-040")
    (root / "step-50").write_text("a file")
    found = CheckpointFolder(root).newest_verified()
    assert found.checkpoint.step == 30 and found.refused == ()
    assert_holds(found.checkpoint, make_state(30))


# ---- the writer dies

_SHARDS_AND_MANIFEST = (1, 8, 100, 500, 700, 900, 1000, 1100, 1300, 1500, 1700, 1900, 2500, 3400)


def _die_while_saving_40(run: Path, *flags: str) -> None:
    with running_vault(run, *flags, name="dying") as vault, pytest.raises(CheckpointError) as raised:
        _save_all(vault, [40])
    assert raised.value.code == "vault-lost"
    assert vault.process.returncode == -9


def _next_start(run: Path) -> CheckpointFolder:
    """Another vault starts on the folder, clears it and can save again."""
    with running_vault(run, "--keep-last", "9", name="next") as vault:
        _save_all(vault, [50])
        assert vault.finish() == 0
    assert leftovers(run / "checkpoints") == []
    return CheckpointFolder(run / "checkpoints")


@pytest.mark.parametrize("offset", _SHARDS_AND_MANIFEST)
def test_the_vault_killed_at_any_byte_leaves_the_one_before(run, offset):
    _die_while_saving_40(run, "--fail-after-bytes", str(offset), "--keep-last", "9")
    found = CheckpointFolder(run / "checkpoints").newest_verified()
    assert found.checkpoint.step == 30 and found.refused == ()
    assert_holds(found.checkpoint, make_state(30))
    assert len(leftovers(run / "checkpoints")) == 1
    assert _next_start(run).steps() == [10, 20, 30, 50]


@pytest.mark.parametrize(
    ("point", "newest"),
    [("before-manifest", 30), ("before-rename", 30), ("after-rename", 40), ("before-delete", 40)],
)
def test_the_vault_killed_between_two_acts_leaves_a_sound_newest(run, point, newest):
    _die_while_saving_40(run, "--fail-at", point, "--keep-last", "3")
    found = CheckpointFolder(run / "checkpoints").newest_verified()
    assert found.checkpoint.step == newest and found.refused == ()
    assert_holds(found.checkpoint, make_state(newest))
    steps = _next_start(run).steps()
    assert steps == sorted({20, 30, 50, newest} | ({10} if point != "before-delete" else set()))


def test_a_checkpoint_that_was_being_replaced_goes_back_to_its_place(run):
    with running_vault(run, "--fail-at", "between-renames", name="dying") as vault, pytest.raises(CheckpointError):
        _save_all(vault, [30])
    assert CheckpointFolder(run / "checkpoints").newest_verified().checkpoint.step == 20
    folder = _next_start(run)
    assert folder.steps() == [10, 20, 30, 50]
    assert_holds(folder.open(30), make_state(30))


def test_cleaning_leaves_what_a_living_writer_and_the_own_token_write(tmp_path):
    write_checkpoint(tmp_path, 1, whole(make_state(1)), {})
    living, own = own_token(), "my-attempt"
    names = {t: f".step-2.tmp-{t}" for t in (living, own, DEAD_TOKEN, "another-attempt", "otherhost-12-345")}
    for name in names.values():
        (tmp_path / name).mkdir()
    (tmp_path / ".hidden").mkdir()
    cleaned = clean_leftovers(tmp_path, own)
    assert sorted(cleaned) == sorted(names[t] for t in (DEAD_TOKEN, "another-attempt", "otherhost-12-345"))
    assert sorted(os.listdir(tmp_path)) == sorted([".hidden", names[living], names[own], "step-1"])
    assert clean_leftovers(tmp_path / "absent", own) == []


def test_a_direct_write_starts_over_what_it_left_itself(tmp_path):
    options = WriteOptions("again")
    (tmp_path / ".step-1.tmp-again").mkdir()
    (tmp_path / ".step-1.tmp-again" / "rank-9.safetensors").write_text("torn")
    path = write_checkpoint(tmp_path, 1, whole(make_state(1)), {}, options=options)
    assert sorted(os.listdir(path)) == ["manifest.json", "rank-0.safetensors"]
