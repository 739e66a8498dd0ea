"""Who shares a tortured daemon: each has a journal, clients and directories of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.model.tenant import tenant_id
from kvstore.store.tenants import TENANTS_DIRECTORY
from kvstore.testing.daemon import Daemon
from tests.torture.journal import Journal
from tests.torture.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Party:
    """A tenant, or the only user of a daemon without tenants, whose name is \"\"."""

    name: str
    journal: Journal
    traffic: Traffic
    directories: Sequence[Path]

    @property
    def suffix(self) -> str:
        """What tells its violations from those of others."""
        return f" of tenant {self.name}" if self.name else ""

    def target(self, daemon: Daemon) -> str:
        """Return the address that is its own."""
        if not self.name:
            return daemon.target
        return f"unix:{daemon.socket.parent / self.name / 'kvstore.sock'}"


def parties(tenants: Sequence[str], roots: Sequence[Path]) -> list[Party]:
    """Return who shares a daemon with these directories. No two ever put the same bytes."""
    journals = [Journal(number) for number in range(max(1, len(tenants)))]
    for journal in journals:
        journal.others = [other for other in journals if other is not journal]
    if not tenants:
        return [Party("", journals[0], Traffic(journals[0]), list(roots))]
    return [
        Party(
            name,
            journal,
            Traffic(journal),
            [root / TENANTS_DIRECTORY / tenant_id(name).hex() for root in roots],
        )
        for name, journal in zip(tenants, journals, strict=True)
    ]
