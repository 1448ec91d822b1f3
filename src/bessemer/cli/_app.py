"""The command tree: verbs are read from `bessemer.api.VERBS` and built when they are asked for."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bessemer import __version__, api
from bessemer.api._extras import extra_of
from bessemer.cli._signature import command_parameters, result_type, summary
from bessemer.core.errors import BessemerError, MissingExtra
from bessemer.core.problem import nearest

__all__ = ["application"]

_HEADLINE = "An AI foundry: checks, trains, keeps alive, inspects and delivers language models."
_CODES = (
    "Exit codes: 0 done, 1 the run failed, 2 the request was wrong (nothing was started), 3 stopped on request, "
    "4 take-off found a bad host."
)


class _Verbs(TyperGroup):
    """A group whose commands are the verbs of the api; one is imported only when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*api.VERBS, *api.GROUPS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in api.GROUPS:
            return _group(cmd_name)
        if cmd_name in api.VERBS:
            return _command(cmd_name, getattr(api, cmd_name))
        return _unknown(ctx, cmd_name, self.list_commands(ctx))


class _GroupVerbs(TyperGroup):
    """The verbs of one group of the api (`bessemer plan search`), by its own name."""

    @property
    def module(self) -> Any:
        return getattr(api, str(self.name))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.module.VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.module.VERBS:
            return _command(f"{self.name} {cmd_name}", getattr(self.module, cmd_name))
        return _unknown(ctx, cmd_name, self.list_commands(ctx))


def _unknown(context: Any, name: str, known: list[str]) -> Any:
    near = nearest(name, known, count=1)
    hint = f"Did you mean '{near[0]}'?" if near else "Verbs: " + ", ".join(known)
    return context.fail(f"There is no verb '{name}'. {hint}")


def application() -> Any:
    """The root command, callable with `args=[...]`; it always ends in SystemExit."""
    # Rich boxes break lines in the middle of paths and commands that people copy: plain text it is.
    app = typer.Typer(cls=_Verbs, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.callback(invoke_without_command=True, help=f"{_HEADLINE}\n\n{_CODES}")
    def root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    ) -> None:
        if version:
            typer.echo(f"bessemer {__version__}")
        elif context.invoked_subcommand is None:
            typer.echo(context.get_help())

    return typer.main.get_command(app)


def _group(name: str) -> Any:
    """The command of a group; alone it lists its verbs."""
    text = inspect.getdoc(getattr(api, name)) or ""
    app = typer.Typer(cls=_GroupVerbs, name=name, add_completion=False, pretty_exceptions_enable=False,
                      rich_markup_mode=None, no_args_is_help=False)  # fmt: skip

    @app.callback(invoke_without_command=True, help=text, short_help=text.splitlines()[0])
    def root(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    group = typer.main.get_command(app)
    group.name = name
    return group


def _command(verb: str, function: Callable[..., Any]) -> Any:
    """The command of one verb: parameters of its api function, `--json` where the result has that form."""
    result = result_type(function)
    with_json, json_needs = hasattr(result, "as_json"), getattr(result, "json_needs", None)

    def run(**values: Any) -> None:
        show_trace = values.pop("show_traceback")
        as_json = values.pop("print_json", False)
        if as_json and json_needs is not None and not values[json_needs]:
            raise typer.BadParameter(f"--json goes with --{json_needs.replace('_', '-')}")
        sys.exit(_guarded(verb, functools.partial(_call, function, values, as_json), show_trace))

    flags = [_flag("show_traceback", "--traceback", "Print the Python traceback of an error.")]
    if with_json:
        only = "" if json_needs is None else f"With --{json_needs.replace('_', '-')}: "
        flags.insert(0, _flag("print_json", "--json", f"{only}Print the result as JSON."))
    parameters = command_parameters(function) + flags
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    text = summary(function)
    app.command(name=verb.rpartition(" ")[2], help=text, short_help=text.splitlines()[0])(run)
    return typer.main.get_command(app)


def _flag(name: str, flag: str, text: str) -> inspect.Parameter:
    kind = Annotated[bool, typer.Option(flag, help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)


def _call(function: Callable[..., Any], values: dict[str, Any], as_json: bool) -> int:
    """Calls, prints and returns the exit code. A result may offer `as_json()`, `exit_code` and a rich or plain form."""
    result = function(**values)
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2, ensure_ascii=False))
    elif hasattr(result, "__rich__"):
        from rich.console import Console

        Console(highlight=False, soft_wrap=True).print(result)
    elif result is not None and (text := str(result)):
        typer.echo(text)
    return getattr(result, "exit_code", 0)


def _guarded(verb: str, call: Callable[[], int], show_trace: bool) -> int:
    """Runs `call`; an error becomes text on standard error and the exit code of its class."""
    try:
        code = call()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) went away; nothing more can be said, and Python's own flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        typer.echo(f"bessemer {verb}: interrupted", err=True)
        return 1
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            return _unexpected(verb, error)
        return _told(verb, MissingExtra(verb, extra, error.name or ""), show_trace)
    except BessemerError as error:
        return _told(verb, error, show_trace)
    except Exception as error:
        return _unexpected(verb, error)


def _told(verb: str, error: BessemerError, show_trace: bool) -> int:
    if show_trace:
        traceback.print_exc()
    label = "" if error.code == "config" else f"bessemer {verb}: {error.code}: "
    typer.echo(f"{label}{error}", err=True)
    return error.exit_code


def _unexpected(verb: str, error: Exception) -> int:
    """Any other exception is a bug of ours: the traceback, and what to do with it."""
    traceback.print_exception(error)
    typer.echo(
        f"bessemer {verb}: internal error: {type(error).__name__}: {error}\n"
        f"  This is a bug in bessemer {__version__}. Please report the lines above with the job file and the command.",
        err=True,
    )
    return 1
