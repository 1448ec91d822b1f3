"""A leading ~ in every path of a job."""

import json
from pathlib import Path

import pytest

from bessemer.core.job import ModelSection, RunSection
from bessemer.core.machine import load_machine
from bessemer.core.paths import user_path
from bessemer.core.presets import preset_config
from bessemer.core.resolve import resolve_model
from bessemer.core.units import toml_text


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_only_a_home_folder_is_put_in(home):
    assert user_path("~/a") == home / "a" and user_path("~") == home
    assert user_path("~no-such-user/a") == Path("~no-such-user/a") and user_path("a/~") == Path("a/~")


def test_models_machines_and_run_folders(home):
    (home / "hf").mkdir()
    (home / "hf" / "config.json").write_text(json.dumps(preset_config("llama-3-8b")))
    assert resolve_model(ModelSection(hf="~/hf")) == resolve_model(ModelSection(weights="~/hf"))
    machine = load_machine("h100").model_dump(mode="json", exclude_none=True)
    (home / "mine.toml").write_text(toml_text(machine))
    assert load_machine("~/mine.toml").name == "h100"
    assert RunSection(dir="~/runs", name="a").folder == home / "runs" / "a"
