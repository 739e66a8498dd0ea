"""What models are called."""

from __future__ import annotations


def model_name(source: str) -> str:
    """Return the common name of a model that was loaded from a directory or by a hub's name."""
    parts = [part for part in source.split("/") if part]
    for part in parts:
        if part.startswith("models--"):  # a directory of the hub's cache
            return part.removeprefix("models--").replace("--", "/")
    is_path = source.startswith(("/", "."))
    return parts[-1] if parts and is_path else source
