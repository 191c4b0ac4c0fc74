"""A real browser, if the machine has one, that keeps what went wrong and who was asked for what."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)


class Visit:
    """A page, and all that it complained about or asked other hosts for."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._asked(request.url, address))

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, url: str, address: str) -> None:
        if not url.startswith((address, address.replace("http", "ws", 1), "data:", "blob:")):
            self.elsewhere.append(url)

    def assert_clean(self) -> None:
        assert self.complaints == []
        assert self.elsewhere == []


@contextlib.contextmanager
def visit(address: str, *, width: int = 1280, dark: bool = False) -> Iterator[Visit]:
    """Open a page; closed with the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
            )
            context.set_default_timeout(60_000)
            one = Visit(context.new_page(), address)
            one.page.goto(address)
            yield one
        finally:
            browser.close()
