"""Reading and writing job files: TOML text <-> `Job`.

    job = load_job("job.toml", sets=["train.steps=50"])
    Path("runs/a/job.toml").write_text(dump_job(job))

Everything that is wrong with the file's spelling, keys, types and ranges is found in one pass. `read_job` returns what
could be read beside the problems, so that `check` can go on to the contradictions between the readable values.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bessemer.core._job_words import explain, found
from bessemer.core.errors import ConfigError
from bessemer.core.job import Job
from bessemer.core.problem import Problem, nearest
from bessemer.core.units import toml_text, toml_value

__all__ = ["Draft", "dump_job", "load_job", "read_job", "section_fields"]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A job file as far as it could be read.

    job: None when the text isn't TOML; otherwise wrong values stand at their default, misspelt keys at their likely
    place. `doubtful` names those fields (`train.steps`): what follows from them is a guess.
    """

    job: Job | None
    problems: tuple[Problem, ...] = ()
    doubtful: frozenset[str] = frozenset()


@dataclass
class _Notes:
    problems: list[Problem] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)

    def add(self, code: str, where: str, what: str, *, why: str, fix: str) -> None:
        self.problems.append(Problem(code=code, where=where, what=what, why=why, fix=fix))


def load_job(path: str | Path, sets: Sequence[str] = ()) -> Job:
    """The job of a TOML file, with overrides `table.key=value` applied in order.

    Values of overrides are written as in TOML; a bare word is a string. ConfigError carries every problem of the file
    and the overrides at once. Relative paths inside the job are meant from the current directory.
    """
    draft = read_job(path, sets)
    if draft.problems or draft.job is None:
        raise ConfigError(draft.problems, str(path))
    return draft.job


def read_job(path: str | Path, sets: Sequence[str] = ()) -> Draft:
    """As `load_job`, but returns the problems with as much of the job as could be read; raises nothing."""
    notes = _Notes()
    tree = _read_toml(Path(path), notes)
    if tree is None:
        return Draft(job=None, problems=tuple(notes.problems))
    for text in sets:
        _apply_set(tree, text, notes)
    sections = _sort_keys(tree, notes)
    job = _validate(sections, notes)
    return Draft(job=job, problems=tuple(notes.problems), doubtful=frozenset(notes.doubtful))


def dump_job(job: Job) -> str:
    """TOML text that `load_job` reads back to an equal job: every field is written, absent optional ones left out."""
    dump = job.model_dump(mode="python", exclude_none=True)
    return toml_text({name: _flat_first(table) for name, table in dump.items()}).lstrip()


def section_fields() -> dict[str, tuple[str, ...]]:
    """The tables of a job file and the keys of each, in order (`model` takes the keys of config.json beside them)."""
    return {name: tuple(info.annotation.model_fields) for name, info in _sections()}


def _sections() -> Iterator[tuple[str, Any]]:
    yield from Job.model_fields.items()


@functools.cache
def _homes() -> dict[str, tuple[str, ...]]:
    """Each key of a job file -> the tables that have it."""
    homes: dict[str, tuple[str, ...]] = {}
    for section, keys in section_fields().items():
        for key in keys:
            homes[key] = (*homes.get(key, ()), section)
    return homes


