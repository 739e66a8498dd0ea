"""`kvstore key`, and what the commands for directories do with a root key."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from pathlib import Path

import pytest
from click.testing import Result

from kvstore import Client
from kvstore.metrics import Metrics
from kvstore.sealing import FileRoot, Sealing
from kvstore.settings import ObjectSettings, load_settings
from kvstore.testing.daemon import Daemon
from kvstore.testing.root_key import root_key_in_memory
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.tier.object import ObjectTier
from tests.cli.run import kvstore
from tests.tier.file.frames import SEALING, expected, flip, segments
from tests.tier.file.test_sealed import EXPECTED, fill, served
from tests.tier.object.runs import NAMESPACE, frames, prefix_of

KEY = bytes(range(32))


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "root.key"
    path.write_bytes(KEY)
    path.chmod(0o400)
    return str(path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    fill(tmp_path / "tier")
    return tmp_path / "tier"


def test_a_root_key_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new.key"
    assert kvstore("key", "create", str(path)).exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    key = path.read_bytes()
    assert len(key) == 32
    again = kvstore("key", "create", str(path))
    assert (again.exit_code, path.read_bytes()) == (2, key)
    assert "never overwritten" in again.output


def test_keys_are_listed_without_the_root_and_checked_with_it(
    directory: Path, key_file: str
) -> None:
    (blind,) = kvstore("key", "list", str(directory), "--json").output.splitlines()
    found = json.loads(blind)
    assert (found["epoch"], found["segments"], found["current"], found["opens"]) == (
        1,
        1,
        True,
        False,
    )
    told = kvstore("key", "list", str(directory), "--root-key-file", key_file).output
    assert "epoch 1" in told
    assert "opens with this root" in told
    assert KEY.hex() not in told
    (directory.parent / "plain").mkdir()
    assert "no keys" in kvstore("key", "list", str(directory.parent / "plain")).output


def test_a_new_epoch_is_for_new_segments(directory: Path, key_file: str) -> None:
    done = kvstore("key", "rotate", str(directory), "--root-key-file", key_file)
    assert "epoch 2 for new segments" in done.output
    fill(directory)
    rows = map(json.loads, kvstore("key", "list", str(directory), "--json").output.splitlines())
    assert {row["epoch"]: row["segments"] for row in rows} == {1: 1, 2: 1}


def test_a_new_root_takes_the_place_of_the_old_one(
    directory: Path, key_file: str, tmp_path: Path
) -> None:
    new = tmp_path / "new.key"
    kvstore("key", "create", str(new))
    before = [path.read_bytes() for path in segments(directory)]
    done = kvstore(
        "key", "rotate", str(directory), "--root-key-file", key_file, "--new-root-key-file", new
    )
    assert "wrapped by the new root" in done.output
    assert [path.read_bytes() for path in segments(directory)] == before
    told = kvstore("key", "list", str(directory), "--root-key-file", key_file)
    assert (told.exit_code, "the root key does not open it" in told.output) == (2, True)
    # Not even an older copy of the file opens with the old root.
    for name in ("KEYS.a", "KEYS.b"):
        flip(directory / name, 40)
        told = kvstore("key", "list", str(directory), "--root-key-file", key_file)
        assert "opens with this root" not in told.output
        flip(directory / name, 40)
    assert "opens with" in kvstore("key", "list", str(directory), "--root-key-file", new).output


def test_a_command_without_a_key_says_which_option(directory: Path) -> None:
    for arguments in (["key", "rotate"], ["gc", "--seal"]):
        done = kvstore(*arguments, str(directory))
        assert (done.exit_code, "--root-key-file" in done.output) == (2, True)
    assert kvstore("key", "list").exit_code == 2


def test_inspect_and_verify_read_with_the_key_and_count_without(
    directory: Path, key_file: str
) -> None:
    root = ["--root-key-file", key_file]
    good = kvstore("verify", str(directory), *root)
    assert (good.exit_code, ": good." in good.output) == (0, True)
    totals = json.loads(kvstore("inspect", str(directory), *root, "--json").output)["totals"]
    assert (totals["live_records"], totals["records"]) == (3, 4)
    blind = kvstore("verify", str(directory))
    assert blind.exit_code == 0
    assert "1 encrypted segments with 4 frames were not read" in blind.output
    flip(segments(directory)[0], 2 * 4096 + 5)
    assert kvstore("verify", str(directory), *root).exit_code == 1


def test_gc_seals_what_is_in_clear_and_keeps_what_is_live(tmp_path: Path, key_file: str) -> None:
    path = tmp_path / "plain"
    fill(path, None)
    (old,) = segments(path)
    done = kvstore("gc", "--seal", str(path), "--root-key-file", key_file)
    assert "4 frames encrypted, 0 damaged" in done.output
    assert not old.exists()
    assert asyncio.run(served(path)) == EXPECTED
    again = kvstore("gc", "--seal", str(path), "--root-key-file", key_file, "--json")
    assert json.loads(again.output)["sealed_frames"] == 0
    assert asyncio.run(served(path)) == EXPECTED


def test_gc_drops_what_is_damaged_and_seals_the_rest(tmp_path: Path, key_file: str) -> None:
    path = tmp_path / "plain"
    fill(path, None)
    flip(segments(path)[0], 2 * 4096 + 5)  # of the frame with a
    done = kvstore("gc", "--seal", str(path), "--root-key-file", key_file)
    assert "3 frames encrypted, 1 damaged" in done.output
    assert asyncio.run(served(path)) == expected({"c": 2, "d": 4})


def test_a_directory_of_a_daemon_is_sealed_with_its_names() -> None:
    keys, space = sample_keys("gc", 10), sample_namespace("a-secret-model")
    records = sample_records(keys)
    with Daemon() as daemon, root_key_in_memory() as root:
        with Client(daemon.start().target) as client:
            client.register(space)
            assert client.put(space.id, keys, records, durable=True).durable
        assert daemon.stop() == 0
        path = daemon.directory / "file"
        assert b"a-secret-model" in b"".join(each.read_bytes() for each in path.iterdir())
        done = kvstore("gc", "--seal", str(path), "--root-key-file", str(root))
        assert "of a-secret-model" in done.output
        assert b"a-secret-model" not in b"".join(each.read_bytes() for each in path.iterdir())
        daemon.start(f"security.root_key_file={root}")
        with Client(daemon.target) as client:
            client.register(space)
            assert client.get(space.id, keys) == records


def test_another_tenants_directory_is_known_by_its_keys(tmp_path: Path, key_file: str) -> None:
    from kvstore.model.tenant import tenant_id

    path = tmp_path / "tenants" / tenant_id("acme").hex()
    path.parent.mkdir()
    fill(path, Sealing(SEALING.root, tenant_id("acme")))
    done = kvstore("verify", str(path), "--root-key-file", key_file)
    assert (done.exit_code, ": good." in done.output) == (0, True)


def test_the_keys_of_a_bucket_are_rotated_and_rewrapped(tmp_path: Path, key_file: str) -> None:
    async def put_one(root_key: str, prefix: str) -> None:
        sealing = Sealing(FileRoot.read(Path(root_key)))
        tier = ObjectTier(ObjectSettings(url=url), Metrics(), sealing=sealing)
        tier.start()
        try:
            await tier.ready(time.monotonic() + 20)
            await tier.writes.write(frames(prefix_of(prefix, 16)), time.monotonic() + 20)
            for each in ("first", prefix):
                found = await tier.lookups.find(
                    NAMESPACE, prefix_of(each, 16), run_blocks=16, deadline=time.monotonic() + 20
                )
                assert found.blocks == 16
        finally:
            await tier.close()

    url = f"file://{tmp_path}/bucket"
    config, new = tmp_path / "kvstore.toml", tmp_path / "new.key"
    tier_path = tmp_path / "tier"
    fill(tier_path)
    overrides = [f"file.path={tier_path}", f"object.url={url}"]
    settings = load_settings(None, [*overrides, f"security.root_key_file={key_file}"])
    config.write_text(settings.to_toml())
    asyncio.run(put_one(key_file, "first"))
    done = kvstore("key", "rotate", "--config", str(config))
    assert "epoch 2" in done.output.splitlines()[-1]
    assert url in done.output
    asyncio.run(put_one(key_file, "second"))
    kvstore("key", "create", str(new))
    done = kvstore("key", "rotate", "--config", str(config), "--new-root-key-file", str(new))
    assert "wrapped anew" in done.output
    again = kvstore(
        "key", "rotate", "--config", str(config), "--root-key-file", key_file,
        "--new-root-key-file", str(new),
    )  # fmt: skip
    assert (again.exit_code, again.stdout.count(" already\n")) == (0, 2)
    asyncio.run(put_one(str(new), "third"))
    assert len(list((tmp_path / "bucket").rglob("keys/*"))) == 1  # the old root opens none


def rewrap(config: Path, old: str, new: Path) -> Result:
    options = ("--config", str(config), "--root-key-file", old)
    return kvstore("key", "rotate", *options, "--new-root-key-file", str(new))


def new_root(tmp_path: Path) -> Path:
    assert kvstore("key", "create", str(tmp_path / "new.key")).exit_code == 0
    return tmp_path / "new.key"


def config_of(tmp_path: Path, *settings: str) -> Path:
    config = tmp_path / "kvstore.toml"
    config.write_text(load_settings(None, settings).to_toml())
    return config


def opens(path: Path, key_file: Path | str) -> bool:
    told = kvstore("key", "list", str(path), "--root-key-file", str(key_file))
    return "opens with this root" in told.output


def test_nothing_is_rewrapped_while_the_bucket_does_not_answer(
    directory: Path, key_file: str, tmp_path: Path
) -> None:
    new = new_root(tmp_path)
    settings = (f"file.path={directory}", "object.url=s3://bucket", "object.timeout_s=1")
    there = ("object.endpoint=http://127.0.0.1:1", "object.allow_http=true", "object.region=x")
    config = config_of(tmp_path, *settings, *there)
    done = rewrap(config, key_file, new)
    assert (done.exit_code, done.stdout) == (1, "")
    assert opens(directory, key_file)


def test_a_new_root_that_was_taken_in_part_is_taken_again(
    directory: Path, key_file: str, tmp_path: Path
) -> None:
    new, other = new_root(tmp_path), tmp_path / "other"
    fill(other)
    kvstore("key", "rotate", str(other), "--root-key-file", key_file, "--new-root-key-file", new)
    config = config_of(tmp_path, f'file.path=["{other}", "{directory}"]')
    for first, second in (("already", ""), ("already", " already")):
        done = rewrap(config, key_file, new)
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines() == [
            f"{other}: wrapped by the new root {first}",
            f"{directory}: wrapped by the new root{second}",
        ]
    assert opens(directory, new)
    assert opens(other, new)


def test_directories_that_are_not_rewrapped_are_named(
    directory: Path, key_file: str, tmp_path: Path
) -> None:
    new, gone, empty = new_root(tmp_path), tmp_path / "gone", tmp_path / "empty"
    empty.mkdir()
    config = config_of(tmp_path, f'file.path=["{directory}", "{gone}", "{empty}"]')
    done = rewrap(config, key_file, new)
    assert (done.exit_code, done.stdout) == (1, f"{directory}: wrapped by the new root\n")
    assert f"{gone} is not there, {empty} has no keys" in done.stderr
    assert "Keep the old root key" in done.stderr


def test_a_tenants_directories_are_rewrapped_and_missed(key_file: str, tmp_path: Path) -> None:
    from kvstore.model.tenant import tenant_id

    tier, new = tmp_path / "tier", new_root(tmp_path)
    acme, beta = (tier / "tenants" / tenant_id(name).hex() for name in ("acme", "beta"))
    acme.parent.mkdir(parents=True)
    fill(acme, Sealing(SEALING.root, tenant_id("acme")))
    tenants = ("tenants.acme.weight=1", "tenants.beta.weight=1")
    done = rewrap(config_of(tmp_path, f"file.path={tier}", *tenants), key_file, new)
    assert (done.exit_code, done.stdout) == (1, f"{acme}: wrapped by the new root\n")
    assert f"Error: {beta} is not there: " in done.stderr


def test_a_root_that_opens_nothing_changes_nothing(
    directory: Path, key_file: str, tmp_path: Path
) -> None:
    new, other = new_root(tmp_path), tmp_path / "other"
    fill(other)
    third = tmp_path / "third.key"
    kvstore("key", "create", str(third))
    kvstore("key", "rotate", str(other), "--root-key-file", key_file, "--new-root-key-file", third)
    done = rewrap(config_of(tmp_path, f'file.path=["{directory}", "{other}"]'), key_file, new)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{other}/KEYS: the root key does not open it" in done.stderr
    assert opens(directory, key_file)
