"""What a run prints: columns, events, and nothing when quiet but what matters."""

from __future__ import annotations

import io

import pytest

from bessemer.keep.progress import HEADER_EVERY, Printer, _clock, event_line


def printed(steps: int, *, quiet: bool = False, last: int | None = None) -> list[str]:
    stream = io.StringIO()
    printer = Printer(steps, quiet=quiet, stream=stream)
    printer.open()
    for step in range(1, (last or steps) + 1):
        numbers = {"loss": 8.5, "grad_norm": 1.25, "lr": 3e-4, "tokens_per_s": 12345.6, "step_s": 0.4}
        printer.metric({"step": step, **numbers})
    printer.line("saved", "step 3")
    printer.line("warning", "odd", "yellow")
    printer.close()
    return stream.getvalue().splitlines()


def test_a_line_a_step_in_columns_under_a_header() -> None:
    lines = printed(100, last=3)
    assert lines[0].split("  ")[-1] == "left" or lines[0].endswith("left")
    for step, line in enumerate(lines[1:4], 1):
        assert line.split()[:6] == [f"{step}/100", "8.5000", "1.2500", "3.00e-04", "12,346", "0.400"]
        assert len(line) == len(lines[0])
    assert lines[4:] == ["saved     step 3", "warning   odd"]


def test_the_header_comes_again() -> None:
    lines = printed(3 * HEADER_EVERY)
    assert sum("grad norm" in line for line in lines) == 3


def test_quiet_prints_warnings_only() -> None:
    assert printed(5, quiet=True) == ["warning   odd"]


def test_a_missing_number_is_a_dash() -> None:
    stream = io.StringIO()
    Printer(2, stream=stream).metric({"step": 1, "loss": None})
    assert stream.getvalue().splitlines()[1].split()[1:6] == ["-"] * 5


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (754, "12:34"), (11045, "3:04:05"), (183845, "2d 03:04")],
)
def test_the_clock(seconds: float, text: str) -> None:
    assert _clock(seconds) == text


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "loaded", "step": 0, "path": None, "why": "none yet"}, "nothing, a fresh start (none yet)"),
        ({"event": "loaded", "step": 3, "path": "p", "why": "newest"}, "step 3 from p (newest)"),
        (
            {"event": "saved", "step": 3, "path": "p", "bytes": 1 << 20, "seconds": 0.5},
            "step 3  1.00 MiB  in 500 ms  p",
        ),
        ({"event": "save_failed", "step": 3, "error": "disk full"}, "step 3 could not be saved: disk full"),
        ({"event": "eval", "step": 3, "loss": 4.5, "bits_per_byte": 1.5}, "step 3  val loss 4.5000  bits/byte 1.5000"),
        ({"event": "machine", "peak_flops": {"bf16": 1.2e12}, "kind": "measured"}, "peak bf16 1.20 TFLOP/s (measured)"),
        ({"event": "warning", "message": "odd", "rank": 2}, "odd (rank 2)"),
        (
            {"event": "operators", "path": "reference", "why": "no C++ compiler"},
            "torch's operators are used, the faster native kernels are not: no C++ compiler",
        ),
    ],
)
def test_events_that_people_see(event: dict[str, object], text: str) -> None:
    line = event_line(event)
    assert line is not None
    assert line[1] == text


def test_other_events_are_not_printed() -> None:
    assert event_line({"event": "kernels", "step": 3}) is None
    assert event_line({"event": "operators", "path": "native", "why": ""}) is None
