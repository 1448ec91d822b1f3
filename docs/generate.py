"""Regenerates the generated files of docs/: `make docs`. Add a line to PAGES for another one."""

from collections.abc import Callable
from pathlib import Path

from bessemer.plan.validation_page import page as validation

DOCS = Path(__file__).parent
ROWS = Path("tests/plan/measured_training.csv")

PAGES: dict[str, Callable[[], str]] = {
    "validation.md": lambda: validation(ROWS),
}


def main() -> None:
    """Writes every page."""
    for name, make in PAGES.items():
        text = make()
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"docs/{name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
