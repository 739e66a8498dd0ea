"""A real daemon on two directories, one of which is not there at its start."""

import json

import pytest

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.cli.run import kvstore

CHAINS = [sample_keys(f"device {name}", 8) for name in range(6)]


def hits(client: Client) -> list[bool]:
    return [client.match(sample_namespace().id, keys).hit_blocks == 8 for keys in CHAINS]


@pytest.mark.fault
def test_a_daemon_starts_without_one_of_its_disks_and_lets_it_in_when_it_is_back() -> None:
    with Daemon() as daemon:
        disks = [daemon.directory / "a", daemon.directory / "b"]
        file = f"file.path={json.dumps([str(disk) for disk in disks])}"
        daemon.start(file)
        with Client(daemon.target) as client:
            namespace_id = client.register(sample_namespace())
            for keys in CHAINS:
                assert client.put(namespace_id, keys, sample_records(keys), durable=True).durable
        daemon.kill()
        disks[1].rename(daemon.directory / "unplugged")
        daemon.start(file)
        assert daemon.output().count("device=missing") == 1
        with Client(daemon.target) as client:
            client.register(sample_namespace())
            found = hits(client)
            assert any(found)
            assert not all(found)
            assert not disks[1].exists()
            gone = found.index(False)
            with pytest.raises(Unavailable, match=f"^{disks[1]} is out of use"):
                client.admin.delete(namespace_id, CHAINS[gone])
            told = kvstore("status", "--json", "--target", daemon.target)
            assert told.exit_code == 1
            states = [each["state"] for each in json.loads(told.output)["file"]["devices"]]
            assert states == ["ok", "missing"]
            (daemon.directory / "unplugged").rename(disks[1])
            until(lambda: client.admin.stats()["file"]["devices"][1]["state"] == "ok", 30)
            expected = [number != gone for number in range(len(CHAINS))]
            assert hits(client) == expected
            client.admin.delete(namespace_id, CHAINS[gone])
            for keys in (keys for number, keys in enumerate(CHAINS) if number != gone):
                assert client.get(namespace_id, keys) == sample_records(keys)
        assert daemon.stop() == 0
        assert kvstore("verify", *map(str, disks)).exit_code == 0
