"""Tokenising into the cache: the same bytes however it is done, nothing stale, nothing lost to a kill."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpus_files import make_job, some_text, write_texts

from bessemer.core.errors import DataError
from bessemer.core.job import Job
from bessemer.data import open_dataset, prepare, prepared, shards
from bessemer.data.prepared import Prepared
from bessemer.data.tokenise import split_of

SHARD_BYTES = 8000


def shard_files(found: Prepared) -> dict[str, bytes]:
    (part,) = found.parts
    return {p.name: p.read_bytes() for p in sorted(part.folder.iterdir())}


def age(folder: Path) -> None:
    """Makes files older than the two seconds in which a change could go unseen."""
    for path in folder.rglob("*"):
        os.utime(path, ns=(1, 1))


def in_process(job: Job, env: dict[str, str] | None = None, *, kill_after: int = 0) -> subprocess.Popen[str]:
    """`prepare` in another process, which kills itself once `kill_after` bytes of the corpus are done."""
    code = (
        "import json, os, signal, sys\n"
        "from bessemer.core.job import Job\n"
        "from bessemer.data import prepare, tokenise\n"
        "tokenise._BATCH_BYTES_A_CORE = 500\n"
        "def progress(done, total):\n"
        f"    if {kill_after} and done >= {kill_after}: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"prepare(Job.model_validate(json.loads(sys.argv[1])), progress, shard_bytes={SHARD_BYTES})\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, job.model_dump_json()],
        env={**os.environ, **(env or {})},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_documents_end_with_the_end_of_text_and_are_split_by_content(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "c", 30)
    (folder / "copy.txt").write_bytes((folder / "003.txt").read_bytes())
    found = prepare(make_job(tmp_path, paths=[str(folder)]))
    texts = [p.read_text() for p in sorted(folder.iterdir())]
    for split in ("train", "val"):
        own = [t for t in texts if split_of(t.encode(), 0.2) == split]
        name = f"00000.{split}.tokens"
        tokens = shards.map_file(found.parts[0].folder / name, shards.np.dtype("<u2")).tolist()
        assert tokens == [i for t in own for i in (*t.encode(), 256)]
        assert found.total(split, "documents") == len(own)
        assert found.total(split, "text_bytes") == sum(len(t.encode()) for t in own)
    assert 0 < found.total("val", "documents") < found.total("train", "documents")


def test_the_bytes_do_not_depend_on_threads_or_processes(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "c", 30)
    results = []
    for i, env in enumerate(({"RAYON_NUM_THREADS": "1"}, {"RAYON_NUM_THREADS": "3"}, {"TOKENIZERS_PARALLELISM": "0"})):
        job = make_job(tmp_path, paths=[str(folder)], tokenizer="bpe-300", cache=str(tmp_path / f"cache{i}"))
        process = in_process(job, env)
        assert process.communicate()[1] == "" and process.returncode == 0
        results.append(shard_files(prepare(job, shard_bytes=SHARD_BYTES)))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 10


def test_a_killed_run_keeps_its_shards_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "c", 60)
    age(folder)
    straight = shard_files(prepare(make_job(tmp_path, paths=[str(folder)]), shard_bytes=SHARD_BYTES))
    job = make_job(tmp_path, paths=[str(folder)], cache=str(tmp_path / "killed"))
    process = in_process(job, kill_after=50_000)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (left,) = (p for p in (tmp_path / "killed/tokens").iterdir() if p.is_dir())
    finished = {p: p.stat().st_mtime_ns for p in left.glob("*.json")}
    assert len(finished) >= 3 and not (left / "manifest.json").exists()
    torn = sorted(finished)[-1].with_suffix(".train.tokens")
    os.truncate(torn, torn.stat().st_size - 1)
    (left / "00099.json.1.tmp").write_text("half")
    assert shard_files(prepare(job, shard_bytes=SHARD_BYTES)) == straight
    again = {p: p.stat().st_mtime_ns for p in finished}
    assert [p for p in finished if again[p] != finished[p]] == [sorted(finished)[-1]], "only the torn shard is redone"


def test_several_processes_share_the_work_of_one(tmp_path: Path) -> None:
    job = make_job(tmp_path, paths=[str(write_texts(tmp_path / "c", 40))], tokenizer="bpe-300")
    processes = [in_process(job) for _ in range(3)]
    assert [(p.communicate()[1], p.returncode) for p in processes] == [("", 0)] * 3
    assert len([p for p in (tmp_path / "cache/tokens").iterdir() if p.is_dir()]) == 1


def test_a_dead_holder_of_the_lock_blocks_nobody(tmp_path: Path) -> None:
    job = make_job(tmp_path, paths=[str(write_texts(tmp_path / "c", 60))])
    dead = in_process(job, kill_after=20_000)
    dead.communicate()
    begin = time.monotonic()
    prepare(job, shard_bytes=SHARD_BYTES)
    assert dead.returncode == -signal.SIGKILL and time.monotonic() - begin < 20


def test_progress_rises_to_the_size_of_the_corpus(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "c", 40)
    size = sum(p.stat().st_size for p in folder.iterdir())
    seen: list[tuple[int, int]] = []
    prepare(make_job(tmp_path, paths=[str(folder)]), lambda done, total: seen.append((done, total)), shard_bytes=2000)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen) and len(seen) > 3
    assert {t for _, t in seen} == {size} and seen[-1][0] == size


def test_changed_files_never_give_stale_tokens(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "c", 12)
    job = make_job(tmp_path, paths=[str(folder)])
    age(folder)
    prints = [open_dataset(job, "train").fingerprint]
    changed = folder / "005.txt"
    before = changed.read_text()
    changed.write_text(before.replace("iron", "lead"))  # same size, and the same time once more
    os.utime(changed, ns=(1, 1))
    prints.append(open_dataset(job, "train").fingerprint)
    (folder / "new.txt").write_text(some_text(99))
    prints.append(open_dataset(job, "train").fingerprint)
    assert len(set(prints)) == 3
    (folder / "new.txt").unlink()
    changed.write_text(before)
    assert open_dataset(job, "train").fingerprint == prints[0]
    for change in ({"seq_len": 16}, {"val_fraction": 0.4}, {"tokenizer": "bpe-300"}):
        assert open_dataset(make_job(tmp_path, paths=[str(folder)], **change), "train").fingerprint != prints[0]


def test_a_moved_corpus_is_not_tokenised_again(tmp_path: Path) -> None:
    first = prepare(make_job(tmp_path, paths=[str(write_texts(tmp_path / "c", 12))]))
    (tmp_path / "c").rename(tmp_path / "moved")
    assert prepare(make_job(tmp_path, paths=[str(tmp_path / "moved")])).parts[0].folder == first.parts[0].folder


def test_a_corpus_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "c", 60)

    def meddle(done: int, total: int) -> None:
        (folder / "059.txt").write_text("other")

    job = make_job(tmp_path, paths=[str(folder)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bessemer.data.tokenise._BATCH_BYTES_A_CORE", 500)
        with pytest.raises(DataError, match=r"059\.txt changed") as caught:
            prepare(job, meddle, shard_bytes=SHARD_BYTES)
    assert caught.value.code == "corpus-changed"
    prepare(job, shard_bytes=SHARD_BYTES)


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damaged_shards_are_noticed(tmp_path: Path, harm: str) -> None:
    job = make_job(tmp_path, paths=[str(write_texts(tmp_path / "c", 12))])
    path = prepare(job).parts[0].folder / "00000.train.tokens"
    raw = path.read_bytes()
    if harm == "flip":
        path.write_bytes(raw[:100] + bytes([raw[100] ^ 1]) + raw[101:])
    elif harm == "cut":
        path.write_bytes(raw[:-2])
    else:
        path.unlink()
    with pytest.raises(DataError, match=r"00000\.train\.tokens") as caught:
        prepare(job)
    assert caught.value.code == "shard-damaged" and "rm -r" in caught.value.fix


def test_an_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c/a.txt").write_text("")
    for tokenizer in ("bytes", "bpe-300"):
        with pytest.raises(DataError) as caught:
            prepare(make_job(tmp_path, paths=[str(tmp_path / "c")], tokenizer=tokenizer))
        assert caught.value.code == "corpus-empty"


def test_a_split_without_a_sample_and_a_corpus_below_a_batch(tmp_path: Path) -> None:
    texts = {split_of(some_text(i, 30).encode(), 0.2): some_text(i, 30) for i in range(20)}
    (tmp_path / "a.txt").write_text(texts["val"])
    with pytest.raises(DataError, match="the train split has 0 tokens in 0 of 1 document, ") as caught:
        prepare(make_job(tmp_path, paths=[str(tmp_path / "a.txt")]))
    assert "data.val_fraction = 0" in caught.value.fix and "seq_len" not in caught.value.fix
    (tmp_path / "a.txt").write_text(texts["train"])
    with pytest.raises(DataError, match="the val split has 0 tokens in 0 of 1 document, ") as caught:
        prepare(make_job(tmp_path, paths=[str(tmp_path / "a.txt")]))
    assert caught.value.code == "split-empty" and "data.val_fraction = 0" in caught.value.fix
    job = make_job(tmp_path, paths=[str(tmp_path / "a.txt")], val_fraction=0, train={"global_batch": 100})
    with pytest.raises(DataError, match="one step takes 100") as caught:
        prepare(job)
    assert caught.value.code == "corpus-small"
    with pytest.raises(DataError) as caught:
        open_dataset(job, "val")
    assert caught.value.code == "val-none"


def test_a_full_or_forbidden_cache_is_an_error_that_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, paths=[str(write_texts(tmp_path / "c", 40))])
    real = os.fsync
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="no space left") as caught:
        prepare(job, shard_bytes=SHARD_BYTES)
    assert caught.value.code == "cache-full"
    monkeypatch.undo()
    (folder,) = (p for p in (tmp_path / "cache/tokens").iterdir() if p.is_dir())
    assert not list(folder.glob("*.tmp")) and len(shards.finished_shards(folder)) >= 2
    prepare(job, shard_bytes=SHARD_BYTES)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError) as caught:
        prepare(make_job(tmp_path, paths=[str(tmp_path / "c")], cache=str(tmp_path / "file/cache")))
    assert caught.value.code == "cache-unwritable"


def test_a_bpe_is_trained_once_on_training_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path, paths=[str(write_texts(tmp_path / "c", 20))], tokenizer="bpe-300")
    seen: list[str] = []
    real = prepared.train_bpe
    monkeypatch.setattr(prepared, "train_bpe", lambda texts, recipe: seen.extend(texts) or real(texts, recipe))
    first = prepare(job)
    assert seen and all(split_of(t.encode(), 0.2) == "train" for t in seen)
    seen.clear()
    assert prepare(job).tokenizer.fingerprint == first.tokenizer.fingerprint and not seen
    assert json.loads(first.tokenizer_json.read_text())["model"]["type"] == "BPE"
    assert first.tokenizer.vocab_size == 300


def test_without_the_packages_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.core.errors import MissingExtra

    folder = write_texts(tmp_path / "c", 3)
    (folder / "a.parquet").write_bytes(b"PAR1")
    for package, extra in (("xxhash", "train"), ("pyarrow", "parquet")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtra) as caught:
                prepare(make_job(tmp_path, paths=[str(folder)]))
            assert f"bessemer[{extra}]" in caught.value.fix
