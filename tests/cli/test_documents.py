"""The reference pages are whole: each error code of the source and each field of a job is explained."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from bessemer.core.job_file import section_fields

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
MAKERS = {"Problem", "_problem", "problem", "report", "_note", "add", "_report"}
"""Functions whose first argument is a code, where that is a literal."""


def codes(tree: ast.Module) -> set[str]:
    """Every `code="..."`, `code = "..."` in a class, and literal first argument of a maker of problems."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "code":
            found |= _literals(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in MAKERS and len(node.args) > 2:
            found |= _literals(node.args[0])
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code":
                    found |= _literals(line.value)
    return found


def _literals(node: ast.expr) -> set[str]:
    """The words that an expression may stand for; what is looked up or computed has no literal."""
    if isinstance(node, ast.IfExp):
        return _literals(node.body) | _literals(node.orelse)
    text = node.value if isinstance(node, ast.Constant) else None
    return {text} if isinstance(text, str) and CODE.fullmatch(text) else set()


def test_codes_are_found_in_each_form() -> None:
    source = 'class E(Exception):\n    code = "a-b"\nraise E("x", code="c-d")\n_problem("e-f", "where", "what")\n'
    assert codes(ast.parse(source)) == {"a-b", "c-d", "e-f"}


def test_every_error_code_is_documented() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z0-9-]+)` \|", text, flags=re.MULTILINE))
    used = {
        code: file.name
        for file in sorted((ROOT / "src").rglob("*.py"))
        for code in codes(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert set(used) - documented == set(), {code: used[code] for code in set(used) - documented}
    assert all(len(row.split("|")) == 6 for row in text.splitlines() if row.startswith("| `")), "a row has four cells"


def test_every_field_of_a_job_is_documented() -> None:
    text = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
    for section, keys in section_fields().items():
        page = text.partition(f"## [{section}]\n")[2].partition("\n## ")[0]
        documented = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
        assert documented == list(keys), f"[{section}] of docs/job.md lists {documented}, the job file has {list(keys)}"


def test_the_defaults_of_the_job_page_are_true() -> None:
    from bessemer.core.job import Job
    from bessemer.core.units import toml_value

    text = (ROOT / "docs" / "job.md").read_text(encoding="utf-8")
    for section, keys in section_fields().items():
        page = text.partition(f"## [{section}]\n")[2].partition("\n## ")[0]
        for key in keys:
            default = getattr(getattr(Job(), section), key)
            shown = "-" if default is None else f"`{toml_value(default)}`"
            assert f"| `{key}` | {shown} |" in page, f"{section}.{key}: the default is {shown}"
