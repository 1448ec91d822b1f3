"""A headless Chromium for tests of pages, and a server beside it. Without a Chromium the tests are skipped."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from bessemer.inspect.watch_server import listen

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 120.0
"""For what takes a moment on a machine that is idle, and half a minute on one that has twenty times too much to do."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in NAMES if (found := shutil.which(name)) is not None), None)
    if path is None:
        pytest.skip(f"no Chromium is on the PATH ({', '.join(NAMES)})")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=1000 * PATIENCE_S
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tab(browser: Any, **context: Any) -> Iterator[Any]:
    """A page in a window of its own."""
    with browser.new_context(viewport={"width": 1280, "height": 900}, **context) as window:
        window.set_default_timeout(1000 * PATIENCE_S)
        yield window.new_page()


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of `app`, served from a thread of this process."""
    sock = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, log_level="error", lifespan="off", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def until(page: Any, expression: str, what: Any = True) -> Any:
    """The value of a JavaScript expression once it is `what`. The page's own policy forbids playwright's waiting."""
    end = time.monotonic() + PATIENCE_S
    while True:
        found = page.evaluate(expression)
        if found == what:
            return found
        assert time.monotonic() < end, f"{expression} is {found!r} after {PATIENCE_S:g} s, not {what!r}"
        page.wait_for_timeout(50)
