"""`kvstore inspect`, `verify` and `gc` on directories that real tiers wrote."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.model.block import PAGE_NBYTES
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from tests.cli.run import kvstore
from tests.tier.file.frames import NAMESPACE, flip, killed, physical_nbytes, put, segments
from tests.tier.file.test_recovery import recovered_names


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Frames of a process that was killed: 20 runs of 4 records, the first 5 of them superseded."""

    async def main() -> None:
        async with killed(tmp_path) as (tier, _):
            for sequence in range(1, 21):
                await put(tier, sequence, [f"{sequence}-{i}" for i in range(4)])
            for sequence in range(1, 6):
                await put(tier, 20 + sequence, [f"{sequence}-{i}" for i in range(4)])
            await tier.durability.sync()

    asyncio.run(main())
    return tmp_path


def test_inspect_counts_what_is_there(directory: Path) -> None:
    done = kvstore("inspect", str(directory))
    assert done.exit_code == 0
    assert "not in use" in done.output
    assert f"namespace {NAMESPACE.hex()[:12]}: 80 blocks, 80 records" in done.output
    found = json.loads(kvstore("inspect", str(directory), "--json").output)
    assert found["totals"]["records"] == 100
    assert found["totals"]["live_records"] == 80
    assert found["totals"]["physical_nbytes"] == physical_nbytes(directory)
    assert found["daemon_pid"] is None


def test_verify_reads_all_and_says_where_the_damage_is(directory: Path) -> None:
    kvstore("gc", str(directory))  # seals
    good = kvstore("verify", str(directory))
    assert good.exit_code == 0
    assert ": good." in good.output
    flip(segments(directory)[-1], 2 * PAGE_NBYTES + 5)
    bad = kvstore("verify", str(directory))
    assert bad.exit_code == 1
    assert "DAMAGED" in bad.output
    verdict = json.loads(kvstore("verify", str(directory), "--json").output)
    (damage,) = verdict["damaged"]
    assert damage["problem"] == "payload"
    assert damage["segment"] == segments(directory)[-1].name
    assert damage["key"][:12] in bad.output


def test_gc_says_what_it_would_win_and_then_wins_it(directory: Path) -> None:
    before = physical_nbytes(directory)
    dry = json.loads(kvstore("gc", "--dry-run", "--json", str(directory)).output)
    frame = PAGE_NBYTES + 4 * 3 * PAGE_NBYTES
    assert dry["bytes"] == 5 * frame
    assert physical_nbytes(directory) == before
    done = kvstore("gc", str(directory))
    assert "won back" in done.output
    assert before - physical_nbytes(directory) >= 4 * frame  # a footer comes on top
    assert len(asyncio.run(recovered_names(directory))) == 80
    assert json.loads(kvstore("gc", "--dry-run", "--json", str(directory)).output)["bytes"] == 0


def test_a_running_daemon_is_looked_at_but_not_collected() -> None:
    with Daemon() as daemon:
        namespace = sample_namespace()
        with Client(daemon.start().target) as client:
            namespace_id, keys = client.register(namespace), sample_keys("some", 6)
            assert client.put(namespace_id, keys, sample_records(keys), durable=True).durable
        path = str(daemon.directory / "file")
        assert f"in use by process {daemon.pid}" in kvstore("inspect", path).output
        assert kvstore("verify", path).exit_code == 0
        done = kvstore("gc", path)
        assert done.exit_code == 2
        assert "used by another kvstore daemon" in done.output
        daemon.stop()


@pytest.mark.parametrize("command", ["inspect", "verify", "gc"])
def test_a_directory_that_is_no_tier_is_refused_and_left_alone(
    command: str, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    done = kvstore(command, str(directory), str(other))
    assert done.exit_code == 2
    assert f"{other} is empty: not mounted, or not used yet" in done.output
    assert "good" not in done.output
    (other / "letter.txt").write_text("hello")
    done = kvstore(command, str(other))
    assert done.exit_code == 2
    assert f"{other} holds no blocks of kvstore" in done.output
    assert [each.name for each in other.iterdir()] == ["letter.txt"]
    (other / "blocks").symlink_to(directory)
    done = kvstore(command, str(other))
    assert done.exit_code == 2
    assert f"did you mean {other}/blocks?" in done.output


def test_the_directory_of_a_daemon_that_stored_nothing_yet_is_good() -> None:
    with Daemon() as daemon:
        daemon.start()
        path = daemon.directory / "file"
        assert kvstore("verify", str(path)).exit_code == 0
        daemon.stop()
        for segment in segments(path):
            segment.unlink()
        assert kvstore("inspect", str(path)).exit_code == 0


def test_models_are_named_from_the_directory_alone() -> None:
    spec = replace(sample_namespace(), name="vendor/model")
    other = sample_namespace("another")
    keys, others = sample_keys("named", 6), sample_keys("another", 3)
    with Daemon() as daemon, Client(daemon.start().target) as client:
        client.put(client.register(spec), keys, sample_records(keys), durable=True)
        client.put(client.register(other), others, sample_records(others), durable=True)
        daemon.kill()
        path = daemon.directory / "file"
        done = kvstore("inspect", str(path))
        assert f"namespace {spec.id.hex()[:12]} (vendor/model): 6 blocks" in done.output
        found = json.loads(kvstore("inspect", str(path), "--json").output)
        assert found["namespaces"][other.id.hex()]["model"] == "another"
        assert (
            "6 blocks of vendor/model\n  3 blocks of another" in kvstore("verify", str(path)).output
        )
        verdict = json.loads(kvstore("verify", str(path), "--json").output)
        assert verdict["models"] == {"vendor/model": 6, "another": 3}
        (path / f"{spec.id.hex()}.namespace").write_bytes(other.to_json().encode())
        (path / f"{'00' * 32}.namespace").write_bytes(b"of nobody")
        done = kvstore("gc", str(path))
        assert "6 blocks of a model that no file names" in done.output
        left = {file.stem for file in path.glob("*.namespace")}
        assert left == {spec.id.hex(), other.id.hex()}
