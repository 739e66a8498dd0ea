"""Read the tokens of a prompt from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import click

CHARS_MAX = 64 << 20


def read_tokens(file: TextIO, tokenizer: str | None) -> list[int]:
    """Return token ids: of a JSON list, or of text and the tokenizer at a path.

    Raises ClickException that says what the file should hold.
    """
    try:
        text = file.read(CHARS_MAX + 1)
    except UnicodeDecodeError as error:
        raise click.ClickException(
            f"{file.name} is no text in UTF-8: give the prompt, or its token ids as JSON"
        ) from error
    if len(text) > CHARS_MAX:
        raise click.ClickException(f"{file.name} has more than {CHARS_MAX} characters")
    if tokenizer is not None:
        return _encode(text, Path(tokenizer))
    try:
        tokens = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.ClickException(
            f"{file.name} is not JSON; for text, name its tokenizer: --tokenizer MODEL_DIRECTORY"
        ) from error
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise click.ClickException(f"{file.name} is not a list of token ids, e.g. [1, 15043, 3186]")
    return tokens


def _encode(text: str, path: Path) -> list[int]:
    """Tokenize as an engine does, special tokens included."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise click.ClickException(
            "tokenizers is not installed: pip install 'kvstore-tiers[cli]'"
        ) from error
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise click.ClickException(f"there is no tokenizer at {file}: name tokenizer.json")
    try:
        return list(Tokenizer.from_file(str(file)).encode(text).ids)
    except Exception as error:  # the library raises nothing more specific
        raise click.ClickException(f"{file} is not a tokenizer: {error}") from error
