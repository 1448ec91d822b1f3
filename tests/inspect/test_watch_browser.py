"""The live page in a headless Chromium: finished, running, compared and recorded runs, by mouse, keyboard and label."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, served, tab, until
from watch_builder import LiveRun, RankWriter, finished_run

from bessemer.inspect.fleet_simulator import FleetSimulator, SimulatedFault
from bessemer.inspect.flight_records import StepSample
from bessemer.inspect.watch_page import style, write_report
from bessemer.inspect.watch_ranks import SampleFeed
from bessemer.inspect.watch_run import Prediction, RunWatch
from bessemer.inspect.watch_server import application

PLAN = Prediction(step_s=3e-5, low_s=2e-5, high_s=4e-5, tokens_per_s=3e7,
                  factors={"generality": 1.0, "effective_compute": 0.5, "node_efficiency": 0.8,
                           "cluster_efficiency": 1.0, "stability": 1.0, "yield": 0.4})  # fmt: skip

in_browser = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@contextmanager
def opened(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """The page at `url`, drawn once; fails if it complains on its console or asks for something from elsewhere."""
    said: list[str] = []
    with tab(browser, **context) as page:
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith((url, "data:")) else said.append(request.url))
        page.goto(url)
        until(page, "document.querySelectorAll('.tile').length", 6)
        yield page
        assert said == []


def text(page: Any, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({selector!r}).innerText"))


def cells(page: Any, table: str) -> list[list[str]]:
    script = f"[...document.querySelectorAll('#{table} tbody tr')].map(r => [...r.cells].map(c => c.innerText.trim()))"
    return list(page.evaluate(script))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[str]:
    folder = finished_run(tmp_path_factory.mktemp("watch") / "run", ranks=5)
    with served(application([RunWatch(folder, PLAN)])) as url:
        yield url


class TestFinished:
    pytestmark = in_browser

    def test_it_says_what_the_run_came_to(self, browser: Any, finished: str) -> None:
        with opened(browser, finished) as page:
            until(page, "document.querySelectorAll('#factor-table tbody tr').length", 6)
            until(page, "document.querySelector('#verdict-words').innerText.startsWith('No fault')")
            assert text(page, "#state") == "finished" and text(page, "#name") == "done"
            assert "40" in text(page, ".tile") and "of 40" in text(page, ".tile")
            factors = {row[0]: row for row in cells(page, "factor-table")}
            assert re.fullmatch(r"0\.\d{4}", factors["yield"][1]) and factors["yield"][3] == "0.4000"
            assert cells(page, "saved")[0][:3] == ["40", "3.00 MiB", "1.50 s"]
            assert ["3", "spare", "\u2013", "3"] in cells(page, "groups")
            assert "rank 1" in text(page, "#verdict-evidence")

    def test_numbers_stand_on_the_right_and_words_on_the_left(self, browser: Any, finished: str) -> None:
        with opened(browser, finished) as page:
            until(page, "document.querySelectorAll('#worst tbody tr').length > 0")
            where = page.evaluate("""[...document.querySelectorAll('td')]
                .filter((c) => c.checkVisibility() && c.innerText)
                .filter((c) => /^[\\u2212+-]?[\\d.,]+( (ms|s|µs|%|MiB|min .*))?$/.test(c.innerText.trim()))
                .filter((c) => getComputedStyle(c).textAlign !== 'right').map((c) => c.innerText)
                .filter((c, i, all) => all.indexOf(c) === i)""")
            assert where in ([], ["1", "2", "3", "4"], ["0", "1", "2", "3", "4"])  # the lists of a group's ranks

    def test_nothing_is_wider_than_the_screen(self, browser: Any, finished: str) -> None:
        with opened(browser, finished) as page:
            until(page, "document.querySelectorAll('#worst tbody tr').length > 0")
            for width, scheme in ((1280, "light"), (400, "light"), (400, "dark"), (1280, "dark")):
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 900})
                until(page, "document.querySelector('#heat').width <= innerWidth * devicePixelRatio")
                assert page.evaluate("document.documentElement.scrollWidth") == width
                boxes = page.evaluate("""[...document.querySelectorAll('main > section')].filter((s) => !s.hidden)
                    .map((s) => s.getBoundingClientRect()).map((r) => [r.top, r.bottom])""")
                assert all(above[1] <= below[0] for above, below in pairwise(boxes))

    def test_it_follows_the_colour_scheme_and_the_button(self, browser: Any, finished: str) -> None:
        shade = "getComputedStyle(document.body).backgroundColor"
        with opened(browser, finished, color_scheme="dark") as page:
            dark = page.evaluate(shade)
            page.click("#theme")
            light = page.evaluate(shade)
            assert dark != light
            page.click("#theme")
            assert page.evaluate(shade) == dark

    def test_filters_choose_ranks_by_number_host_and_state(self, browser: Any, finished: str) -> None:
        with opened(browser, finished) as page:
            until(page, "document.querySelector('#matches').innerText.startsWith('4 of 4 ranks')")
            page.fill("#find", "0, 2-3")
            assert text(page, "#matches").startswith("3 of 4 ranks")
            assert {row[0] for row in cells(page, "worst")} == {"0", "2", "3"}
            page.fill("#find", "no-such-host")
            assert text(page, "#matches").startswith("0 of 4 ranks") and cells(page, "worst") == []
            page.click("#clear")
            assert text(page, "#matches").startswith("4 of 4 ranks")
            page.select_option("#status", "lost")
            assert [row[:2] for row in cells(page, "worst")] == [["1", "lost"]]
            page.select_option("#status", "")
            page.select_option("#metric", label="forward")
            assert cells(page, "worst")[0][0] == "2" and "forward" in text(page, "#worst-title")

    def test_a_rank_opens_by_mouse_keyboard_and_table(self, browser: Any, finished: str) -> None:
        with opened(browser, finished) as page:
            until(page, "Boolean(page.heat.order)")
            page.click("#heat", position={"x": 10, "y": 10})
            until(page, "document.querySelector('#detail-title').innerText", "Rank 0")
            assert "<b>not markup</b>" in text(page, "#detail-body")
            assert "forward" in text(page, "#detail-body") and "ms" in text(page, "#detail-body")
            page.keyboard.press("Escape")
            assert page.evaluate("document.querySelector('#detail').hidden")
            assert page.evaluate("document.activeElement.id") == "heat"
            page.keyboard.press("ArrowRight")
            assert "rank 1" in text(page, "#announce") and "lost" in text(page, "#announce")
            page.keyboard.press("Enter")
            until(page, "document.querySelector('#detail-title').innerText", "Rank 1")
            assert page.evaluate("document.activeElement.id") == "detail"
            assert "killed by SIGKILL" in text(page, "#detail-body")
            page.click("#worst tbody tr:has-text('ended') button")
            until(page, "document.querySelector('#detail-title').innerText !== 'Rank 1'")
            page.click("#detail-close")
            assert page.evaluate("document.querySelector('#detail').hidden")

    def test_events_are_filtered_by_weight_and_words(self, browser: Any, finished: str) -> None:
        with opened(browser, finished) as page:
            until(page, "document.querySelectorAll('#event-table tbody tr').length > 5")
            page.select_option("#level", "warn")
            assert [row[2] for row in cells(page, "event-table")] == ["■ rank lost"]
            page.select_option("#level", "detail")
            page.fill("#words", "kernel s")
            assert len(cells(page, "event-table")) == 10

    def test_the_canvas_has_a_table_that_says_the_same(self, browser: Any, finished: str) -> None:
        with opened(browser, finished) as page:
            until(page, "Boolean(page.heat.order)")
            page.click("#as-table summary")
            until(page, "document.querySelectorAll('#hosts tbody tr').length", 1)
            assert [row[0] for row in cells(page, "phases")] == ["forward", "backward", "waiting", "data", "rest"]
            assert cells(page, "hosts")[0][1:3] == ["4", "2"]  # one is lost, one slow

    def test_everything_that_can_be_used_has_a_name(self, browser: Any, finished: str) -> None:
        with opened(browser, finished) as page:
            until(page, "document.querySelectorAll('#worst tbody tr').length > 0")
            nameless = page.evaluate("""[...document.querySelectorAll('button, select, input, canvas, table, section')]
                .filter((e) => !(e.labels?.length || e.ariaLabel || e.getAttribute('aria-labelledby') || e.caption ||
                    e.tagName === 'BUTTON' && e.innerText)).map((e) => e.outerHTML.slice(0, 80))""")
            assert nameless == []
            assert page.evaluate("document.documentElement.lang") == "en"
            order = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => Number(h.tagName[1]))")
            assert all(after <= before + 1 for before, after in pairwise(order))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_goes_on_is_followed(browser: Any, tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run")
    run.start()
    writer = RankWriter(run.folder, 0)
    for step in range(1, 4):
        run.step(step, step_s=60.0)  # so that five minutes may pass before it counts as standing still
        writer.step(step)
    run.now += 99.0
    with served(application([RunWatch(run.folder, PLAN)])) as url, opened(browser, url) as page:
        assert text(page, "#state") == "running"
        run.step(4, loss=1.25, step_s=60.0)
        writer.step(4)
        until(page, "document.querySelectorAll('.tile b')[1].innerText", "1.2500")
        page.focus("#find")
        page.keyboard.type("0")
        run.event("rank_lost", rank=0, why="<i>it died</i>", step=4)
        run.step(5, step_s=60.0)
        until(page, "document.querySelector('#announce').textContent.includes('it died')")
        assert page.evaluate("document.activeElement.id") == "find"  # what comes in doesn't move the focus
        assert "<i>it died</i>" in text(page, "#event-table")
        assert page.evaluate("page.runs[0].series.columns.step") == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_are_laid_over_each_other(browser: Any, tmp_path: Path) -> None:
    folders = [finished_run(tmp_path / name, name, ranks=count) for name, count in (("first", 4), ("second", 6))]
    with served(application([RunWatch(folder, PLAN) for folder in folders])) as url, opened(browser, url) as page:
        until(page, "document.querySelector('#legend').innerText.includes('second')")
        assert text(page, "#legend").split() == ["first", "second"]
        assert "3 of 3 ranks" in text(page, "#matches")
        page.select_option("#run", label="second")
        until(page, "document.querySelector('#matches').innerText.startsWith('5 of 5 ranks')")
        assert text(page, "#name") == "second"
        page.hover("figure canvas", position={"x": 300, "y": 80})
        assert "first: " in text(page, "figure .tip") and "second: " in text(page, "figure .tip")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_report_needs_no_server(browser: Any, tmp_path: Path) -> None:
    watch = RunWatch(finished_run(tmp_path / "run"), PLAN)
    watch.look(wait=True)
    write_report([watch], tmp_path / "report.html")
    with opened(browser, f"file://{tmp_path}/report.html") as page:
        assert text(page, "#state") == "finished" and "3 of 3 ranks" in text(page, "#matches")
        page.click("#worst tbody button")
        until(page, "document.querySelectorAll('#detail-body .stack span').length > 10")
        page.select_option("#axis", "t")
        assert text(page, "#trouble") == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_went_away_is_told_and_found_again(browser: Any, tmp_path: Path) -> None:
    watch = RunWatch(finished_run(tmp_path / "run"), PLAN)
    with served(application([watch])) as url, tab(browser) as page:
        page.goto(url)
        until(page, "document.querySelectorAll('.tile').length", 6)
        page.context.set_offline(True)
        page.evaluate("round()")
        until(page, "document.querySelector('#trouble').hidden", False)
        assert "tries again" in text(page, "#trouble")
        page.context.set_offline(False)
        until(page, "document.querySelector('#trouble').hidden")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_ranks_are_drawn(browser: Any, tmp_path: Path) -> None:
    fleet = FleetSimulator(faults=[SimulatedFault(kind="slow_rank", step=1, rank=4711, amount=0.3)], hash_every=0)
    feed = SampleFeed(fleet.placement)
    for record in fleet.records(22):
        if isinstance(record, StepSample):
            feed.take(record)
    run = LiveRun(tmp_path / "run")
    run.start(world=len(fleet.placement))
    run.now += 99.0
    run.event("finding", kind="slow_link", step=20, ranks=[800, 808], hosts=["node-100"], score=9.0, excess=0.5,
              text="a slow link", advice="watch", evidence=[])  # fmt: skip
    watch = RunWatch(run.folder, PLAN, feed)
    object.__setattr__(watch.job, "layout", watch.job.layout.model_copy(update={"pp": 8, "tp": 8, "dp": 160}))
    with served(application([watch])) as url, opened(browser, url) as page:
        until(page, "document.querySelector('#matches').innerText.startsWith('10,240 of 10,240 ranks')")
        assert cells(page, "worst")[0][:2] == ["4711", "slow"]
        hot = page.evaluate("""(() => { const c = document.querySelector('#heat'), k = c.width / c.clientWidth;
            const at = page.heat.order.indexOf(4711), x = (at % page.heat.columns + 0.5) * page.heat.cell * k;
            const y = (Math.floor(at / page.heat.columns) + 0.5) * page.heat.cell * k, d = c.getContext('2d');
            return [[...d.getImageData(x, y, 1, 1).data], rgb('hot')]; })()""")
        assert hot[0][:3] == hot[1]  # 30 % slower is the end of the ramp
        assert "1,280 boxes" in text(page, "#map-note") and "1 slow link" in text(page, "#map-note")
        page.fill("#find", "node-588")
        assert text(page, "#matches").startswith("8 of 10,240 ranks")


def test_words_can_be_read_in_both_schemes() -> None:
    """WCAG 2.2, criterion 1.4.3: text has a contrast of 4.5 to what is behind it."""
    sheet = style()
    for block in (sheet.partition("html[data-theme")[0], sheet.partition('data-theme="dark"]')[2].partition("}")[0]):
        colours = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{3,6})", block))
        for name in ("ink", "soft", "accent", "good", "warn", "bad"):
            for behind in ("bg", "card"):
                assert _contrast(colours[name], colours[behind]) >= 4.5, (name, behind)


def test_the_dark_colours_stand_twice_and_are_the_same() -> None:
    forced, asked = re.findall(
        r"html(?:\[data-theme=\"dark\"\]|:not\(\[data-theme=\"light\"\]\)) \{(.*?)\}", style(), re.S
    )
    assert forced.split() == asked.split()


def _contrast(one: str, other: str) -> float:
    lights = sorted((_light(one), _light(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _light(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
