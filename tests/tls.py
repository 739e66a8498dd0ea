"""Certificates for tests: an authority, and files of pairs that it signed."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import NamedTuple

import pytest

trustme = pytest.importorskip("trustme")


class Files(NamedTuple):
    """Paths of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """One authority whose certificate is at `ca`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._ca = trustme.CA()
        self.ca = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *names: str, not_after: datetime.datetime | None = None) -> Files:
        """Write a pair with these names, or 127.0.0.1; files that are there are replaced."""
        pair = self._ca.issue_cert(
            *(names or ("127.0.0.1", "localhost")),
            not_before=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC) if not_after else None,
            not_after=not_after,
        )
        files = Files(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        chain = b"".join(each.bytes() for each in pair.cert_chain_pems)
        for path, data in ((files.key, pair.private_key_pem.bytes()), (files.cert, chain)):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(data)
            fresh.chmod(0o600)
            os.replace(fresh, path)
        return files
