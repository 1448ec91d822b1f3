"""What `bessemer plan calibrate` found out about one device: constants of the cost model in a file of their own.

    write_calibration(path, device, constants)       # beside the machine file
    local_calibration(machine, device=...)           # the package's constants with those on top, or None

The file names the device it was measured on; another device's is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bessemer.core.errors import ConfigError
from bessemer.core.machine import Machine, cpu_local_file
from bessemer.core.problem import Problem
from bessemer.core.units import toml_text
from bessemer.plan.calibration import Calibration, Constant, default_calibration

__all__ = ["LOCAL_ERA", "calibration_file", "local_calibration", "read_calibration", "write_calibration"]

LOCAL_ERA = "bessemer"
"""The software era of Bessemer's own trainer on a machine that was calibrated."""


def calibration_file(machine: Machine, machine_path: str | None = None) -> Path:
    """Where the constants of a machine lie: beside its file; those of `cpu-local` in the cache."""
    file = cpu_local_file() if machine_path is None else Path(machine_path).expanduser()
    return file.with_name(f"{file.stem}.calibration.toml")


def write_calibration(file: Path, device: str, constants: Mapping[str, Constant]) -> None:
    """Written aside, then renamed."""
    table = {"device": device, "constants": {name: asdict(value) for name, value in constants.items()}}
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(toml_text(table), encoding="utf-8")
    aside.replace(file)


def read_calibration(file: Path, device: str | None) -> Calibration:
    """The package's constants with those of `file` on top, under the era `LOCAL_ERA`. ConfigError for a file that
    can't be read or that was measured on another device than `device` (None: any)."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        own = {f"era.{LOCAL_ERA}.{name}": Constant(**value) for name, value in table["constants"].items()}
        measured_on = str(table["device"])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        what = f"{file} can't be read as a calibration: {error}"
        raise ConfigError([_problem(what, "it holds `device` and [constants.NAME] tables")], str(file)) from error
    if device is not None and measured_on != device:
        what = f"{file} was measured on another device: {measured_on}"
        raise ConfigError([_problem(what, f"this one is {device}")], str(file))
    return Calibration({**default_calibration().constants, **own})


def local_calibration(
    machine: Machine, *, device: str | None = None, machine_path: str | None = None
) -> Calibration | None:
    """What was calibrated for `machine`, or None. `device`: what a file must have been measured on."""
    if machine_path is None and machine.name != "cpu-local":
        return None
    file = calibration_file(machine, machine_path)
    return read_calibration(file, device) if file.is_file() else None


def _problem(what: str, why: str) -> Problem:
    fix = "`bessemer plan calibrate` measures this one anew"
    return Problem(code="calibration-device", where="machine.name", what=what, why=why, fix=fix)
