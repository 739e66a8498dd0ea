"""Takes out of a text what must not reach a stranger: credentials, and names of blocks."""

from __future__ import annotations

import re

REDACTED = "[redacted]"
HASH_CHARS_SHOWN = 8

_SECRET_WORDS = (
    r"authorization|bearer|credentials?|passw(?:or)?d|secret|token|api[_-]?key|private[_-]?key|"
    r"(?:secret[_-]?|shared[_-]?)?access[_-]?key(?:[_-]?id)?|account[_-]?key|sas|signature"
)
_RULES = (
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s\"'?#]*@"), rf"\1{REDACTED}@"),
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^\s\"'?#]*)[?#][^\s\"']*"), rf"\1?{REDACTED}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{8,}"), rf"\1 {REDACTED}"),
    (
        re.compile(
            rf"(?i)((?:{_SECRET_WORDS})[\"']?\s*[=:]\s*)"
            r"""(["']?)(?:(?<=")[^"]*|(?<=')[^']*|[^\s,;}"']+)\2"""
        ),
        rf"\1\2{REDACTED}\2",
    ),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), REDACTED),
    (re.compile(r"\bkvs1_[a-z0-9]*_[A-Za-z0-9_-]{8,}"), REDACTED),
    (re.compile(rf"\b([0-9a-f]{{{HASH_CHARS_SHOWN}}})[0-9a-f]{{24,}}\b"), r"\1..."),
)


def without_credentials(url: str) -> str:
    """Return an address without the user, password and parameters in it."""
    for pattern, instead in _RULES[:2]:
        url = pattern.sub(instead, url)
    return url


def redacted(text: str) -> str:
    """Return a text for a stranger: no credentials, and of hashes only the start."""
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text
