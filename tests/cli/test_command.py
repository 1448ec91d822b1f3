"""The command line's own mechanism, on verbs made up here: flags from signatures, exit codes, messages."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from bessemer import __version__, api
from bessemer.api._extras import EXTRAS, need
from bessemer.cli import main
from bessemer.cli._signature import command_parameters, parameter_docs, summary
from bessemer.core.errors import CheckpointError, MissingExtra, RunFolderError, Stopped


@dataclass(frozen=True)
class Table:
    rows: tuple[str, ...]
    exit_code: int = 0

    def __str__(self) -> str:
        return " | ".join(self.rows)

    def as_json(self) -> dict[str, Any]:
        return {"rows": list(self.rows)}


def melt(job_path: str, sets: Sequence[str] = (), *, heat_k: float = 1800.0, max_parts: int | None = None) -> Table:
    """Melt a job.

    A second paragraph.

    job_path: the job file,
      which goes on here.
    sets: overrides.
    heat_k: temperature in kelvin.
    max_parts: parts at most.
    """
    return Table((job_path, *sets, f"{heat_k:g}", str(max_parts)))


def quiet(job_path: str, *, loud: bool = False, still: bool = True) -> None:
    """Print nothing.

    job_path: the job file.
    """
    if loud:
        print(f"loud {job_path} {still}")


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`bessemer.api` with the verbs of this file instead of its own."""
    module = types.ModuleType("made_up_verbs")
    module.melt, module.quiet = melt, quiet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_verbs", module)
    monkeypatch.setattr(api, "VERBS", {"melt": "made_up_verbs", "quiet": "made_up_verbs"})
    return module


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    code = caught.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


def _raising(verbs: types.ModuleType, error: BaseException) -> None:
    def melt(job_path: str) -> Table:
        """Melt a job.

        job_path: the job file.
        """
        raise error

    verbs.melt = melt  # type: ignore[attr-defined]


def test_docs_come_from_the_docstring() -> None:
    assert parameter_docs(melt)["job_path"] == "the job file, which goes on here."
    assert summary(melt) == "Melt a job.\n\nA second paragraph."
    assert [p.name for p in command_parameters(melt)] == ["job_path", "sets", "heat_k", "max_parts"]


def test_flags_come_from_the_signature(verbs: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("melt", "a.toml", "--set", "x.y=1", "--set", "x.z=2", "--heat-k", "20", "--max-parts", "3") == 0
    assert capsys.readouterr().out == "a.toml | x.y=1 | x.z=2 | 20 | 3\n"
    assert _run("melt", "--help") == 0
    text = capsys.readouterr().out
    for part in ("JOB", "--set", "--heat-k", "temperature in kelvin", "1800", "--json", "--traceback", "Melt a job"):
        assert part in text


def test_booleans_and_results_without_a_table(verbs: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("quiet", "a", "--loud", "--no-still") == 0
    assert capsys.readouterr().out == "loud a False\n"
    assert _run("quiet", "a", "--json") == 2  # nothing to print as JSON
    assert "--json" in capsys.readouterr().err


def test_json(verbs: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("melt", "a.toml", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"rows": ["a.toml", "1800", "None"]}


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RunFolderError("the run folder is in use", fix="another run.name"), 2, "run-folder: the run folder is in use"),
        (CheckpointError("bad shard", rank=3, step=7), 1, "checkpoint: bad shard (rank 3, step 7)"),
        (Stopped("stopped at step 5", fix="the same command goes on"), 3, "-> the same command goes on"),
        (MissingExtra("melt", "train", "torch"), 2, "-> pip install 'bessemer[train]'"),
        (ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.parquet"), 2, "bessemer[parquet]"),
        (KeyboardInterrupt(), 1, "interrupted"),
    ],
)
def test_errors_are_text_and_an_exit_code(
    verbs: types.ModuleType, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str
) -> None:
    _raising(verbs, error)
    assert _run("melt", "a.toml") == code
    shown = capsys.readouterr()
    assert text in shown.err and "Traceback" not in shown.err and not shown.out
    if isinstance(error, CheckpointError):
        assert _run("melt", "a.toml", "--traceback") == code
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), ModuleNotFoundError("no x", name="x")])
def test_a_bug_shows_the_traceback_and_asks_for_a_report(
    verbs: types.ModuleType, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    _raising(verbs, error)
    assert _run("melt", "a.toml") == 1
    text = capsys.readouterr().err
    assert "Traceback" in text and "internal error" in text and "report" in text and __version__ in text


@pytest.mark.parametrize("arguments", [("melt",), ("metl", "a"), ("melt", "a", "--heat", "1"), ("melt", "a", "b")])
def test_wrong_usage_is_exit_code_2(
    verbs: types.ModuleType, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert _run(*arguments) == 2
    assert "Error" in capsys.readouterr().err


def test_alone_it_lists_the_verbs(verbs: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run() == 0
    text = capsys.readouterr().out
    assert "melt" in text and "Melt a job." in text and "Exit codes" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--version") == 0
    assert capsys.readouterr().out == f"bessemer {__version__}\n"


def test_every_verb_documents_its_parameters() -> None:
    for verb in api.VERBS:
        function = getattr(api, verb)
        assert summary(function), verb
        for parameter in command_parameters(function):
            assert parameter_docs(function).get(parameter.name), f"{verb}: {parameter.name}"


def test_extras_are_those_of_pyproject(pytestconfig: pytest.Config) -> None:
    import tomllib

    project = tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, modules in EXTRAS.items():
        listed = " ".join(project["optional-dependencies"][extra])
        assert all(module in listed for module in modules)


def test_need_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'bessemer\[train\]'"):
        need("train", "train")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Any) -> None:
    command = f"{sys.executable} -m bessemer.cli --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
