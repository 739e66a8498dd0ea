"""Namespaces by the start of their id, and what there is of each model."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from kvstore import Client
from kvstore.model.block import BlockKey, Namespace, NamespaceId
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from tests.cli.run import kvstore

PADDED = 20_480


def twins() -> list[Namespace]:
    """Two namespaces whose ids start with the same 4 digits."""
    seen: dict[bytes, Namespace] = {}
    for number in range(5000):
        each = sample_namespace(f"twin {number}")
        twin = seen.setdefault(each.id[:2], each)
        if twin is not each:
            return [twin, each]
    raise AssertionError("no twins in 5000")


@dataclass(frozen=True)
class Filled:
    at: tuple[str, str]
    ids: list[NamespaceId]
    keys: list[list[BlockKey]]


@pytest.fixture
def filled() -> Iterator[Filled]:
    """A daemon with 4 blocks in each of two twins."""
    with Daemon() as daemon, Client(daemon.start().target) as client:
        ids, keys = [], []
        for number, each in enumerate(twins()):
            some = sample_keys(f"twin {number}", 4)
            ids.append(client.register(each))
            client.put(ids[-1], some, sample_records(some), durable=True)
            keys.append(some)
        yield Filled(("--target", daemon.target), ids, keys)
        daemon.stop()


def unique(filled: Filled) -> str:
    """Return the shortest start, of 4 digits or more, that only the first one has."""
    one, other = (each.hex() for each in filled.ids)
    return next(one[:end] for end in range(4, 64) if one[:end] != other[:end])


def test_the_start_of_an_id_will_do(filled: Filled) -> None:
    only = ("--namespace", unique(filled).upper())
    done = kvstore("scan", *filled.at, *only)
    assert {line.split()[1] for line in done.output.splitlines()} == {filled.ids[0].hex()}
    done = kvstore("delete", *filled.at, *only, filled.keys[0][0].hex())
    assert done.output == "deleted 1 of 1 blocks\n"
    done = kvstore("clear", *filled.at, *only)
    assert done.output == "deleted 3 blocks\n"
    assert len(kvstore("scan", *filled.at).output.splitlines()) == 4


@pytest.mark.parametrize(
    "command", [("scan",), ("clear",), ("delete", "00" * 32), ("get", "00" * 32)]
)
def test_a_start_that_several_have_is_refused_and_they_are_listed(
    filled: Filled, command: tuple[str, ...]
) -> None:
    done = kvstore(*command, "--namespace", filled.ids[0].hex()[:4], *filled.at)
    assert done.exit_code == 2
    assert "several namespaces fit" in done.output
    for each in filled.ids:
        assert each.hex()[:12] in done.output
    assert len(kvstore("scan", *filled.at).output.splitlines()) == 8


@pytest.mark.parametrize("start", ["abc", "xyzw", "0" * 65])
def test_what_is_no_start_of_an_id_is_refused(start: str) -> None:
    done = kvstore("clear", "--namespace", start, "--target", "127.0.0.1:1")
    assert done.exit_code == 2
    assert "hex digits" in done.output


def test_a_start_that_none_has_is_refused(filled: Filled) -> None:
    taken = {each.hex()[:4] for each in filled.ids}
    start = next(text for text in ("0000", "1111", "2222") if text not in taken)
    done = kvstore("clear", "--namespace", start, *filled.at)
    assert (done.exit_code, f"no namespace starts with {start}" in done.output) == (2, True)
    assert kvstore("clear", "--namespace", "0" * 64, *filled.at).output == "deleted 0 blocks\n"


def test_bytes_and_hits_are_shown_by_namespace_and_by_model() -> None:
    with Daemon() as daemon, Client(daemon.start().target) as client:
        at = ("--target", daemon.target)
        spec = replace(sample_namespace(), name="google/gemma-3-270m")
        keys = sample_keys("shown", 8)
        namespace_id = client.register(spec)
        client.put(namespace_id, keys[:6], sample_records(keys[:6]), durable=True)
        client.release(client.acquire(namespace_id, keys).lease_id)
        told = json.loads(kvstore("namespaces", "--json", *at).output)
        del told["spec"]
        assert told == {
            "namespace": namespace_id.hex(),
            "model": "google/gemma-3-270m",
            "blocks": 6,
            "dram_bytes": 6 * PADDED,
            "file_bytes": 6 * PADDED,
            "asked_blocks": 8,
            "hit_blocks": 6,
            "tier_hit_blocks": {"dram": 6},
            "differs": [],
        }
        text = kvstore("namespaces", *at).output
        assert "6 blocks  120 KiB dram, 120 KiB file, 75 % hits (75 % dram)  model" in text
        text = kvstore("status", *at).output
        assert "google/gemma-3-270m: 6 blocks in 1 namespaces, 120 KiB dram" in text
        daemon.stop()


def test_hits_are_told_by_tier_and_what_differs_is_named(daemon: Daemon) -> None:
    at = ("--target", daemon.target)
    one = sample_namespace("differing")
    other = replace(one, block_tokens=32)
    keys = sample_keys("differing", 3)
    with Client(daemon.target) as client:
        namespace_id = client.register(one)
        client.register(other)
        client.put(namespace_id, keys[:2], sample_records(keys[:2]))
        client.release(client.acquire(namespace_id, keys).lease_id)
    shown = [json.loads(line) for line in kvstore("namespaces", *at, "--json").output.splitlines()]
    told = {each["namespace"]: each for each in shown}
    assert told[one.id.hex()]["tier_hit_blocks"] == {"dram": 2}
    assert told[one.id.hex()]["differs"] == []
    assert told[other.id.hex()]["differs"] == ["block_tokens: 32 here, 16 there"]
    lines = kvstore("namespaces", *at).output.splitlines()
    own = next(line for line in lines if line.startswith(one.id.hex()))
    assert "67 % hits (67 % dram)" in own
    assert "  block_tokens: 32 here, 16 there" in lines
