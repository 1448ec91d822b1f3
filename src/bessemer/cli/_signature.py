"""From a function of `bessemer.api` to the signature and texts of its command.

Parameters before `*` become arguments, keyword-only ones options; `sets` becomes the repeatable `--set`. The help of
a parameter is its line in the docstring, `name: text`, with further lines of it indented.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

__all__ = ["command_parameters", "parameter_docs", "result_type", "summary"]


def parameter_docs(function: Callable[..., Any]) -> dict[str, str]:
    """Parameter name -> its text in the docstring, joined to one line."""
    names = set(inspect.signature(function).parameters)
    docs: dict[str, str] = {}
    current = None
    for line in inspect.getdoc(function).splitlines() if function.__doc__ else []:
        start = re.match(r"(\w+): (.+)", line)
        if start and start[1] in names:
            current = start[1]
            docs[current] = start[2].strip()
        elif current and line.startswith(" ") and line.strip():
            docs[current] += " " + line.strip()
        else:
            current = None
    return docs


def summary(function: Callable[..., Any]) -> str:
    """The docstring without its parameter lines: the help of the command."""
    docs = parameter_docs(function)
    lines, inside = [], False
    for line in (inspect.getdoc(function) or "").splitlines():
        start = re.match(r"(\w+): ", line)
        inside = bool(start and start[1] in docs) or (inside and line.startswith(" ") and bool(line.strip()))
        if not inside:
            lines.append(line)
    return "\n".join(lines).strip()


def result_type(function: Callable[..., Any]) -> Any:
    """The class that the function returns."""
    return typing.get_type_hints(function).get("return")


def command_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The function's parameters as typer wants them: keyword-only, each annotated as argument or option."""
    hints = typing.get_type_hints(function, include_extras=True)
    docs = parameter_docs(function)
    return [
        _parameter(parameter, hints[name], docs.get(name, ""))
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def _parameter(parameter: inspect.Parameter, hint: Any, text: str) -> inspect.Parameter:
    name, default = parameter.name, parameter.default
    many = typing.get_origin(hint) in (list, tuple, Sequence)
    if many:
        hint = list[typing.get_args(hint)[0]]  # type: ignore[misc]
        default = list(default) if default is not inspect.Parameter.empty else default
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY or name == "sets":
        flag = "--set" if name == "sets" else "--" + name.replace("_", "-")
        if hint is bool:
            flag += f"/--no-{flag[2:]}" if default else ""
        metavar = "TABLE.KEY=VALUE" if name == "sets" else None
        info: Any = typer.Option(flag, help=text, metavar=metavar, show_default=not many and default not in (None, ""))
    else:
        info = typer.Argument(help=text, metavar=name.removesuffix("_path").upper(), show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info])
