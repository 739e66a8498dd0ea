"""Texts that every Python installation has: prose, code and a chat."""

from __future__ import annotations

import argparse
import inspect
import tarfile
import zipfile
from itertools import cycle, islice
from pydoc_data.topics import topics

USER, MODEL = "<start_of_turn>user\n", "<start_of_turn>model\n"
END = "<end_of_turn>\n"


def prose() -> str:
    """Return the language reference as running text."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def code() -> str:
    """Return modules of the standard library."""
    return "\n\n".join(inspect.getsource(module) for module in (argparse, tarfile, zipfile))


def chat() -> str:
    """Return questions about Python, answered by its reference."""
    turns = [
        f"{USER}What does Python's reference say about {name!r}?{END}{MODEL}{text[:600]}{END}"
        for name, text in sorted(topics.items())
    ]
    return "".join(islice(cycle(turns), 200))


TEXTS = {"prose": prose, "code": code, "chat": chat}