def _flat_first(table: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of tables (`mixture`) are written inline, so only plain nested tables need to come last in TOML."""
    return dict(sorted(table.items(), key=lambda item: isinstance(item[1], Mapping)))


def _read_toml(path: Path, notes: _Notes) -> dict[str, Any] | None:
    where = str(path)
    fix = "bessemer check PATH, with the path of a TOML job file"
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        notes.add(
            "toml-syntax",
            where,
            f"byte {error.start} is not UTF-8",
            why="a job file is TOML, which is UTF-8 text",
            fix="save the file as UTF-8",
        )
        return None
    except OSError as error:
        notes.add("job-missing", where, f"can't read the job file: {error.strerror}", why="", fix=fix)
        return None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        _note_syntax(text, where, error, notes)
        return None


def _note_syntax(text: str, where: str, error: Exception, notes: _Notes) -> None:
    """tomllib tells the place only inside its message: "... (at line 3, column 7)" or "(at end of document)"."""
    message = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    at = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    lines = text.splitlines() or [""]
    line, column = (int(at[1]), int(at[2])) if at else (len(lines), len(lines[-1]) + 1)
    message = message[: at.start()] if at else message.removesuffix(" (at end of document)")
    shown = lines[min(line, len(lines)) - 1].strip()
    notes.add(
        "toml-syntax",
        f"{where}:{line}:{column}",
        f"not TOML: {message[:1].lower()}{message[1:]}",
        why=f"the line reads: {shown[:80]}" if shown else "the text ends there",
        fix=_syntax_fix(shown, message),
    )


def _syntax_fix(line: str, message: str) -> str:
    key, equals, value = (part.strip() for part in line.partition("="))
    if "overwrite" in message.lower() or "declare" in message.lower():
        return "keep one of the two lines, each key and table stands once"
    if equals and re.fullmatch(r"[\w-]+", key) and re.fullmatch(r"[A-Za-z_][\w./-]*", value):
        word = value.lower() if value in ("True", "False") else f'"{value}"'
        return f"texts stand in double quotes: {key} = {word}" if word[0] == '"' else f"{key} = {word}"
    return 'a line is: key = 5, key = "text", key = true, key = [1, 2], or a [table] heading'


def _apply_set(tree: dict[str, Any], text: str, notes: _Notes) -> None:
    dotted, equals, value_text = text.partition("=")
    path = [part.strip() for part in dotted.split(".")]
    if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]+", part) for part in path):
        notes.add(
            "set-syntax",
            f"--set {text}",
            "is not of the form table.key=value",
            why="an override names one field of the job",
            fix="--set train.steps=50",
        )
        return
    try:
        value = _set_value(value_text.strip())
    except ValueError as error:
        notes.add(
            "set-syntax",
            f"--set {text}",
            f"the value is not TOML: {error}",
            why='values are written as in the job file: 5, 3e-4, true, [1, 2], "text"; a bare word is a string',
            fix="put the whole override in single quotes so that the shell leaves it alone: --set 'data.paths=[\"a\"]'",
        )
        return
    table = tree
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            notes.add(
                "set-syntax",
                f"--set {text}",
                f"{part} is {found(inner)}, not a table",
                why="only tables have fields of their own",
                fix=f"--set {part}=... with the whole value" if len(path) > 2 else f"write [{part}] as a table",
            )
            return
        table = inner
    table[path[-1]] = value


def _set_value(text: str) -> Any:
    """The TOML value that `text` spells; other text that can't be a TOML value cut short is a plain string."""
    try:
        parsed = tomllib.loads(f"value = {text}\n")
        if set(parsed) == {"value"}:
            return parsed["value"]
    except ValueError as error:
        if text[:1] in "[{\"'":
            raise ValueError(str(error)) from error
    if not text.isprintable():
        raise ValueError("control or undecodable characters")
    return text


def _sort_keys(tree: Mapping[str, Any], notes: _Notes) -> dict[str, dict[str, Any]]:
    """The known tables with their known keys; everything else becomes a problem, and a guess where it belongs."""
    fields = section_fields()
    sections: dict[str, dict[str, Any]] = {name: {} for name in fields}
    guesses: list[tuple[str, str, Any]] = []
    for name, content in tree.items():
        if name in fields and isinstance(content, dict):
            sections[name] = {k: v for k, v in content.items() if not _stray_key(name, k, v, guesses, notes)}
        elif name in fields:
            _note_not_table(name, content, notes)
        elif isinstance(content, dict):
            _stray_table(name, content, guesses, notes)
        else:
            _stray_key("", name, content, guesses, notes)
    for section, key, value in guesses:
        if key not in sections[section]:
            sections[section][key] = value
            notes.doubtful.add(f"{section}.{key}")
    return sections


def _note_not_table(name: str, content: Any, notes: _Notes) -> None:
    twice = isinstance(content, list) and bool(content) and isinstance(content[0], dict)
    notes.add(
        "wrong-type",
        name,
        f"{name} is {'written as [[' + name + ']]' if twice else found(content)}, it must be a table",
        why="a job file is made of tables of keys",
        fix=f"a line [{name}], and its keys below it",
    )
    notes.doubtful.update(f"{name}.{key}" for key in section_fields()[name])


def _stray_table(name: str, content: Mapping[str, Any], guesses: list[tuple[str, str, Any]], notes: _Notes) -> None:
    fields = section_fields()
    near = nearest(name, fields)
    notes.add(
        "unknown-table",
        name,
        f"there is no table [{name}]",
        why="tables: " + ", ".join(fields),
        fix=f"[{near[0]}]" if near else "delete it, or move its keys to one of those tables",
    )
    if near:
        guesses += [(near[0], key, value) for key, value in content.items() if key in fields[near[0]]]


def _stray_key(section: str, key: str, value: Any, guesses: list[tuple[str, str, Any]], notes: _Notes) -> bool:
    """Whether `key` doesn't belong in [section] ("" is the top of the file); then it is noted."""
    fields = section_fields()
    own = fields.get(section, ())
    homes = _homes().get(key, ())
    if key in own or (section == "model" and not homes):
        return False  # further keys of [model] are those of config.json, and are judged with the model
    where = f"{section}.{key}" if section else key
    if homes:
        place = f"in [{section}]" if section else "above the first table"
        notes.add(
            "misplaced-key",
            where,
            f"{key} does not belong {place}",
            why="it is a key of " + " and ".join(f"[{home}]" for home in homes),
            fix=" or ".join(f"move it to [{home}]: {home}.{key} = {toml_short(value)}" for home in homes),
        )
        if len(homes) == 1:
            guesses.append((homes[0], key, value))
        return True
    near = nearest(key, own)
    elsewhere = nearest(key, _homes(), count=1)
    if near:
        fix = f"{section}.{near[0]}" + (f" (or {', '.join(near[1:])})" if near[1:] else "")
        guesses.append((section, near[0], value))
    elif elsewhere:
        fix = " or ".join(f"{home}.{elsewhere[0]}" for home in _homes()[elsewhere[0]])
    else:
        fix = "delete it" + (f"; keys of [{section}]: {', '.join(own)}" if own else "")
    notes.add(
        "unknown-key",
        where,
        f"there is no key {key!r}" + (f" in [{section}]" if section else ""),
        why="a key that nothing reads is most often a slip of the pen",
        fix=fix,
    )
    return True


def toml_short(value: Any) -> str:
    """A value as TOML for a fix, or "..." where it is long or has no short form."""
    try:
        text = toml_value(value)
    except TypeError:
        return str(value)
    return text if len(text) <= 40 else "..."


def _validate(sections: dict[str, dict[str, Any]], notes: _Notes) -> Job:
    """Each table on its own, again without the keys that were wrong; the rest of the job stands at its defaults."""
    built: dict[str, Any] = {}
    for name, info in _sections():
        kind: Any = info.annotation
        raw = dict(sections[name])
        for key in [key for key, value in raw.items() if _not_finite(value)]:
            notes.add(
                "out-of-range",
                f"{name}.{key}",
                f"{key} = {toml_short(raw.pop(key))} is not a finite number",
                why="infinity and NaN can't be computed with",
                fix=f"a finite number for {name}.{key}",
            )
            notes.doubtful.add(f"{name}.{key}")
        known = {key: _tuples(value) if key in kind.model_fields else value for key, value in raw.items()}
        try:
            built[name] = kind.model_validate(known, strict=True)
        except ValidationError as error:
            errors = error.errors(include_url=False)
            notes.problems += [explain(name, kind, dict(e)) for e in errors]
            bad = {str(e["loc"][0]) for e in errors}
            notes.doubtful |= {f"{name}.{key}" for key in bad}
            built[name] = kind.model_validate({k: v for k, v in known.items() if k not in bad}, strict=True)
    return Job(**built)


def _tuples(value: Any) -> Any:
    """Lists as tuples, all the way down, as the frozen sections hold them."""
    if isinstance(value, dict):
        return {key: _tuples(v) for key, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _not_finite(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(_not_finite(v) for v in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and not math.isfinite(value)
