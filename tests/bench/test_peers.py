"""`kvstore bench peers`: the store and plain files for real; peers that are absent; results."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.model.errors import Unavailable
from kvstore_bench.cli import bench
from kvstore_bench.peers.blocks import Blocks
from kvstore_bench.peers.course import GETS, PUTS, Course, result
from kvstore_bench.peers.process import Process
from kvstore_bench.peers.remote.course import REMOTE_PEERS, Remote, RemoteCourse, remote_result
from kvstore_bench.peers.roster import (
    FLOOR,
    KEPT,
    LMCACHE_OVER_S3,
    NIXL_UCX,
    OURS,
    PEERS,
    Peer,
)
from kvstore_bench.peers.turn import DEVICE_GETS, PeersPlan, Record

BOTH = ("--system", FLOOR, "--system", KEPT, "--blocks", "8", "--block-mib", "1", "--rounds", "2")
SMALL = PeersPlan(block_nbytes=1 << 20, blocks=4, rounds=1, threads=2)


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(bench, ["peers", *map(str, arguments)])


def test_both_sides_are_measured_and_nothing_stays_behind(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    plot = tmp_path / "peers.png"
    done = invoke(*BOTH, "--path", kept, "--plot", plot, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["wrong"] == 0
    assert set(document["systems"]) == {OURS, KEPT, FLOOR}
    for system in document["systems"].values():
        assert set(system["bytes_per_s"]) == {*PUTS, *GETS}
        assert set(system["of_device"]) == {*DEVICE_GETS}
        assert system["kept"] == 1.0
        assert (system["missed"], system["wrong"]) == (0, 0)
        assert system["ready_s"]["min"] > 0
    assert document["cold_get_vs_best"] is None, "plain files are no peer, nor are we"
    assert document["failed"] == document["skipped"] == {}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(kept.iterdir()) == []


def test_the_table_names_every_measure(tmp_path: Path) -> None:
    done = invoke(*BOTH, "--path", tmp_path)
    assert done.exit_code == 0, done.output
    for text in (
        "put, durable",
        "Of what plain reads got",
        "cold get",
        "get after kill",
        "100%",
        "XXH3",
    ):
        assert text in done.stdout


def test_an_absent_peer_is_skipped_with_what_to_install(tmp_path: Path) -> None:
    absent = Peer("absent", "plain", checks="", durable="", cold="", needs=("no_such_package",),
                  install="pip install no-such-package")  # fmt: skip
    present, lines = Course(SMALL, tmp_path).present([absent])
    assert present == []
    assert lines == {
        "absent": f"{sys.executable} has no no_such_package: pip install no-such-package"
    }


def test_a_python_that_cannot_run_a_worker_is_one_line(tmp_path: Path) -> None:
    course = Course(SMALL, tmp_path, {FLOOR: "/bin/false"})
    present, lines = course.present([peer for peer in PEERS if peer.floor])
    assert present == []
    assert "/bin/false cannot run it" in lines[FLOOR]
    assert "\n" not in lines[FLOOR]


def test_a_peer_that_fails_takes_no_more_turns_and_ours_goes_on(tmp_path: Path) -> None:
    broken = Peer(FLOOR, "no_such_module", checks="", durable="", cold="")
    ours = [peer for peer in PEERS if peer.ours]
    said: list[str] = []
    document = Course(SMALL, tmp_path).run([broken, *ours], said.append)
    assert "no_such_module" in document["failed"][FLOOR]
    assert document["systems"][OURS]["kept"] == 1.0
    assert said == [FLOOR, OURS]


def test_wrong_bytes_are_counted_whatever_they_are(tmp_path: Path) -> None:
    blocks = Blocks(count=4, nbytes=1 << 20, seed=1)
    blocks.stamp(0)
    for source, target in zip(blocks.sources, blocks.targets, strict=True):
        target[:] = source
    assert blocks.wrong([True] * 4) == 0
    blocks.targets[1][5000] ^= 1
    blocks.targets[2][:] = blocks.sources[3]
    assert blocks.wrong([True] * 4) == 2
    assert blocks.wrong([True, False, False, True]) == 0
    blocks.stamp(1)
    assert blocks.wrong([True] * 4) == 4, "blocks of another round are wrong"


def test_a_run_with_wrong_bytes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = result(SMALL, {OURS: Record(wrong=3)}) | {"failed": {}}
    monkeypatch.setattr(Course, "run", lambda *_: document)
    done = invoke(*BOTH, "--path", tmp_path)
    assert done.exit_code == 1
    assert "3 blocks came back with wrong bytes" in done.stdout


def test_a_ratio_is_of_medians_over_the_best_peer_and_a_loss_is_shown() -> None:
    records = {
        OURS: Record({"hot_get": [3.0, 2.0, 1.0]}, {"restart_get": [0.5, 1.0]}, kept=[1.0]),
        "valkey": Record(of_device={"restart_get": [1.5]}, kept=[1.0]),
        "lmcache": Record({"hot_get": [4.0, 4.0, 9.0], "cold_get": [9.0]}, kept=[0.0]),
        FLOOR: Record({"hot_get": [100.0]}),
    }
    document = result(SMALL, records)
    assert (document["hot_get_vs_best"], document["hot_get_best"]) == (0.5, "lmcache")
    assert (document["restart_get_vs_best"], document["restart_get_best"]) == (0.5, "valkey")
    assert document["cold_get_vs_best"] is None, "speeds of the device at other times say nothing"
    assert document["systems"]["lmcache"]["kept"] == 0.0


def test_a_killed_worker_is_told_apart_from_a_slow_one(tmp_path: Path) -> None:
    (floor,) = (peer for peer in PEERS if peer.floor)
    with Process(floor, sys.executable, tmp_path) as process:
        assert process.ask("check", needs=["sys", "no_such_package"]) == {
            "missing": ["no_such_package"]
        }
        process.kill()
        with pytest.raises(Unavailable, match="it ended during check"):
            process.ask("check", needs=[])


@pytest.mark.parametrize("value", ["valkey", "nobody=/bin/sh", "valkey=/no/such/python"])
def test_an_interpreter_is_name_and_path(value: str) -> None:
    done = invoke("--python-of", value)
    assert done.exit_code == 2
    assert "NAME=PATH" in done.output


def test_help_says_how_peers_get_an_environment_of_their_own() -> None:
    done = invoke("--help")
    assert done.exit_code == 0
    for text in ("--python-of", "environment of their own", "--quick", "SIGKILL"):
        assert text in " ".join(done.output.split())


def test_gets_from_another_process_and_who_is_not_installed() -> None:
    ours, mooncake, nixl = REMOTE_PEERS
    broken = replace(mooncake, module="no_such_module", environ={})
    plan = replace(SMALL, remote_gets=2)
    course = RemoteCourse(plan, lambda peer: sys.executable)
    document = course.run([ours, broken], {nixl.name: "pip install it"}, lambda system: None)
    row = document["remote"][OURS]
    assert (row["gets"], row["missed"], row["wrong"]) == (2, 0, 0)
    assert row["bytes_per_s"]["min"] > 0
    assert "no_such_module" in document["remote"][mooncake.name]["status"]
    assert document["remote"][nixl.name] == {"status": "not installed", "install": "pip install it"}
    assert document["remote_get_vs_best"] is None
    assert document["remote_wrong"] == 0


@pytest.mark.parametrize("peer", REMOTE_PEERS[1:], ids=lambda peer: peer.name)
def test_another_system_gives_back_what_it_was_lent(peer: Peer) -> None:
    present, absent = Course(SMALL, Path()).present([peer])
    if not present:
        pytest.skip(absent[peer.name])
    document = RemoteCourse(SMALL, lambda peer: sys.executable).run([peer], {}, lambda system: None)
    row = document["remote"][peer.name]
    assert (row["status"], row["missed"], row["wrong"]) == ("measured", 0, 0)


def test_the_ratio_of_remote_gets_is_over_the_best_of_the_others() -> None:
    records = {
        OURS: Remote([3.0, 1.0, 2.0]),
        "mooncake": Remote([4.0], wrong=1),
        NIXL_UCX: Remote([1.0], missed=2),
    }
    document = remote_result(REMOTE_PEERS, records, absent={}, failed={})
    assert (document["remote_get_best"], document["remote_get_vs_best"]) == ("mooncake", 0.5)
    assert document["remote_wrong"] == 1
    assert document["remote"][NIXL_UCX]["missed"] == 2


def test_lmcache_over_a_bucket_has_everything_after_a_kill(tmp_path: Path) -> None:
    course = Course(SMALL, tmp_path)
    present, absent = course.present([peer for peer in PEERS if peer.name == LMCACHE_OVER_S3])
    if not present:
        pytest.skip(absent[LMCACHE_OVER_S3])
    document = course.run(present, lambda system: None)
    assert document["failed"] == {}
    row = document["systems"][LMCACHE_OVER_S3]
    assert (row["kept"], row["missed"], row["wrong"]) == (1.0, 0, 0)
    assert {"lower_put", "lower_get", "restart_get"} <= set(row["bytes_per_s"])
    assert list(tmp_path.iterdir()) == []


def test_lmcache_over_others_is_compared_with_lmcache_over_its_own_files() -> None:
    records = {
        OURS: Record({"hot_get": [9.0]}),
        "lmcache": Record({"lower_put": [2.0], "lower_get": [4.0]}, {"restart_get": [0.5]}),
        "lmcache-kvstore": Record({"lower_put": [4.0], "lower_get": [3.0]}, {"restart_get": [1.0]}),
        "lmcache-s3": Record({"lower_put": [0.5], "lower_get": [1.0]}),
        "lmcache-valkey": Record({"lower_put": [1.0]}),
    }
    document = result(SMALL, records)
    assert document["lmcache_over_kvstore"] == {
        "put_warm": 2.0,
        "get_warm": 0.75,
        "get_after_kill": 2.0,
    }
    assert document["lmcache_over_s3"] == {
        "put_warm": 0.25,
        "get_warm": 0.25,
        "get_after_kill": None,
    }
    assert document["lmcache_over_valkey"] == {
        "put_warm": 0.5,
        "get_warm": None,
        "get_after_kill": None,
    }
    assert result(SMALL, {OURS: Record()})["lmcache_over_kvstore"] is None
    rivals = [peer.name for peer in PEERS if peer.rival]
    assert "lmcache" in rivals
    assert not {"lmcache-kvstore", "lmcache-s3", "lmcache-valkey"} & set(rivals)
