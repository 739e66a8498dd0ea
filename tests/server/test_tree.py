"""What is stored, as a tree, from a daemon that works; and the conversations it knows."""

import json
from collections.abc import Iterator

import pytest

from kvstore import Client
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import InvalidRequest
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.cli.run import kvstore

SYSTEM = sample_keys("system prompt", 4)
CHATS = [sample_keys(f"chat {number}", 3 + number) for number in range(3)]
SPACE = sample_namespace("a-tree")


@pytest.fixture(scope="module")
def grown() -> Iterator[Daemon]:
    """Three conversations behind one system prompt, and something of another namespace."""
    with Daemon() as daemon, Client(daemon.start().target, name="engine") as client:
        namespace_id = client.register(SPACE)
        put(client, namespace_id, SYSTEM, 0, None)
        for number, chat in enumerate(CHATS):
            put(client, namespace_id, chat, len(SYSTEM), SYSTEM[-1])
            for _ in range(number):
                ask(client, namespace_id, [*SYSTEM, *chat], f"chat-{number}")
        other = sample_keys("other", 2)
        put(client, client.register(sample_namespace("other")), other, 0, None)
        assert client.admin.flush()
        until(lambda: all_written(client.admin.tree()))
        yield daemon


def all_written(reply: pb.TreeReply) -> bool:
    return reply.blocks == 18 and all(
        run.all_dram_bytes == run.all_file_bytes for run in reply.runs
    )


def put(
    client: Client,
    namespace_id: NamespaceId,
    keys: list[BlockKey],
    first_block: int,
    parent: BlockKey | None,
) -> None:
    client.put(namespace_id, keys, sample_records(keys), first_block=first_block, parent=parent)


def ask(client: Client, namespace_id: NamespaceId, keys: list[BlockKey], session: str) -> None:
    grant = client.acquire(namespace_id, keys, request_id=f"r-{session}", session_id=session)
    assert grant.hit_blocks == len(keys)
    client.release(grant.lease_id)


@pytest.fixture
def client(grown: Daemon) -> Iterator[Client]:
    with Client(grown.target) as client:
        yield client


def ranges(reply: pb.TreeReply) -> list[tuple[int, int, int]]:
    return [(run.parent, run.begin, run.end) for run in reply.runs]


def test_prefixes_are_runs_with_what_is_behind_them(client: Client) -> None:
    reply = client.admin.tree(SPACE.id, depth=2)
    assert ranges(reply) == [(0, 0, 4), (1, 4, 9), (1, 4, 8), (1, 4, 7)]
    system, *chats = reply.runs
    assert system.first_key == SYSTEM[0]
    assert system.last_key == SYSTEM[-1]
    assert (system.children, system.blocks, system.hits) == (3, 16, 3)
    assert [run.hits for run in chats] == [2, 1, 0]
    assert all(run.HasField("used_age_s") and run.used_age_s < 60 for run in reply.runs)
    assert system.all_dram_bytes == system.dram_bytes + sum(run.dram_bytes for run in chats)
    assert list(reply.namespaces) == [SPACE.id]
    assert not reply.left_out_blocks
    both = client.admin.tree()
    assert [run.blocks for run in both.runs] == [16, 2]
    assert list(both.namespaces) == [SPACE.id, sample_namespace("other").id]


def test_an_answer_is_bounded_and_says_where_to_go_on(client: Client) -> None:
    below = client.admin.tree(SPACE.id, SYSTEM[-1], limit=2)
    assert ranges(below) == [(0, 4, 9), (0, 4, 8)]
    rest = client.admin.tree(SPACE.id, SYSTEM[-1], limit=2, cursor=below.next)
    assert ranges(rest) == [(0, 4, 7)]
    assert rest.next == b""
    assert ranges(client.admin.tree(SPACE.id, depth=8, limit=2)) == [(0, 0, 4), (1, 4, 9)]
    for bad in ({"depth": 9}, {"limit": 1001}, {"prefix": b"short"}):
        with pytest.raises(InvalidRequest):
            client.admin.tree(SPACE.id, **bad)  # type: ignore[arg-type]
    assert not client.admin.tree(SPACE.id, sample_keys("nobody's", 1)[0]).runs
    assert not client.admin.tree(sample_namespace("unknown").id).runs


def test_a_request_and_a_conversation_lead_to_their_place(client: Client, grown: Daemon) -> None:
    (outcome,) = client.admin.outcomes("r-chat-1")
    assert outcome.session_id == "chat-1"
    assert outcome.last_key == CHATS[1][-1]
    path = client.admin.tree(through=outcome.last_key)
    assert ranges(path) == [(0, 0, 4), (1, 4, 8)]
    for option, name in (
        ("--request", "r-chat-1"),
        ("--conversation", "chat-1"),
        ("--session", "chat-1"),
    ):
        shown = kvstore("tree", option, name, "--json", "--target", grown.target)
        runs = [json.loads(line) for line in shown.output.splitlines()]
        assert [run["begin"] for run in runs] == [0, 4]
        assert runs[1]["last_key"] == CHATS[1][-1].hex()
    assert kvstore("tree", "--request", "none", "--target", grown.target).exit_code == 1


def test_a_path_whose_end_is_missing_is_not_said_to_be_nothing(grown: Daemon) -> None:
    missing = sample_keys("nobody's", 1)[0].hex()
    shown = kvstore("tree", "--through", missing, "--target", grown.target)
    assert shown.output == (
        "its last block is not stored; blocks before that may be: see `kvstore explain`\n"
    )
    shown = kvstore("tree", "--prefix", missing, "--target", grown.target)
    assert shown.output == "nothing is stored there\n"


def test_people_see_it_indented(grown: Daemon) -> None:
    shown = kvstore("tree", "--target", grown.target)
    lines = shown.output.splitlines()
    assert lines[0].startswith(f"blocks 0-3 of {SPACE.id.hex()[:12]}: 16 blocks")
    assert lines[1].startswith("  blocks 4-8: 5 blocks")
    assert "2 hits" in lines[1]
    assert lines[4].startswith("blocks 0-1 of ")


def test_conversations_are_listed_with_their_countdown(client: Client) -> None:
    client.hints.expect("chat-1", 30.0)
    client.hints.pin("chat-2", 60.0)
    known = {item.session_id: item for item in client.admin.conversations().items}
    assert set(known) == {"chat-1", "chat-2"}
    assert 25 < known["chat-1"].expected_in_s <= 30
    assert not known["chat-1"].pinned_s
    assert 55 < known["chat-2"].pinned_s <= 60
    assert known["chat-2"].blocks == len(SYSTEM) + len(CHATS[2])
    assert known["chat-2"].last_key == CHATS[2][-1]
    client.hints.end_session("chat-1")
    (ended,) = client.admin.conversations("chat-1").items
    assert ended.ended
    assert not ended.expected_in_s
    assert not client.admin.conversations("nobody").items
    assert client.admin.conversations("nobody").known == 2


def test_status_shows_them(client: Client, grown: Daemon) -> None:
    client.hints.expect("chat-1", 30.0)
    shown = kvstore("status", "--target", grown.target)
    assert "conversations known" in shown.output
    assert "chat-1: 8 blocks, expected in " in shown.output
    told = json.loads(kvstore("status", "--json", "--target", grown.target).output)
    assert told["known_conversations"] >= 2
    assert "chat-1" in {each["session_id"] for each in told["conversations"]}
