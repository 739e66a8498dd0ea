"""What is to be known of the engines in this environment. Read from their metadata alone."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from kvstore.store.findings import Finding, note

UNTESTED_ON_HARDWARE = {"tensorrt_llm": "TensorRT-LLM"}
"""Engines whose connector has been tested without them: package, and what people call it."""


def check_engines() -> Iterator[Finding]:
    """Yield a note for each engine here whose connector has not run on hardware."""
    for package, title in UNTESTED_ON_HARDWARE.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        yield note(
            "engine",
            f"{title} {found}: its connector is untested on hardware",
            "compare answers with and without it before you rely on it; see docs/trtllm.md",
        )
