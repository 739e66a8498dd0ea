"""Workers of one engine store blocks alike, though one may not be able to code its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.connectors.vllm.cpu_layers import import_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
RAW = "another worker of this engine cannot code its blocks"


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_vllm()


def open_on_two_ranks(folder: Path, *known: str) -> list[subprocess.CompletedProcess[str]]:
    address = f"file://{folder}/rendezvous"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.connectors.vllm.one_rank", str(rank), address, each],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, each in enumerate(known)
    ]
    try:
        told = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, out, err)
        for rank, (out, err) in zip(ranks, told, strict=True)
    ]


@pytest.mark.long
def test_where_one_worker_cannot_code_its_blocks_all_store_them_raw(tmp_path: Path) -> None:
    able, unable = open_on_two_ranks(tmp_path, "known", "unknown")
    for rank in (able, unable):
        assert rank.returncode == 0, rank.stderr
        assert "pages=HostMemory form=''" in rank.stdout
    assert RAW in able.stderr
    assert "record=raw" in unable.stderr
    assert RAW not in unable.stderr


def test_where_all_can_they_code_their_blocks(tmp_path: Path) -> None:
    for rank in open_on_two_ranks(tmp_path, "known", "known"):
        assert rank.returncode == 0, rank.stderr
        assert "pages=CodedHostMemory form='l3/1" in rank.stdout
