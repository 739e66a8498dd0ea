"""The example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.testing.daemon import Daemon  # noqa: E402
from tests.connectors.vllm.tiny_models import make_llama, make_tokenizer  # noqa: E402


def test_the_second_answer_starts_from_stored_kv(tmp_path: Path) -> None:
    torch.manual_seed(7)
    make_llama().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompt").write_text(" ".join(f"t{4 + n * 7 % 900}" for n in range(200)))
    with Daemon() as daemon:
        command = ["-m", "kvstore_transformers.example", str(tmp_path / "model")]
        options = ["--prompt", str(tmp_path / "prompt"), "--target", daemon.start().target]
        result = subprocess.run(
            [sys.executable, *command, *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
    first, answer, second, same = result.stdout.splitlines()
    assert first.startswith("0 of 200 tokens")
    assert second.startswith("192 of 200 tokens")
    assert answer == same
