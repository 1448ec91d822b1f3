"""Units for people, and TOML writing checked against Python's own reader."""

import tomllib

import pytest

from bessemer.core.units import (
    counted,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    toml_text,
    toml_value,
)


def test_formats():
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1.5 * 2**30) == "1.50 GiB"
    assert format_count(8_030_261_248) == "8.03 B"
    assert format_count(12) == "12"
    assert format_rate(1.2e12, "FLOP") == "1.20 TFLOP/s"
    assert [format_seconds(s) for s in (2e-5, 0.34, 12.5, 185, 7380)] == [
        "20.0 us",
        "340 ms",
        "12.5 s",
        "3 min 05 s",
        "2 h 03 min",
    ]


def test_a_noun_follows_its_number():
    assert [counted(n, "rank") for n in (0, 1, 2, 4096)] == ["0 ranks", "1 rank", "2 ranks", "4,096 ranks"]


def test_toml_reads_back():
    table = {
        "a": 1,
        "b": 2.5e-8,
        "c": 'quote " and \\ and \n and \x7f é',
        "d": [1, [2, 3]],
        "e": {"odd key": True, "f": {"g": (1.0, "x")}},
        "h": [{"x": 1}, {"y": 1e22}],
    }
    read = tomllib.loads(toml_text(table))
    assert read == {**table, "e": {"odd key": True, "f": {"g": [1.0, "x"]}}}


def test_toml_refuses_what_it_cannot_say():
    with pytest.raises(TypeError, match="NoneType"):
        toml_value(None)
