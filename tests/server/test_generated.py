"""The committed protobuf code is what the .proto files generate."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MYPY_GRPC = Path(sys.executable).parent / "protoc-gen-mypy_grpc"


@pytest.mark.parametrize(
    ("proto", "services"),
    [("kvstore/rpc/v1/kvstore.proto", True), ("kvstore/rpc/etcd/etcd.proto", False)],
)
def test_committed_code_is_generated_from_the_proto(
    proto: str, services: bool, tmp_path: Path
) -> None:
    pytest.importorskip("grpc_tools")
    kinds = ("python", "pyi", "grpc_python") if services else ("python", "pyi")
    plugin = (f"--plugin=protoc-gen-mypy_grpc={MYPY_GRPC}", f"--mypy_grpc_out=quiet:{tmp_path}")
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", "proto"),
            *(f"--{kind}_out={tmp_path}" for kind in kinds),
            *(plugin if services else ()),
            f"proto/{proto}",
        ],
        cwd=ROOT,
        check=True,
    )
    folder = Path(proto).parent
    fresh = {file.name: file.read_text() for file in (tmp_path / folder).iterdir()}
    committed = {
        file.name: file.read_text()
        for file in (ROOT / folder).glob(f"{Path(proto).stem}_pb2*")
        if file.is_file()
    }
    assert committed == fresh
