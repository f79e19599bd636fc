"""A headless Chromium, and pages that fail a test for anything said on their console."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")  # not longer: its driver keeps an event loop running in this thread
def chromium() -> Iterator[Any]:
    """The browser; tests skip where playwright or a browser is missing."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    path = os.environ.get("JAXSERVE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium found: apt install chromium, or set JAXSERVE_BROWSER=/path/to/it")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """``open_page(port, width=1280, expect=())``: the playground of a server; every console error but those is one."""
    said: list[str] = []
    contexts = []

    def open_page(
        port: int, width: int = 1280, expect: tuple[str, ...] = (), ready: bool = True, **options: Any
    ) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)

        def note(text: str) -> None:
            if not any(each in text for each in (*expect, "net::ERR_")):  # that is the server, which ends first
                said.append(text)

        page.on("console", lambda message: note(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: note(str(error)))
        page.goto(f"http://127.0.0.1:{port}/")
        if ready:
            page.wait_for_selector("#status[data-state=ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
