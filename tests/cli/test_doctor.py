"""`kvstore doctor` finds what is wrong on a real machine and says what to type."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from click.testing import Result

import kvstore as package
from kvstore.cli.check_machine import huge_pages, judge_native
from kvstore.cli.check_pool import check_pool
from kvstore.cli.check_vllm import check_vllm, read_arguments
from kvstore.settings import ObjectSettings, PoolSettings
from kvstore.store.findings import Level
from kvstore.testing.daemon import Daemon
from kvstore.testing.seaweed import Seaweed
from kvstore.tier.object.bucket import open_store
from tests.cli.run import kvstore

TRANSFER = {
    "kv_connector": "KVStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"target": "unix:/k"},
}


class Doctor:
    """The doctor, told to look into a directory of this test."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "blocks"
        self.settings = [
            f"server.socket={directory}/run/k.sock",
            "server.metrics_listen=127.0.0.1:0",
            "dram.capacity=64MiB",
            "file.capacity=1GiB",
            f"file.path={self.path}",
        ]

    def __call__(self, *settings: str, options: tuple[str, ...] = ()) -> Result:
        sets = [f"--set={each}" for each in (*self.settings, *settings)]
        return kvstore("doctor", *sets, *options)

    def finding(
        self, about: str, *settings: str, options: tuple[str, ...] = ()
    ) -> tuple[str, str, str]:
        """Return (level, found, do) of one finding."""
        done = self(*settings, options=(*options, "--json"))
        told = json.loads(done.output)
        assert done.exit_code == (0 if told["healthy"] else 1)
        (one,) = [each for each in told["findings"] if each["about"] == about]
        return one["level"], one["found"], one["do"]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory whose path is short enough for a unix socket."""
    with Daemon() as daemon:
        yield daemon.directory


@pytest.fixture
def doctor(directory: Path) -> Doctor:
    return Doctor(directory)


def test_nothing_is_wrong_beside_a_running_daemon_and_nothing_is_left_behind(
    daemon: Daemon,
) -> None:
    files = daemon.directory / "file"
    before = sorted(files.iterdir())
    sets = (f"--set=file.path={files}", "--set=file.capacity=1GiB")
    done = kvstore("doctor", "--target", daemon.target, *sets)
    assert done.exit_code == 0, done.output
    assert "nothing is wrong" in done.output
    for word in ("open files", "memory", "O_DIRECT", "disk speed", "room", package.__version__):
        assert word in done.output
    assert sorted(files.iterdir()) == before


def test_without_a_daemon_it_says_how_to_start_one_and_whether_that_would_work(
    doctor: Doctor,
) -> None:
    done = doctor()
    assert done.exit_code == 0, "nothing is wrong before the first start"
    assert done.output.endswith("nothing is wrong\n")
    assert "-> kvstore serve" in done.output
    assert doctor.finding("daemon")[0] == "note"
    assert doctor.finding("socket")[0] == "ok"
    assert doctor.finding("metrics_listen")[0] == "ok"
    assert not doctor.path.exists(), "it only looks"


def test_each_of_several_directories_is_looked_at(doctor: Doctor, directory: Path) -> None:
    paths = json.dumps([f"{directory}/one", f"{directory}/two"])
    done = doctor(f"file.path={paths}", options=("--json",))
    found = [each["found"] for each in json.loads(done.output)["findings"]]
    for name in ("one", "two"):
        assert any(f"{directory}/{name} on " in text for text in found)
        assert any(f"{directory}/{name} shares its file system" in text for text in found)


def test_an_eviction_policy_that_there_is_not(doctor: Doctor) -> None:
    level, found, do = doctor.finding("eviction", "dram.eviction_policy=nope")
    assert (level, "choose one of lru, hz" in found) == ("wrong", True)
    assert "--set dram.eviction_policy=hz" in do
    assert doctor.finding("eviction", "file.eviction_policy=nope")[0] == "wrong"


def test_a_port_that_is_taken(doctor: Doctor) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        level, found, do = doctor.finding(
            "listen", f"server.listen=127.0.0.1:{port}", "server.listen_open=true"
        )
    assert (level, str(port) in found) == ("wrong", True)
    assert "--set server.listen=127.0.0.1:" in do


def test_a_socket_path_that_is_something_else(doctor: Doctor, directory: Path) -> None:
    (directory / "taken").write_text("")
    level, _, do = doctor.finding("socket", f"server.socket={directory}/taken")
    assert (level, do) == ("wrong", f"rm {directory}/taken")


def test_a_daemon_that_hangs_is_told_from_none() -> None:
    with Daemon() as daemon:
        daemon.start()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            doctor = Doctor(daemon.directory)
            level, found, do = doctor.finding("socket")
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
    assert level == "wrong"
    assert "does not answer" in found
    assert "fuser" in do


def test_a_daemon_that_does_not_tell_its_settings_is_pointed_out(directory: Path) -> None:
    with Daemon("server.listen=127.0.0.1:0", "server.listen_open=true", file=False) as daemon:
        daemon.start()
        doctor = Doctor(directory)
        level, found, do = doctor.finding("settings", options=("--target", daemon.address))
    assert level == "note"
    assert "the daemon's own cannot be read (" in found
    assert "those of --config and --set are judged" in found
    assert "unix socket" in do


def test_what_tenants_have_stored_counts_as_taken(doctor: Doctor) -> None:
    tenant = doctor.path / "tenants" / "00" / "1.segment"
    tenant.parent.mkdir(parents=True)
    tenant.write_bytes(bytes(8 << 20))
    assert "8 MiB taken" in doctor.finding("room")[1]


def test_another_release_is_pointed_out(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "__version__", "9.9.9")
    doctor = Doctor(daemon.directory)
    level, found, _ = doctor.finding("daemon", options=("--target", daemon.target))
    assert (level, "9.9.9" in found) == ("note", True)


def test_more_capacity_than_the_machine_has(doctor: Doctor) -> None:
    level, _, do = doctor.finding("memory", "dram.capacity=100TiB")
    assert level == "wrong"
    assert "--set dram.capacity=" in do
    level, _, do = doctor.finding("room", "file.capacity=1000TiB")
    assert level == "wrong"
    assert "--set file.capacity=" in do


def test_a_directory_that_is_none(doctor: Doctor, directory: Path) -> None:
    (directory / "plain").write_text("")
    level, _, do = doctor.finding("directory", f"file.path={directory}/plain/blocks")
    assert (level, do) == ("wrong", "--set file.path=DIRECTORY")
    assert doctor.finding("file tier", "file.path=")[0] == "note"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to look at")
def test_memory_that_looks_like_a_disk(doctor: Doctor) -> None:
    level, found, _ = doctor.finding("directory", "file.path=/dev/shm/kvstore-doctor-test")
    assert (level, "tmpfs" in found) == ("note", True)


def test_too_few_open_files(doctor: Doctor) -> None:
    sets = [f"--set={each}" for each in doctor.settings]
    command = [sys.executable, "-m", "kvstore.cli", "doctor", "--json", *sets]
    ran = subprocess.run(
        ["bash", "-c", f"ulimit -n 256; exec {shlex.join(command)}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])},
    )
    assert ran.returncode == 1, ran.stderr
    (one,) = [each for each in json.loads(ran.stdout)["findings"] if each["about"] == "open files"]
    assert (one["level"], one["do"].startswith("ulimit -n")) == ("wrong", True)


def test_huge_pages() -> None:
    assert huge_pages(possible=True).level is Level.OK
    without = huge_pages(possible=False)
    assert (without.level, "Linux 6.1" in without.do) == (Level.NOTE, True)


def test_without_the_native_library_it_says_so_and_how_to_get_it() -> None:
    missing = judge_native("it is missing")
    assert missing.level is Level.NOTE
    assert "raw" in missing.found
    assert "kvstore_kernels.native.build" in missing.do
    assert judge_native("").level is Level.OK


def test_good_arguments_of_vllm_pass(daemon: Daemon) -> None:
    transfer = {**TRANSFER, "kv_connector_extra_config": {"target": daemon.target}}
    text = f"serve model --kv-transfer-config {shlex.quote(json.dumps(transfer))}"
    done = kvstore(
        *("doctor", "--target", daemon.target, "--vllm-args", text),
        *("--set", f"file.path={daemon.directory / 'file'}", "--set", "file.capacity=1GiB"),
    )
    assert done.exit_code == 0, done.output
    assert "kv_load_failure_policy is recompute" in done.output


def test_the_config_file_of_vllm_is_read(doctor: Doctor, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "kv-transfer-config:\n  kv_connector: KVStoreConnector\n  kv_role: kv_both\n"
        "no-such-thing: 1\n"
    )
    for about in ("vllm failures", "vllm target"):
        assert doctor.finding(about, options=("--vllm-config", str(file)))[0] == "wrong"
    file.write_text("- 1")
    assert doctor(options=("--vllm-config", str(file))).exit_code == 1
    file.write_text("{")
    assert "neither JSON nor YAML" in doctor(options=("--vllm-config", str(file))).output
    file.write_bytes(b"\x93\xff")
    done = doctor(options=("--vllm-config", str(file)))
    assert (done.exit_code, f"{file} is no text in UTF-8" in done.stderr) == (1, True)


def test_a_running_daemon_is_judged_by_its_own_settings() -> None:
    with Daemon("limits.sessions_max=1000") as daemon:
        at = ("--target", daemon.start().target)
        done = kvstore("doctor", *at, "--json")
        found = {each["about"]: each for each in json.loads(done.output)["findings"]}
        assert found["directory"]["found"].startswith(f"{daemon.directory / 'file'} on ")
        assert "file.capacity is 1 GiB" in found["room"]["found"]
        assert "settings" not in found
        given = "--set=dram.capacity=100TiB"
        done = kvstore("doctor", *at, given)
        assert done.exit_code == 0, done.output
        assert 'dram.capacity is "64MiB" in the daemon, not "100TiB"' in done.output


def bucket(doctor: Doctor, s3: Seaweed, **changes: object) -> tuple[str, str, str]:
    settings = {**s3.settings(), "timeout_s": 2, **changes}
    sets = [f"object.{key}={str(value).lower()}" for key, value in settings.items()]
    return doctor.finding("bucket", *sets)


@pytest.fixture(scope="module")
def s3() -> Iterator[Seaweed]:
    with Seaweed() as server:
        yield server.start()


@pytest.fixture
def credentials(s3: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


def test_a_pool_that_is_not_there_and_one_that_others_reach(doctor: Doctor) -> None:
    level, found, do = doctor.finding("pool", "pool.url=mooncake://127.0.0.1:1")
    assert level == Level.WRONG
    if "cannot be imported" in found:
        assert "kvstore-tiers[pool]" in do
    else:
        assert "mooncake_master --rpc_port=1" in do
    settings = PoolSettings(url="mooncake://192.0.2.1:1", insecure=True)
    (warned,) = check_pool(settings, running=True)
    assert "neither TLS nor credentials" in warned.found


@pytest.mark.usefixtures("credentials")
def test_a_bucket_is_tried_out_and_nothing_is_left_in_it(doctor: Doctor, s3: Seaweed) -> None:
    level, found, _ = bucket(doctor, s3)
    assert level == "ok", found
    assert "list, put, get and delete work" in found
    settings = ObjectSettings(**s3.settings())
    assert list(obstore.list(open_store(settings)).collect()) == []


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    ("changes", "word", "advice"),
    [
        ({"url": "s3://none-such/x"}, "no such bucket", "make the bucket none-such"),
        ({"endpoint": "http://127.0.0.1:9"}, "connection was refused", "http://127.0.0.1:9 is up"),
        ({"endpoint": "http://none.invalid"}, "name of the store is not known", "DNS"),
    ],
)
def test_a_bucket_that_is_not_there(
    doctor: Doctor, s3: Seaweed, changes: dict[str, object], word: str, advice: str
) -> None:
    level, found, do = bucket(doctor, s3, **changes)
    assert level == "wrong"
    assert word in found
    assert advice in do


@pytest.mark.usefixtures("credentials")
def test_a_bucket_without_rights_names_credentials_region_and_endpoint(
    doctor: Doctor, s3: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    level, found, do = bucket(doctor, s3)
    assert (level, "list: not allowed, HTTP 403" in found) == ("wrong", True)
    for word in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "object.region", "object.endpoint"):
        assert word in do
    assert "wrong" not in do


@pytest.mark.usefixtures("credentials")
def test_a_folder_is_a_bucket_too(doctor: Doctor, directory: Path) -> None:
    level, found, _ = doctor.finding("bucket", f"object.url=file://{directory}/shared")
    assert (level, "work" in found) == ("ok", True)
    assert [each for each in (directory / "shared").rglob("*") if each.is_file()] == []


def vllm(text: str) -> dict[str, tuple[Level, str]]:
    return {f.about: (f.level, f.do) for f in check_vllm(read_arguments(text), "unix:/k")}


def test_an_engine_without_the_connector() -> None:
    level, do = vllm("serve model --max-model-len 4096")["vllm connector"]
    assert level is Level.WRONG
    assert json.loads(shlex.split(do)[1]) == TRANSFER


@pytest.mark.parametrize(
    ("arguments", "about", "level", "word"),
    [
        ("--kv-transfer-config.kv_load_failure_policy fail", "vllm failures", "wrong", "recompute"),
        ("--kv-transfer-config.kv_role=none", "vllm role", "wrong", "kv_both"),
        ("", "vllm target", "wrong", "kvstore serve"),
        ("--no-enable-prefix-caching", "vllm prefix", "wrong", "--no-enable-prefix-caching"),
        (
            "--decode-context-parallel-size 2",
            "vllm parallel",
            "wrong",
            "--decode-context-parallel-size",
        ),
        ("--calculate-kv-scales", "vllm KV scales", "wrong", "--calculate-kv-scales"),
        ("--prefix-caching-hash-algo xxhash", "vllm hashes", "ok", ""),
    ],
)
def test_each_setting_of_vllm_that_matters(
    arguments: str, about: str, level: str, word: str
) -> None:
    base = f"--kv-transfer-config {shlex.quote(json.dumps(TRANSFER))} "
    found, do = vllm(base + arguments)[about]
    assert (found.value, word in do) == (level, True)


def test_arguments_that_are_no_shell_words_are_refused(doctor: Doctor) -> None:
    assert doctor(options=("--vllm-args", "--a 'b")).exit_code == 2


def test_an_engine_whose_connector_has_not_run_on_hardware_is_noted(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "TensorRT-LLM" not in doctor().output
    folder = tmp_path / "tensorrt_llm-1.2.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.2.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    level, found, do = doctor.finding("engine")
    assert level == Level.NOTE
    assert found == "TensorRT-LLM 1.2.1: its connector is untested on hardware"
    assert "compare answers" in do
