"""The page in a real browser: `make page` does more, and measures it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="needs playwright, of the extra dev")
pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python, of the extra dev")

from kvstore.testing.daemon import Daemon
from kvstore_bench.page import measures
from kvstore_bench.page.browser import (
    CHROMIUM,
    INSTALL,
    Browser,
    axe_violations,
    chromium,
    wait_until,
)
from kvstore_bench.page.workload import HOSTILE, hostile

pytestmark = [
    pytest.mark.skipif(shutil.which(CHROMIUM) is None, reason=INSTALL),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of pyee
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def test_a_person_sees_the_daemon_and_hostile_names_are_text(
    browser: Browser, daemon: Daemon
) -> None:
    tab = browser.open(daemon.page_address)
    page = tab.page
    assert page.url == f"{tab.origin}/", "the token is not left in the address"
    hostile(daemon.target)
    page.fill("#request-filter", "<img")
    page.wait_for_selector("#request-list .row:not([hidden])")
    page.locator("#request-list").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    for panel in ("#why", "#conversations", "#spaces"):
        wait_until(page, measures.SAYS, [panel, HOSTILE])
    assert axe_violations(tab) == []
    assert page.evaluate("window.ran ?? 0") == 0
    assert page.locator("img").count() == 0
    assert (tab.errors, tab.foreign, tab.dialogs) == ([], [], [])

    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        wait_until(page, measures.AWAY)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    wait_until(page, measures.HEALTHY)
