"""The verb `plan calibrate`."""

from __future__ import annotations

__all__ = ["calibrate"]


def calibrate() -> None:
    """Placeholder."""
