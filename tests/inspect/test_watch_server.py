"""The server of the live page, its figures for Prometheus, and the Grafana dashboard that shows them."""

from __future__ import annotations

import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from watch_builder import LiveRun, finished_run

from bessemer.core.errors import RequestError
from bessemer.inspect.watch_prometheus import FIGURES, exposition
from bessemer.inspect.watch_run import Prediction, RunWatch
from bessemer.inspect.watch_server import MAGIC, application, listen

pytestmark = pytest.mark.timeout(60)
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "bessemer.json"
PLAN = Prediction(step_s=0.5, low_s=0.4, high_s=0.6, tokens_per_s=2000.0, factors={"generality": 0.9, "yield": 0.5})


def client_of(*folders: Path, secret: str = "", base_url: str = "http://localhost:8711") -> TestClient:
    app = application([RunWatch(folder, PLAN) for folder in folders], secret=secret)
    return TestClient(app, base_url=base_url)


def unpacked(content: bytes) -> tuple[dict[str, Any], bytes]:
    assert content[:4] == MAGIC
    (length,) = struct.unpack("<I", content[4:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def test_a_page_polls_a_run(tmp_path: Path) -> None:
    client = client_of(finished_run(tmp_path / "run"))
    told, frame = unpacked(client.get("/poll?run=0").content)
    assert told["run"]["name"] == "done" and told["predicted"]["step_s"] == 0.5
    assert len(frame) == told["ranks"]["count"] * 10
    events, series = told["events"], told["series"]
    query = f"/poll?run=0&rows={series['rows']}&generation={series['generation']}&events={events['count']}"
    query += f"&reading={events['reading']}&place={told['place']['generation']}&ranks=0"
    told, frame = unpacked(client.get(query).content)
    assert told["series"]["columns"]["step"] == [] and told["events"]["rows"] == [] and frame == b""


def test_runs_are_compared_by_number(tmp_path: Path) -> None:
    client = client_of(finished_run(tmp_path / "a", "first"), finished_run(tmp_path / "b", "second"))
    assert client.get("/runs").json() == ["first", "second"]
    assert unpacked(client.get("/poll?run=1&ranks=0").content)[0]["run"]["name"] == "second"


def test_the_page_comes_with_headers_that_keep_it_to_itself(tmp_path: Path) -> None:
    client = client_of(finished_run(tmp_path / "run"))
    page = client.get("/")
    assert page.status_code == 200 and "<title>Bessemer watch" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["cache-control"] == "no-store"
    for path in ("/page.css", "/page.js"):
        assert client.get(path).status_code == 200
    assert not re.search(r"(src|href)=\"(https?:)?//", page.text), "nothing comes from elsewhere"
    assert not re.search(r"https?://", client.get("/page.js").text)


def test_a_rank_is_told_and_an_unknown_one_is_not(tmp_path: Path) -> None:
    client = client_of(finished_run(tmp_path / "run"))
    client.get("/poll?run=0")
    assert client.get("/rank?run=0&rank=2").json()["host"]
    assert client.get("/rank?run=0&rank=99").status_code == 404


@pytest.mark.parametrize(
    ("path", "says"),
    [("/poll?run=7", "run = 7"), ("/poll?run=-1", "run = -1"), ("/poll?run=x", "'x' is no whole number"),
     ("/rank?run=0&rank=one", "'one' is no whole number")],
)  # fmt: skip
def test_a_wrong_request_is_told_why(tmp_path: Path, path: str, says: str) -> None:
    answer = client_of(finished_run(tmp_path / "run")).get(path)
    assert answer.status_code == 400 and says in answer.json()["error"]


@pytest.mark.parametrize("method", ["post", "put", "delete"])
def test_nothing_can_be_changed(tmp_path: Path, method: str) -> None:
    assert getattr(client_of(finished_run(tmp_path / "run")), method)("/poll?run=0").status_code == 405


def test_a_page_of_another_site_reads_nothing(tmp_path: Path) -> None:
    client = client_of(finished_run(tmp_path / "run"), base_url="http://elsewhere.example")
    assert client.get("/poll?run=0").status_code == 400


@pytest.mark.parametrize("host", ["127.0.0.1:8711", "localhost", "[::1]:8711"])
def test_this_computer_may_be_called_by_each_of_its_names(tmp_path: Path, host: str) -> None:
    assert client_of(finished_run(tmp_path / "run"), base_url=f"http://{host}").get("/runs").status_code == 200


def test_a_secret_is_asked_for(tmp_path: Path) -> None:
    client = client_of(finished_run(tmp_path / "run"), secret="correct horse battery")
    refused = client.get("/metrics")
    assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Basic")
    for given in ("wrong", ""):
        assert client.get("/metrics", auth=("anybody", given)).status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Basic %%%"}).status_code == 401
    assert client.get("/metrics", auth=("anybody", "correct horse battery")).status_code == 200
    token = base64.b64encode("ä:ö".encode()).decode()
    assert client.get("/metrics", headers={"Authorization": f"Basic {token}"}).status_code == 401


def test_a_port_that_is_taken_is_told_with_what_to_type() -> None:
    first = listen("127.0.0.1", 0)
    try:
        with pytest.raises(RequestError) as error:
            listen("127.0.0.1", first.getsockname()[1])
        assert error.value.code == "port-taken" and "--port 0" in error.value.fix
    finally:
        first.close()


def test_an_address_of_another_computer_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        listen("192.0.2.1", 0)  # reserved for documentation
    assert error.value.code == "watch-address"


def samples(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            found[series] = float(value)
    return found


def test_prometheus_gets_aggregates_and_the_worst_ranks(tmp_path: Path) -> None:
    client = client_of(finished_run(tmp_path / "run"))
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(answer.text)
    assert found['bessemer_step{run="done"}'] == 40
    assert found['bessemer_run_state{run="done",state="finished"}'] == 1
    assert found['bessemer_predicted_step_seconds{run="done"}'] == 0.5
    assert found['bessemer_ranks{run="done",state="lost"}'] == 1
    assert found['bessemer_saved_step{run="done"}'] == 40
    assert {s.partition("{")[0] for s in found} <= set(FIGURES)


def test_prometheus_text_has_each_name_once_and_escapes(tmp_path: Path) -> None:
    runs = [RunWatch(finished_run(tmp_path / "a", "one")), RunWatch(finished_run(tmp_path / "b", "two"))]
    for run in runs:
        run.look(wait=True)
    runs[1].name = 'a "quoted"\nname\\'
    text = exposition(runs)
    types = re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE)
    assert len({name for name, _ in types}) == len(types)
    sample = re.compile(r'^[a-z_]+\{([a-z]+="([^"\\]|\\.)*",?)+\} -?\d\S*$')
    assert all(sample.match(line) for line in text.splitlines() if not line.startswith("#"))
    assert r'run="a \"quoted\"\nname\\"' in text


def test_the_number_of_series_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    counts = []
    for ranks in (3, 12):
        watch = RunWatch(finished_run(tmp_path / f"run-{ranks}", ranks=ranks))
        watch.look(wait=True)
        counts.append(len([s for s in samples(exposition([watch])) if "straggler" not in s]))
    assert counts[1] <= counts[0] + 1  # one more state of groups at most


# The keys that Grafana's dashboard schema knows (kinds/dashboard/dashboard_kind.cue, schema version 36).
DASHBOARD_KEYS = {
    "id", "uid", "title", "description", "revision", "gnetId", "tags", "style", "timezone", "editable", "graphTooltip",
    "time", "timepicker", "fiscalYearStartMonth", "liveNow", "weekStart", "refresh", "schemaVersion", "version",
    "panels", "templating", "annotations", "links", "snapshot",
}  # fmt: skip
PANEL_KEYS = {
    "type", "id", "pluginVersion", "tags", "targets", "title", "description", "transparent", "datasource", "gridPos",
    "links", "repeat", "repeatDirection", "repeatPanelId", "maxDataPoints", "thresholds", "timeRegions",
    "transformations", "interval", "timeFrom", "timeShift", "libraryPanel", "options", "fieldConfig",
}  # fmt: skip
FIELD_KEYS = {
    "displayName", "displayNameFromDS", "description", "path", "writeable", "filterable", "unit", "decimals", "min",
    "max", "mappings", "thresholds", "color", "links", "noValue", "custom",
}  # fmt: skip
SHARING_KEYS = {"__inputs", "__requires"}
"""Which Grafana asks the importer for, and takes out."""


def test_the_dashboard_has_the_keys_of_grafanas_schema() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert set(board) - SHARING_KEYS <= DASHBOARD_KEYS
    assert board["id"] is None and 8 <= len(board["uid"]) <= 40 and board["schemaVersion"] == 36
    assert board["graphTooltip"] in (0, 1, 2) and {"from", "to"} == set(board["time"])
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert set(panel) <= PANEL_KEYS and panel["type"] and {"options", "fieldConfig"} <= set(panel)
        place = panel["gridPos"]
        assert place["h"] > 0 and 0 < place["w"] <= 24 and place["x"] >= 0 and place["x"] + place["w"] <= 24
        defaults = panel["fieldConfig"]["defaults"]
        assert set(defaults) <= FIELD_KEYS and panel["fieldConfig"]["overrides"] == []
        steps = defaults["thresholds"]["steps"]
        assert steps[0]["value"] is None and [s["value"] for s in steps[1:]] == sorted(s["value"] for s in steps[1:])
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & cells, panel["title"]
        cells |= mine


def test_the_dashboard_imports_with_a_datasource_of_the_importers_choice() -> None:
    board = json.loads(DASHBOARD.read_text())
    (wanted,) = board["__inputs"]
    assert wanted["type"] == "datasource" and wanted["pluginId"] == "prometheus"
    used = {json.dumps(panel["datasource"]) for panel in board["panels"]}
    assert used == {json.dumps({"type": "prometheus", "uid": "${" + wanted["name"] + "}"})}
    listed = {need["id"] for need in board["__requires"] if need["type"] == "panel"}
    assert listed == {panel["type"] for panel in board["panels"]}
    (variable,) = board["templating"]["list"]
    assert variable["name"] == "run" and variable["query"]["query"] == "label_values(bessemer_step, run)"


def test_the_dashboard_asks_only_for_figures_that_are_exposed_and_for_most_of_them() -> None:
    text = DASHBOARD.read_text()
    asked = set(re.findall(r"bessemer_\w+", text)) - {"bessemer_watch"}
    assert asked <= set(FIGURES), asked - set(FIGURES)
    assert set(FIGURES) - asked <= {
        "bessemer_attempt", "bessemer_steps", "bessemer_learning_rate", "bessemer_dropped_choices", "bessemer_groups",
        "bessemer_straggler_rank",
    }  # fmt: skip


def test_a_run_that_has_not_started_is_served(tmp_path: Path) -> None:
    client = client_of(LiveRun(tmp_path / "run").folder)
    told, frame = unpacked(client.get("/poll?run=0").content)
    assert told["run"]["state"] == "waiting" and frame == b""
    assert samples(client.get("/metrics").text)['bessemer_run_state{run="live",state="waiting"}'] == 1
