"""The examples that people copy: code blocks of the documents, and the lines of `--help`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.cli import main
from kvstore.cli.tree import walk

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"bash", "console", "json", "python", "toml", "text", "yaml"}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OPERATORS = {"|", "||", "&&", ";", "&"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document."""

    place: str
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """One program's call in a line of shell: its words, and where its output goes."""

    words: tuple[str, ...]
    output: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of shell, and where it stands."""

    place: str
    text: str
    commands: tuple[Command, ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text()
    for found in _BLOCK.finditer(text):
        number = text.count("\n", 0, found.start()) + 1
        yield Block(f"{document.relative_to(ROOT)}:{number}", found[1], found[2])


def every_block(*languages: str) -> list[Block]:
    found = [block for document in DOCUMENTS for block in blocks(document)]
    return [block for block in found if not languages or block.language in languages]


def document_lines() -> list[Line]:
    """Return the commands of the documents; of a console block, what follows `$`."""
    lines = []
    for block in every_block("bash", "console"):
        text = block.text
        if block.language == "console":
            text = "\n".join(re.findall(r"(?m)^\$ (.*)$", text))
        lines += [_line(block.place, each) for each in logical_lines(text)]
    return lines


def help_lines() -> list[Line]:
    """Return the lines of all `--help` texts that call a program."""
    lines = []
    for context in walk(main, "kvstore"):
        if context.command is main:
            continue
        for text in (context.command.help or "").splitlines():
            if text.startswith("  ") and re.match(r"(kvstore|python|\S*pip|echo) ", text.strip()):
                lines.append(_line(f"{context.command_path} --help", text.strip()))
    return lines


def logical_lines(text: str) -> Iterator[str]:
    """Yield the lines; one whose quotes are open, or that ends with a backslash, goes on."""
    kept = ""
    for line in text.splitlines():
        kept = f"{kept}\n{line}" if kept else line
        if kept.endswith("\\"):
            kept = kept[:-1]
            continue
        try:
            words = shlex.split(kept, comments=True)
        except ValueError:  # an open quote
            continue
        if words:
            yield kept
        kept = ""
    assert not kept, f"a quote is never closed: {kept}"


def _line(place: str, text: str) -> Line:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;><")
    lexer.whitespace_split = True
    commands, words, output = [], [], ""
    expects_output = False
    for word in [*lexer, ";"]:
        if expects_output:
            output, expects_output = word, False
        elif word in (">", ">>"):
            expects_output = True
        elif word in _OPERATORS:
            if words:
                commands.append(Command(tuple(words), output))
            words, output = [], ""
        else:
            words.append(word)
    return Line(place, text, tuple(commands))
