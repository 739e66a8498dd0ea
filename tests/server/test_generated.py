"""The committed protobuf code is what the .proto generates."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTO = "kvstore/rpc/v1/kvstore.proto"


def test_committed_code_is_generated_from_the_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", "proto"),
            *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")),
            *(f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent}/protoc-gen-mypy_grpc",),
            *(f"--mypy_grpc_out=quiet:{tmp_path}", f"proto/{PROTO}"),
        ],
        cwd=ROOT,
        check=True,
    )
    fresh = {file.name: file.read_text() for file in (tmp_path / "kvstore/rpc/v1").iterdir()}
    committed = {
        file.name: file.read_text()
        for file in (ROOT / "kvstore/rpc/v1").glob("kvstore_pb2*")
        if file.is_file()
    }
    assert committed == fresh
