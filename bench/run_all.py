"""`make bench`: runs every script of this folder and prints one joint table.

    python bench/run_all.py [--json]

A bar that doesn't hold is printed as "no" and is not a failure; a script that crashes is (exit code 1). Scripts of more
than some minutes are asked for their quick form.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from table import Row, show

HERE = Path(__file__).resolve().parent
HELPERS = {"run_all.py", "table.py"}
QUICK = {"hangs.py", "keep.py", "landing.py"}


def main() -> int:
    """Exit code 0, or 1 when a script crashed (its error output is on standard error)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    arguments = parser.parse_args()
    rows: list[Row] = []
    crashed: list[str] = []
    for script in sorted(HERE.glob("*.py")):
        if script.name in HELPERS or script.name.startswith("_"):
            continue
        print(f"bench/{script.name} ...", file=sys.stderr, flush=True)
        found = run(script)
        if found is None:
            crashed.append(script.name)
        else:
            rows += found
    show(rows, json=arguments.json)
    for name in crashed:
        print(f"bench/{name} crashed", file=sys.stderr)
    return 1 if crashed else 0


def run(script: Path) -> list[Row] | None:
    """The rows of one script (each name led by the script's), or None when it fails or prints no such list."""
    command = [sys.executable, str(script), "--json", *(["--quick"] if script.name in QUICK else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(f"bench/{script.name}: exit code {done.returncode}", file=sys.stderr)
        return None
    try:
        listed = json.loads(done.stdout)
        return [
            Row(f"{script.stem}: {r['name']}", r["value"], r["unit"], r["better"], r["bar"], r.get("note", ""))
            for r in listed
        ]
    except (ValueError, KeyError, TypeError) as error:
        print(f"bench/{script.name}: --json did not print a list of rows: {error!r}", file=sys.stderr)
        return None


if __name__ == "__main__":
    sys.exit(main())
