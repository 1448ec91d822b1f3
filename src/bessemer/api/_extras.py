"""Optional dependencies: which extra of the package brings which module, and the error that names it."""

from __future__ import annotations

import importlib.util

from bessemer.core.errors import MissingExtra

__all__ = ["EXTRAS", "extra_of", "need"]

EXTRAS: dict[str, tuple[str, ...]] = {
    "train": ("torch", "safetensors", "tokenizers", "xxhash"),
    "parquet": ("pyarrow",),
    "tensorboard": ("tensorboard",),
    "watch": ("starlette", "uvicorn"),
}
"""Extra -> the modules it installs, as in pyproject.toml."""


def extra_of(module: str) -> str | None:
    """The extra that installs a module (a submodule's name will do); None for any other module."""
    top = module.partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if top in modules), None)


def need(verb: str, *extras: str) -> None:
    """Raises MissingExtra, with the pip line, where a module of these extras isn't installed. Imports none of them."""
    for extra in extras:
        for module in EXTRAS[extra]:
            if importlib.util.find_spec(module) is None:
                raise MissingExtra(verb, extra, module)
