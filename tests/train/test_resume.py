"""A run that was cut and went on equals one that wasn't: bitwise under the same layout, closely under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from train.loops import kill_at_bytes, small_job, train, train_until_one_ends


def losses(results: list[dict[str, Any]]) -> dict[int, float]:
    return {m["step"]: m["loss"] for m in results[0]["metrics"]}


def samples(results: list[dict[str, Any]]) -> dict[int, list[int]]:
    return {m["step"]: m["samples"] for m in results[0]["metrics"]}


def assert_same_state(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a["state"].keys() == b["state"].keys()
        for name, tensor in a["state"].items():
            assert torch.equal(tensor, b["state"][name]), f"{name} of rank {rank} differs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recipe"),
    [({"dp": 1}, "bf16"), ({"dp": 2}, "fp32"), ({"dp": 2, "dp_shard": "full"}, "bf16")],
    ids=["one process", "two replicas", "two shards"],
)
def test_a_kill_while_saving_changes_no_bit_of_the_run(tmp_path: Path, layout: dict[str, Any], recipe: str) -> None:
    """Step 4 is saved; then the vault dies by SIGKILL half-way through the save of step 8; the run goes on from 4."""
    fields = {"layout": layout, "precision": {"recipe": recipe}}
    (tmp_path / "straight").mkdir()
    (tmp_path / "cut").mkdir()
    straight = train(small_job(tmp_path / "straight", **fields))
    cut = small_job(tmp_path / "cut", **fields)
    begun = train(cut, stop_at=4)
    one_save = sum(f.stat().st_size for f in (cut.run.folder / "checkpoints" / "step-4").iterdir())
    killed = train_until_one_ends(cut, *kill_at_bytes(one_save // 2))
    assert killed["ended"].startswith("vault-lost"), killed["ended"]
    finished = train(cut)
    assert [e["step"] for e in finished[0]["events"] if e["event"] == "loaded"] == [4]
    assert losses(begun) | losses(finished) == losses(straight)
    assert samples(begun) | samples(finished) == samples(straight)
    assert_same_state(finished, straight)


@pytest.mark.slow
def test_other_numbers_of_ranks_go_on_within_the_layout_tolerance(tmp_path: Path) -> None:
    """dp 1 -> 2 -> 1, the middle part sharded: the same samples, losses within 5e-6."""
    (tmp_path / "straight").mkdir()
    (tmp_path / "moved").mkdir()
    straight = train(small_job(tmp_path / "straight", keep={"every": 0}))
    found: dict[int, float] = {}
    seen: dict[int, list[int]] = {}
    for layout, stop_at in (({"dp": 1}, 4), ({"dp": 2, "dp_shard": "gradient"}, 8), ({"dp": 1}, None)):
        results = train(small_job(tmp_path / "moved", keep={"every": 0}, layout=layout), stop_at=stop_at)
        assert results[0]["ended"] == ("stopped" if stop_at else "")
        assert not found.keys() & losses(results).keys()
        found |= losses(results)
        seen |= samples(results)
    assert seen == samples(straight)
    assert found.keys() == losses(straight).keys()
    assert max(abs(found[s] - loss) for s, loss in losses(straight).items()) < 5e-6


def test_a_finished_run_started_again_does_nothing(tmp_path: Path) -> None:
    job = small_job(tmp_path, train={"steps": 3})
    first = train(job)
    again = train(job)
    assert [m["step"] for m in first[0]["metrics"]] == [1, 2, 3]
    assert again[0]["metrics"] == []
    assert_same_state(again, first)


@pytest.mark.slow
def test_muon_resumes_bitwise(tmp_path: Path) -> None:
    (tmp_path / "straight").mkdir()
    (tmp_path / "cut").mkdir()
    muon = {"optimizer": "muon", "steps": 6}
    straight = train(small_job(tmp_path / "straight", train=muon))
    cut = small_job(tmp_path / "cut", train=muon)
    train(cut, stop_at=3)
    second = train(cut)
    assert [m["step"] for m in second[0]["metrics"]] == [4, 5, 6]
    assert_same_state(second, straight)


def test_other_data_is_refused(tmp_path: Path) -> None:
    """A cursor counted in one data set means nothing in another."""
    job = small_job(tmp_path, train={"steps": 4})
    train(job)
    for number in range(8):  # enough documents that the hash puts some into the training split
        (tmp_path / "corpus" / f"more_{number}.py").write_text(f"x = {number}\n" * 50)
    again = train(small_job(tmp_path, train={"steps": 6}))
    assert again[0]["ended"].startswith("other-data"), again[0]["ended"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["optimizer", "gradient", "full"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_sharding_evaluates_saves_and_ends_as_one_process_does(tmp_path: Path, kind: str, replicas: int) -> None:
    """An evaluation leaves nothing gathered: the saves after it are whole, and the run's end is another's start."""
    fields = {"train": {"steps": 6, "eval_every": 2, "global_batch": 16}, "keep": {"every": 2}}
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    one = train(small_job(tmp_path / "one", **fields))
    layout = {"dp": 2 * replicas, "dp_shard": kind}
    many = small_job(tmp_path / "many", **fields | {"keep": {"every": 2, "replicas": replicas}, "layout": layout})
    results = train(many)
    assert [r["ended"] for r in results] == [""] * (2 * replicas)
    for a, b in zip(one[0]["metrics"], results[0]["metrics"], strict=True):
        assert abs(a["loss"] - b["loss"]) < 5e-6
        assert a["samples"] == b["samples"]
        assert ("val_loss" in a) == ("val_loss" in b)
        assert abs(a.get("val_loss", 0) - b.get("val_loss", 0)) < 5e-6
    again = train(small_job(tmp_path / "many", **fields))
    assert again[0]["metrics"] == []
    close = one[0]["state"]
    assert again[0]["state"].keys() == close.keys()
    assert max(float((again[0]["state"][n] - t).abs().max()) for n, t in close.items()) < 5e-5


def test_published_weights_are_where_a_run_starts(tmp_path: Path) -> None:
    """model.weights, whole and sharded: the first loss is that of the run that wrote them."""
    from bessemer.models.hf import export_hf
    from bessemer.train.opened import open_trained

    (tmp_path / "first").mkdir()
    job = small_job(tmp_path / "first", train={"steps": 3})
    train(job)
    trained = open_trained(job.run.folder)
    names = [n for n in trained.checkpoint.names() if not n.startswith("optim.")]
    export_hf(trained.spec, ((n, trained.checkpoint.read_tensor(n)) for n in names), tmp_path / "hf")
    found = []
    for number, layout in enumerate(({"dp": 1}, {"dp": 2, "dp_shard": "full"})):
        folder = tmp_path / f"next-{number}"
        folder.mkdir()
        model = job.model.model_dump() | {"weights": str(tmp_path / "hf")}
        results = train(small_job(folder, model=model, layout=layout, train={"steps": 2}))
        assert results[0]["ended"] == ""
        found.append(results[0]["metrics"][0]["loss"])
    assert abs(found[0] - found[1]) < 5e-6
    fresh = train(
        small_job(tmp_path / "first", run={"name": "fresh", "dir": str(tmp_path / "runs")}, train={"steps": 2})
    )
    assert fresh[0]["metrics"][0]["loss"] - found[0] > 0.05, "three steps must have taught it something"


@pytest.mark.parametrize(
    ("fields", "code"), [({"seed": 99, "steps": 6}, "other-seed"), ({"steps": 3}, "beyond-the-end")]
)
def test_a_named_checkpoint_must_fit_the_job(tmp_path: Path, fields: dict[str, int], code: str) -> None:
    first = small_job(tmp_path, train={"steps": 4})
    train(first)
    named = str(first.run.folder / "checkpoints" / "step-4")
    other = small_job(tmp_path, run={"name": "other", "dir": str(tmp_path / "runs"), "resume": named}, train=fields)
    assert train(other)[0]["ended"].startswith(code)


def test_a_named_checkpoint_is_saved_in_the_new_run_too(tmp_path: Path) -> None:
    """Even when nothing is left to train: the new run folder must hold what it says it finished."""
    first = small_job(tmp_path, train={"steps": 4})
    train(first)
    named = str(first.run.folder / "checkpoints" / "step-4")
    other = small_job(
        tmp_path, run={"name": "other", "dir": str(tmp_path / "runs"), "resume": named}, train={"steps": 4}
    )
    assert train(other)[0]["ended"] == ""
    assert (other.run.folder / "checkpoints" / "step-4" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"recipe": "bf16"}, {"recipe": "fp8-delayed"}, ("trained under bf16 so far", "histories of amaxes are begun")),
        ({"recipe": "fp8-delayed"}, {"recipe": "bf16"}, ("trained under fp8-delayed", "amaxes are left out")),
        ({"recipe": "bf16"}, {"recipe": "fp8-current"}, ("trained under bf16 so far, fp8-current from here",)),
        (
            {"recipe": "fp8-delayed", "watch_every": 1, "fall_back": True},
            {"recipe": "fp8-delayed", "history": 4},
            ("fall-backs are left out", "of another length"),
        ),
    ],
)
def test_a_run_goes_on_under_another_recipe_and_says_so(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], told: tuple[str, ...]
) -> None:
    wide = {"model": small_job(tmp_path).model.model_dump() | {"hidden_size": 128, "intermediate_size": 128}}
    first = small_job(tmp_path, precision=before, train={"steps": 4}, **wide)
    [end] = train(first)
    kept = (
        end["state"]["precision.history/layers.0.mlp.down", (3, 16), (0, 0)] if before != {"recipe": "bf16"} else None
    )
    path = str(first.run.folder / "checkpoints" / "step-4")
    again = small_job(tmp_path, precision=after, train={"steps": 5}, run={"name": "other", "resume": path}, **wide)
    [end] = train(again)
    loaded = next(e for e in end["events"] if e["event"] == "loaded")
    assert loaded["step"] == 4 and end["ended"] == "" and end["metrics"][-1]["step"] == 5
    assert all(words in loaded["why"] for words in told), loaded["why"]
    if "history" in after and kept is not None:
        history = end["state"]["precision.history/layers.0.mlp.down", (3, 4), (0, 0)]
        assert torch.equal(history[:, 1:], kept[:, :3]), "the newest are kept"
