"""Pictures of each panel, light and dark, small enough to be kept."""

from __future__ import annotations

import io
from pathlib import Path

from kvstore_bench.page.browser import Browser

PANELS = {
    "health": "#state",
    "tiers": "#tiers",
    "hits": "#hits",
    "requests": "#requests",
    "prefixes": "#tree",
    "sessions": "#sessions",
    "namespaces": "#namespaces",
}
COLOURS = 224
WIDE, HIGH = 1280, 900
SETTLE_MS = 7000  # for the tree and the namespaces to come again


def take(browser: Browser, address: str, folder: Path) -> list[str]:
    """Write NAME-light.png and NAME-dark.png of each panel, of the whole page, and of a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for scheme in ("light", "dark"):
        tab = browser.open(address, dark=scheme == "dark", wide=WIDE, high=HIGH)
        page = tab.page
        page.wait_for_timeout(SETTLE_MS)
        page.select_option("#request-kind", "miss")
        page.locator("#request-list .row:not([hidden])").nth(2).click()
        page.click("#pause")
        page.locator("#tree-list .row").first.click()
        page.click("#all-findings")
        page.wait_for_timeout(1500)
        for name, query in PANELS.items():
            written.append(
                _write(folder / f"{name}-{scheme}.png", page.locator(query).screenshot())
            )
        page.click("#all-findings")
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_timeout(300)
        written.append(_write(folder / f"page-{scheme}.png", page.screenshot()))
        page.context.close()
    tab = browser.open(address, dark=True, wide=360, high=780)
    tab.page.wait_for_timeout(2500)
    written.append(_write(folder / "phone-dark.png", tab.page.screenshot()))
    tab.page.context.close()
    return written


def _write(path: Path, data: bytes) -> str:
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path.name
