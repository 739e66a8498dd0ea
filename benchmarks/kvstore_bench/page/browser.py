"""A real Chromium, and what it complains about."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from kvstore.model.errors import Unavailable

CHROMIUM = "chromium"
INSTALL = "needs Chromium, as Debian has it: apt-get install chromium"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--force-color-profile=srgb",
)
POLL_MS = 30
FIRST_FIGURES = "#tiers .tier dd"
NETWORK_WORDS = ("net::ERR", "status of 401", "Failed to load resource")


@dataclass
class Tab:
    """One tab. errors: of its console and scripts. foreign: what it asked other addresses for.
    dialogs: that a script opened."""

    page: Any
    origin: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("request", self._request)
        self.page.on("dialog", self._dialog)

    def forget_outage(self) -> None:
        """Forget what Chromium itself writes of a daemon that is away: no script can keep it from
        that."""
        self.errors = [each for each in self.errors if not any(w in each for w in NETWORK_WORDS)]

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _request(self, request: Any) -> None:
        url = urlsplit(request.url)
        if f"{url.scheme}://{url.netloc}" != self.origin and url.scheme != "data":
            self.foreign.append(request.url[:200])

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()


class Browser:
    """A running Chromium."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.tabs: list[Tab] = []

    @property
    def version(self) -> str:
        return str(self._browser.version)

    def open(
        self, address: str, *, dark: bool = False, wide: int = 1440, high: int = 900, **more: Any
    ) -> Tab:
        """Return a tab of a fresh profile at an address of the daemon."""
        context = self._browser.new_context(
            color_scheme="dark" if dark else "light",
            viewport={"width": wide, "height": high},
            **more,
        )
        url = urlsplit(address)
        tab = Tab(context.new_page(), f"{url.scheme}://{url.netloc}")
        tab.listen()
        self.tabs.append(tab)
        tab.page.goto(address)
        tab.page.wait_for_selector(FIRST_FIGURES)
        return tab

    def blank(self) -> Any:
        """Return an empty page of a fresh profile."""
        return self._browser.new_context().new_page()


def wait_until(page: Any, expression: str, arg: Any = None, timeout_s: float = 30.0) -> None:
    """Wait until a function of JavaScript returns something true. Playwright's own wait would have
    the page evaluate a text, which its policy forbids. Raises Unavailable."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression, arg):
        if time.monotonic() > deadline:
            raise Unavailable(f"in {timeout_s:g} s the page did not come to: {expression}")
        page.wait_for_timeout(POLL_MS)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium. Raises Unavailable if it is not installed."""
    path = shutil.which(CHROMIUM)
    if path is None:
        raise Unavailable(INSTALL)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield Browser(browser)
        finally:
            browser.close()


def axe_violations(tab: Tab) -> list[dict[str, Any]]:
    """Return what axe-core finds wrong in a tab: rule, and the elements."""
    source = (files("axe_playwright_python") / "axe.min.js").read_text()
    tab.page.evaluate(source)
    found = tab.page.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map("
        "({id, nodes}) => ({id, nodes: nodes.map(node => node.target.join(' '))})))"
    )
    return list(found)
