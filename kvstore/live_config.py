"""The settings a daemon runs with, and what of them can change meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.config import Entry, Settings, entries
from kvstore.redaction import without_credentials


class LiveConfig:
    """The settings of one node. path: the file they came from, if from one."""

    def __init__(self, settings: Settings, path: Path | None = None) -> None:
        self.settings = settings
        self.path = path

    def entries(self) -> Sequence[Entry]:
        """Return every setting, for people: without the credentials an address may have."""
        return [
            entry._replace(value=without_credentials(entry.value))
            for entry in entries(self.settings)
        ]
