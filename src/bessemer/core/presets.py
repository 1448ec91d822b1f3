"""Models by name. Each is a file of config.json keys with its source, read on the same path as a model of one's own."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any

from bessemer.core.errors import ConfigError
from bessemer.core.hf_families import spec_from_config
from bessemer.core.model import ModelSpec
from bessemer.core.problem import Problem, nearest

__all__ = ["PRESETS", "preset", "preset_config", "preset_source", "without_none"]

_FOLDER = resources.files("bessemer.core") / "presets"
PRESETS = tuple(sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml")))


def preset(name: str) -> ModelSpec:
    """The model of that name. ConfigError with the nearest names for an unknown one."""
    return spec_from_config(preset_config(name), source=f"the preset {name}")


def preset_config(name: str) -> dict[str, Any]:
    """The config.json keys of a preset."""
    if name not in PRESETS:
        near = nearest(name.lower().replace("_", "-"), PRESETS) or list(PRESETS)
        problem = Problem(
            code="model-preset",
            where="model.preset",
            what=f"{name!r} is not a model that is known by name",
            why="known models: " + ", ".join(PRESETS),
            fix="model.preset = " + " or ".join(f'"{n}"' for n in near),
        )
        raise ConfigError([problem], "the job")
    return without_none(_file(name)["config"])


def preset_source(name: str) -> str:
    """Where the figures of a preset were published."""
    return str(_file(name)["source"])


def without_none(config: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: the word "none" stands for it."""
    return {key: None if value == "none" else value for key, value in config.items()}


@functools.cache
def _file(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
