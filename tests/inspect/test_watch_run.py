"""One run as the live page is told of it: only what is new, from a run that goes on, stands still, resumes or ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from watch_builder import Clock, LiveRun, RankWriter, finished_run

from bessemer.core.errors import RequestError
from bessemer.inspect import watch_run
from bessemer.inspect.watch_run import RunWatch, Seen

pytestmark = pytest.mark.timeout(60)


def seen_by(told: dict[str, Any]) -> Seen:
    """What a page has seen after an answer."""
    series, events = told["series"], told["events"]
    place = told["place"]["generation"] if "place" in told else -1
    return Seen(generation=series["generation"], rows=series["rows"], events=events["count"],
                reading=events["reading"], place=place)  # fmt: skip


def look(watch: RunWatch, seen: Seen | None = None, *, now: float | None = None) -> dict[str, Any]:
    watch.look(least_s=0.0, now=now)
    return watch.told(seen or Seen())[0]


def test_a_folder_without_a_job_is_refused_with_runs_that_are_there(tmp_path: Path) -> None:
    LiveRun(tmp_path / "runs" / "there")
    with pytest.raises(RequestError) as error:
        RunWatch(tmp_path / "runs" / "theer")
    assert error.value.code == "no-run" and str(tmp_path / "runs" / "there") in error.value.fix


def test_a_run_is_watched_from_before_its_start(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run")
    watch = RunWatch(run.folder)
    told = look(watch)
    assert told["run"]["state"] == "waiting" and "ranks" not in told and told["series"]["rows"] == 0
    run.start()
    run.step(1)
    told = look(watch, seen_by(told), now=run.now)
    assert told["run"]["state"] == "running" and told["run"]["step"] == 1
    assert told["series"]["columns"]["loss"] == [8]
    assert [row["name"] for row in told["events"]["rows"]] == ["start", "ready", "loaded"]


def test_a_page_is_told_only_what_it_lacks(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run")
    run.start()
    writers = [RankWriter(run.folder, rank) for rank in range(2)]
    for step in range(1, 11):
        run.step(step)
        for writer in writers:
            writer.step(step)
    watch = RunWatch(run.folder)
    first = look(watch, now=run.now)
    assert first["place"]["ranks"] == [[0, 1, 2]] and first["ranks"]["step"] == 10
    run.step(11)
    run.event("save", step=11, stall_s=0.1)
    second = look(watch, seen_by(first), now=run.now)
    assert second["series"]["columns"]["step"] == [11]
    assert [row["name"] for row in second["events"]["rows"]] == ["save"] and second["events"]["from"] == 3
    assert "place" not in second
    assert "ranks" not in look(watch, Seen(ranks=False), now=run.now)


def test_a_run_that_stands_still_is_told_with_its_verdict(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run", now=time.time() - 300.0)
    run.start()
    run.step(1)
    watch = RunWatch(run.folder)
    assert look(watch, now=run.now + 29.0)["run"]["state"] == "running"
    told = look(watch, now=run.now + 31.0)
    assert told["run"]["state"] == "quiet" and told["run"]["quiet_s"] == pytest.approx(31.0)
    watch.landing.join()
    verdict = watch.told(Seen())[0]["verdict"]
    assert verdict["words"] == "No single rank is guilty: unknown"
    assert "no end was recorded" in verdict["evidence"][0]


def test_a_slow_run_may_be_quiet_for_five_of_its_steps(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run")
    run.start()
    for step in range(1, 4):
        run.step(step, step_s=20.0)
    watch = RunWatch(run.folder)
    assert look(watch, now=run.now + 99.0)["run"]["state"] == "running"
    assert look(watch, now=run.now + 101.0)["run"]["state"] == "quiet"


def test_a_resumed_run_forgets_the_steps_that_were_lost(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run")
    run.start()
    for step in range(1, 6):
        run.step(step)
    watch = RunWatch(run.folder)
    before = look(watch, now=run.now)
    metrics = run.folder / "metrics.jsonl"
    kept = run.folder / "aside"
    kept.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    kept.replace(metrics)  # as the next start cuts it
    run.start(attempt=2)
    run.step(4, loss=0.25)
    told = look(watch, seen_by(before), now=run.now)
    assert told["run"]["attempt"] == 2
    assert told["series"]["from"] == 0 and told["series"]["generation"] != before["series"]["generation"]
    assert told["series"]["columns"]["step"] == [1, 2, 3, 4] and told["series"]["columns"]["loss"][-1] == 0.25


def test_boxes_that_were_there_before_the_attempt_are_stale(tmp_path: Path) -> None:
    """Ranks of the new attempt have not made theirs yet; there is one rank less now."""
    run = LiveRun(tmp_path / "run")
    run.start()
    writers = [RankWriter(run.folder, rank) for rank in range(3)]
    for writer in writers:
        writer.step(1)
    watch = RunWatch(run.folder)
    assert look(watch, now=run.now)["ranks"]["counts"] == {"running": 3}
    run.now = time.time() + 1.0
    run.start(attempt=2)
    assert look(watch, now=run.now)["ranks"]["counts"] == {"stale": 3}
    for rank in range(2):
        RankWriter(run.folder, rank, clock=Clock(time.perf_counter() + 2.0)).step(1)
    watch.ranks.feed._boxes._looked_s = 0.0  # type: ignore[attr-defined]
    told = look(watch, now=run.now)
    assert told["ranks"]["counts"] == {"running": 2, "stale": 1}
    assert [row["rank"] for row in told["ranks"]["worst"]] == [], "a stale one is none of the run's"


def test_a_finished_run_has_its_ledger_verdict_checkpoints_and_spare(tmp_path: Path) -> None:
    watch = RunWatch(finished_run(tmp_path / "run"))
    watch.look(wait=True)
    told, frame = watch.told(Seen())
    assert told["run"]["state"] == "finished" and told["run"]["step"] == 40
    assert 0 < told["ledger"]["yield"] < 1 and told["verdict"]["words"] == "No fault"
    assert told["keep"]["saved"][0]["step"] == 40 and told["keep"]["stall_s"] == 0.25
    assert [g["state"] for g in told["keep"]["groups"]] == ["active", "lost", "active", "spare"]
    assert told["ranks"]["counts"]["lost"] == 1 and len(frame) == 3 * 10
    assert told["verdict"]["losses"][0]["rank"] == 1
    json.dumps(told, allow_nan=False)


def test_watching_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")

    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}

    before = state()
    watch = RunWatch(folder)
    watch.look(wait=True)
    watch.told(Seen())
    watch.detail(0)
    assert state() == before


def test_the_whole_run_is_not_read_each_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    real = watch_run.read_ledger
    monkeypatch.setattr(watch_run, "read_ledger", lambda folder: asked.append(folder) or real(folder))
    run = LiveRun(tmp_path / "run")
    run.start()
    watch = RunWatch(run.folder)
    for step in range(1, 8):
        run.step(step)
        look(watch, now=run.now)
        watch.ledger.join()
    assert len(asked) == 1 and watch.series.last("step") == 7


def test_two_pages_share_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LiveRun(tmp_path / "run")
    run.start()
    watch = RunWatch(run.folder)
    watch.look()
    read: list[int] = []
    monkeypatch.setattr(watch._metrics, "read", lambda: read.append(1) or (False, []))
    watch.look()
    assert read == []  # it was read less than a second ago


def test_the_detail_of_a_rank_has_its_history_log_and_open_phase(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    writer = RankWriter(folder, 3)
    writer.step(1)
    writer.step(2, until="comm_s")
    watch = RunWatch(folder)
    watch.look(wait=True)
    first, last = watch.detail(0), watch.detail(3)
    assert first is not None and last is not None
    assert first["log"] == ["first line", "<b>not markup</b>"]
    assert len(first["history"]) == 25 and first["phases"][0] == "forward"
    assert [phase["name"] for phase in last["open"]] == ["comm_s"] and last["doing"] == "comm_s"
    lost = watch.detail(1)
    assert lost is not None and [event["name"] for event in lost["events"]] == ["rank_started", "rank_lost"]
    assert watch.detail(99) is None


def test_a_long_log_gives_its_end(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    (folder / "logs" / "rank-0.log").write_text("".join(f"line {n}\n" for n in range(20_000)))
    watch = RunWatch(folder)
    watch.look(least_s=0.0)
    detail = watch.detail(0)
    assert detail is not None and detail["log"][-1] == "line 19999" and len(detail["log"]) == 20


def test_the_tensors_that_lose_most_are_told(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run")
    run.start()
    run.event("watch", every=1, names=["layers.0.q", "layers.0.k"], exponents=[-24, 16], fallen={})
    role = {"saturated": [0.0, 0.25], "flushed": [0.5, 0.0], "error": [0.01, 0.02], "amax": [1.0, 2.0]}
    run.step(1, precision={"x": role, "weight": {"saturated": [0.0, None]}, "grad": {}, "result": [0.1, 0.1]})
    run.event("warning", message="falls back", fall_back=["layers.0.k"], step=1, why="clipped")
    told = look(RunWatch(run.folder), now=run.now)["precision"]
    assert [(row["name"], row["role"]) for row in told["worst"]][:2] == [("layers.0.k", "x"), ("layers.0.q", "x")]
    assert told["step"] == 1 and told["fallen"] == {"layers.0.k": 1} and len(told["worst"]) == 3


def test_damage_is_counted_and_shown(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run")
    run.start()
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write("torn{\n")
    run.step(1)
    assert look(RunWatch(run.folder), now=run.now)["run"]["damaged"] == 1


def test_a_run_without_rights_to_a_box_is_still_shown(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    os.truncate(folder / "blackbox" / "rank-0", 10)
    watch = RunWatch(folder)
    watch.look(wait=True)
    assert watch.told(Seen())[0]["place"]["ranks"] == [[1, 1, 2]]
