"""Settings of [inspect] that would be ignored, or never come to anything, are problems."""

from __future__ import annotations

from typing import Any

import pytest

from bessemer.core.job import Job
from bessemer.inspect.problems import problems


@pytest.mark.parametrize(
    ("inspect", "code", "where"),
    [
        ({"dumps": 0, "redact": True}, "ignored-setting", "inspect.redact"),
        ({"dumps": 0, "dump_mb": 64.0}, "ignored-setting", "inspect.dump_mb"),
        ({"trace_every": 500}, "trace-every", "inspect.trace_every"),
        ({"traces": 9}, "ignored-setting", "inspect.traces"),
    ],
)
def test_what_is_wrong(inspect: dict[str, Any], code: str, where: str) -> None:
    job = Job.model_validate({"inspect": inspect, "train": {"steps": 100}})
    (problem,) = problems(job, None, None)
    assert (problem.code, problem.where) == (code, where)
    assert problem.fix


@pytest.mark.parametrize(
    "inspect",
    [{}, {"dumps": 0}, {"redact": True}, {"trace_every": 100, "traces": 9}, {"trace_on": "file"}],
)
def test_what_is_right(inspect: dict[str, Any]) -> None:
    assert not problems(Job.model_validate({"inspect": inspect, "train": {"steps": 100}}), None, None)
