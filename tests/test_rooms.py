"""The house rules of the package, read from its source: who imports whom, what stays free of torch, sizes, pickles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "bessemer"
ROOMS = (
    "core", "plan", "runtime", "comm", "ops", "precision", "models", "parallel", "data", "keep", "infer", "train",
    "inspect", "lab", "serve", "api", "cli",
)  # fmt: skip
"""A room may import only those before it, and itself."""
EXTRAS = ("torch", "safetensors", "tokenizers", "xxhash", "pyarrow", "tensorboard", "transformers", "starlette",
          "uvicorn")  # fmt: skip
"""What the base install lacks."""
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
OBJECT_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip

FILES = sorted(SOURCE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}


def _name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, those inside functions and by importlib included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, a.value) for a in node.args if isinstance(a, ast.Constant))


def _violations(tree: ast.Module, room: str) -> list[str]:
    """Imports of rooms that come after `room`."""
    found = []
    for line, name in _imports(tree):
        parts = name.split(".")
        if parts[0] != "bessemer" or len(parts) < 2 or parts[1] == "__version__":
            continue
        if parts[1] not in ROOMS or ROOMS.index(parts[1]) > ROOMS.index(room):
            found.append(f"line {line}: {room} imports {name}")
    return found


def test_every_folder_is_a_room() -> None:
    folders = {file.relative_to(SOURCE).parts[0] for file in FILES if file.parent != SOURCE}
    assert folders <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_rooms_before_them(room: str) -> None:
    found = [
        f"{_name(file)}, {violation}"
        for file, tree in TREES.items()
        if file.relative_to(SOURCE).parts[0] == room
        for violation in _violations(tree, room)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from bessemer.train.loop import run",
        "def f():\n    import bessemer.train.loop",
        "from bessemer import train",
        "import importlib\nimportlib.import_module('bessemer.train.loop')",
        "from bessemer.nowhere import x",
    ],
)
def test_the_order_check_sees_each_kind_of_import(source: str) -> None:
    assert _violations(ast.parse(source), "core")
    assert not _violations(ast.parse("from bessemer.core.job import Job\nfrom bessemer import __version__"), "data")


def test_core_plan_problems_and_check_work_in_a_base_install() -> None:
    """Each module in a process in which every package of the extras is missing."""
    modules = [
        _name(file)
        for file in FILES
        if file.relative_to(SOURCE).parts[0] in ("core", "plan", "cli", "api") or file.name == "problems.py"
    ]
    assert "bessemer.core.job" in modules and "bessemer.train.problems" in modules
    script = (
        "import importlib, sys, traceback\n"
        f"for name in {EXTRAS!r}: sys.modules[name] = None\n"
        f"for name in {[m for m in modules if not m.endswith('__main__')]!r}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError: print(name); traceback.print_exc(limit=-2, file=sys.stdout)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def _unpickling(tree: ast.Module) -> list[str]:
    found = []
    for line, name in _imports(tree):
        if name.split(".")[0] in UNPICKLERS or name.split(".")[-1] in OBJECT_COLLECTIVES or name == "torch.load":
            found.append(f"line {line}: {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            node.attr in OBJECT_COLLECTIVES or ast.unparse(node) in ("torch.load", "torch.serialization.load")
        ):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and getattr(node.value, "value", 0) is not False
        ):
            found.append(f"line {node.value.lineno}: allow_pickle")
    return found


def test_nothing_is_unpickled() -> None:
    found = [f"{_name(file)}, {text}" for file, tree in TREES.items() for text in _unpickling(tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_the_pickle_check_sees_each_form(source: str) -> None:
    assert _unpickling(ast.parse(source))
    assert not _unpickling(ast.parse("import numpy as np\nnp.load('x', allow_pickle=False)"))


def _bound_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return names


def _public(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def test_public_names_exist() -> None:
    for file, tree in TREES.items():
        public = _public(tree) or []
        assert set(public) <= _bound_names(tree), f"{_name(file)}: {set(public) - _bound_names(tree)}"
        assert len(public) == len(set(public)), _name(file)


def test_modules_with_public_names_list_them() -> None:
    missing = []
    for file, tree in TREES.items():
        offered = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_"]
        if offered and _public(tree) is None:
            missing.append(f"{_name(file)}: {', '.join(offered)}")
    assert not missing, "\n".join(missing)


def test_every_module_says_what_it_is() -> None:
    assert not [_name(file) for file, tree in TREES.items() if tree.body and not ast.get_docstring(tree)]


def test_sizes() -> None:
    found = []
    for file, tree in TREES.items():
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{_name(file)}: {lines} lines")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{_name(file)}, {node.name}: {length} lines")
    assert not found, "\n".join(found)
