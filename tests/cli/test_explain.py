"""`kvstore explain`, `namespaces` and `get`: what a user sees of single blocks and requests."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore import Client, KeyChain, checksum, root_key
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.outcome import Ending, Reason, is_request
from kvstore.model.words import ending_lines
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_namespace, sample_record, sample_records
from tests.cli.run import kvstore

TOKENS = list(range(1000, 1400))
BLOCK_TOKENS = 16


@dataclass
class Stored:
    """A daemon of its own, with the first 20 of TOKENS' 24 loadable blocks but the eighth."""

    daemon: Daemon
    namespace_id: NamespaceId
    keys: list[BlockKey]

    @property
    def at(self) -> tuple[str, str]:
        return "--target", self.daemon.target


@pytest.fixture(scope="module")
def stored() -> Iterator[Stored]:
    with Daemon() as daemon:
        daemon.start()
        with Client(daemon.target, name="engine") as client:
            namespace_id = client.register(sample_namespace("explained"))
            keys = KeyChain(root_key(namespace_id), BLOCK_TOKENS).update(TOKENS)
            client.put(namespace_id, keys[:20], sample_records(keys[:20]), durable=True)
            client.admin.delete(namespace_id, keys[8:9])
            for name in ("cmpl-one", "cmpl-two-0123"):
                grant = client.acquire(namespace_id, keys, request_id=name)
                client.release(grant.lease_id)
            yield Stored(daemon, namespace_id, keys)


def prompt_file(path: Path, tokens: object = TOKENS) -> str:
    file = path / "prompt.json"
    file.write_text(json.dumps(tokens))
    return str(file)


def test_a_request_is_explained_by_the_start_of_its_id(stored: Stored) -> None:
    done = kvstore("explain", "cmpl-two", *stored.at)
    assert done.exit_code == 0
    for word in ("cmpl-two-0123", "from engine", "hit 8 of 25 blocks", "128 tokens"):
        assert word in done.output
    assert "ended at block 8: deleted" in done.output
    assert "cmpl-one" not in done.output


def test_the_last_requests_come_newest_first_and_as_json(stored: Stored) -> None:
    done = kvstore("explain", "--last", *stored.at)
    assert done.output.index("cmpl-two") < done.output.index("cmpl-one")
    done = kvstore("explain", "--last", "1", "--json", *stored.at)
    told = json.loads(done.output)
    assert (told["request_id"], told["hit_blocks"]) == ("cmpl-two-0123", 8)
    assert (told["ending"]["reason"], told["ending"]["block"]) == ("deleted", 8)
    assert (told["namespace_id"], told["block_tokens"]) == (stored.namespace_id.hex(), 16)


def test_what_a_client_names_is_no_line_of_its_own(stored: Stored) -> None:
    with Client(stored.daemon.target, name="en\ngine\x1b[2J") as client:
        client.register(sample_namespace("explained"))
        grant = client.acquire(stored.namespace_id, stored.keys, request_id="forged\n  hit 9 of 9")
        client.release(grant.lease_id)
    shown = kvstore("explain", "--last", "1", *stored.at).output.splitlines()[0]
    assert shown.startswith("request forged?  hit 9 of 9, ")
    assert shown.endswith("from en?gine?[2J")


def test_a_request_that_nobody_remembers_is_an_error(stored: Stored) -> None:
    done = kvstore("explain", "cmpl-three", *stored.at)
    assert done.exit_code == 1
    assert "limits.outcomes_max" in done.output


def test_the_very_request_comes_first_and_the_others_are_counted(stored: Stored) -> None:
    with Client(stored.daemon.target, name="engine") as client:
        client.register(sample_namespace("explained"))
        for number in (3, *range(30, 42)):
            id_ = f"chatcmpl-{number}-0-{number:08x}"
            grant = client.acquire(stored.namespace_id, stored.keys, request_id=id_)
            client.release(grant.lease_id)
    done = kvstore("explain", "chatcmpl-3", *stored.at)
    assert re.findall(r"^request (\S+),", done.output, re.M) == ["chatcmpl-3-0-00000003"]
    assert "(10 other remembered ids begin with chatcmpl-3)" in done.output
    told = json.loads(kvstore("explain", "chatcmpl-3", "--json", *stored.at).output)
    assert told["request_id"] == "chatcmpl-3-0-00000003"
    done = kvstore("explain", "chatcmpl", *stored.at)
    assert len(re.findall(r"^request ", done.output, re.M)) == 10
    assert "(3 other remembered ids begin with chatcmpl)" in done.output
    done = kvstore("explain", "chatcmpl-40", *stored.at)
    assert done.output.startswith("request chatcmpl-40-0-")
    assert "other" not in done.output


@pytest.mark.parametrize(
    ("known", "is_it"),
    [
        ("chatcmpl-3", True),
        ("chatcmpl-3-0", True),
        ("chatcmpl-3-9f8e7d6c", True),
        ("chatcmpl-3-0-9f8e7d6c", True),
        ("chatcmpl-39", False),
        ("chatcmpl-3-9f8e", False),
        ("chatcmpl-3-9f8e7d6c-0-1", False),
    ],
)
def test_an_id_to_which_the_engine_appended_is_the_same_request(known: str, is_it: bool) -> None:
    assert is_request("chatcmpl-3", known) is is_it


def test_a_daemon_that_nobody_asked_says_so() -> None:
    with Daemon(file=False) as daemon:
        at = ("--target", daemon.start().target)
        done = kvstore("explain", "--last", *at)
        assert (done.exit_code, done.output) == (
            0,
            "no request asked the daemon since it started\n",
        )
        assert kvstore("explain", "--last", "--json", *at).output == ""


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words(reason: Reason) -> None:
    assert "block 3: " in ending_lines(Ending(reason, 3))[0]


@pytest.mark.parametrize("arguments", [(), ("a", "--last", "3"), ("--last", "--prompt", "-")])
def test_one_thing_is_explained_at_a_time(arguments: tuple[str, ...]) -> None:
    assert kvstore("explain", *arguments, "--target", "127.0.0.1:1").exit_code == 2


def test_a_prompt_of_token_ids_is_explained_range_by_range(stored: Stored, tmp_path: Path) -> None:
    short = stored.namespace_id.hex()[:6]
    done = kvstore("explain", "--prompt", prompt_file(tmp_path), "--namespace", short, *stored.at)
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert lines[0].startswith("400 tokens, of which 24 blocks of 16 can be a hit")
    assert lines[1] == "blocks 0-7 in dram and file"
    assert lines[2].startswith("blocks 8 deleted")
    assert lines[3] == "blocks 9-19 in dram and file"
    assert lines[4].startswith("blocks 20-23 never stored")
    assert lines[5].startswith("hit: 8 blocks, 128 tokens (33 %)")
    assert lines[6].startswith("ends at block 8: deleted")


def test_a_prompt_longer_than_a_call_is_explained_as_far_as_an_engine_asks() -> None:
    with Daemon("limits.batch_keys_max=4", file=False) as daemon:
        with Client(daemon.start().target) as client:
            namespace_id = client.register(sample_namespace("explained"))
            keys = KeyChain(root_key(namespace_id), BLOCK_TOKENS).update(TOKENS)
            client.put(namespace_id, keys[:8], sample_records(keys[:8]))
        ask = ("explain", "--prompt", "-", "--target", daemon.target)
        done = kvstore(*ask, stdin=json.dumps(TOKENS))
        assert "of which 4 blocks of 16 can be a hit" in done.output
        assert "(of 24: limits.batch_keys_max)" in done.output
        assert "hit: 4 blocks" in done.output
        done = kvstore(*ask, stdin=json.dumps(TOKENS[: 4 * BLOCK_TOKENS + 1]))
        assert "of which 4 blocks of 16 can be a hit" in done.output
        assert "batch_keys_max" not in done.output
        daemon.stop()


def test_the_same_as_json_from_stdin_and_with_a_salt(stored: Stored) -> None:
    ask = ("explain", "--prompt", "-", "--json", *stored.at)
    told = json.loads(kvstore(*ask, stdin=json.dumps(TOKENS)).output)
    assert (told["hit_blocks"], told["ending"]["reason"]) == (8, "deleted")
    assert [each["begin"] for each in told["ranges"]] == [0, 8, 9, 20]
    told = json.loads(kvstore(*ask, "--salt", "user-1", stdin=json.dumps(TOKENS)).output)
    assert (told["hit_blocks"], told["ending"]["reason"]) == (0, "never_stored")


def test_a_text_is_tokenized_as_the_engine_does(stored: Stored, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{token}": token for token in TOKENS} | {"[UNK]": 0}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = " ".join(f"w{token}" for token in TOKENS)
    ask = ("explain", "--prompt", "-", "--json", "--tokenizer", str(tmp_path), *stored.at)
    told = json.loads(kvstore(*ask, stdin=text).output)
    assert (told["tokens"], told["hit_blocks"]) == (400, 8)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "not a tokenizer" in kvstore(*ask, stdin=text).output


@pytest.mark.parametrize(
    ("content", "word"),
    [("a text", "--tokenizer"), ('{"tokens": [1]}', "list of token ids"), ("[1, true]", "list")],
)
def test_a_file_that_holds_no_prompt_is_refused(stored: Stored, content: str, word: str) -> None:
    done = kvstore("explain", "--prompt", "-", *stored.at, stdin=content)
    assert done.exit_code == 1
    assert word in done.output


def test_what_is_no_text_is_refused(stored: Stored, tmp_path: Path) -> None:
    binary = tmp_path / "prompt.bin"
    binary.write_bytes(b"\x93NUMPY\xff")
    done = kvstore("explain", "--prompt", str(binary), *stored.at)
    assert (done.exit_code, f"{binary} is no text in UTF-8" in done.stderr) == (1, True)
    for arguments in (["explain", "\udcff"], ["hint", "end", "\udcff"]):
        done = kvstore(*arguments, *stored.at)
        assert (done.exit_code, "is no text in UTF-8" in done.stderr) == (2, True)


def test_a_token_id_that_is_none_is_refused(stored: Stored) -> None:
    done = kvstore("explain", "--prompt", "-", *stored.at, stdin=json.dumps([-1] * 40))
    assert done.exit_code == 1
    assert "token id" in done.output


def test_a_prompt_shorter_than_a_block_cannot_hit(stored: Stored) -> None:
    done = kvstore("explain", "--prompt", "-", *stored.at, stdin="[1, 2, 3]")
    assert done.exit_code == 0
    assert "0 blocks of 16 can be a hit" in done.output


def test_namespaces_are_listed_and_found_by_their_start(stored: Stored) -> None:
    done = kvstore("namespaces", *stored.at)
    assert done.output.startswith(stored.namespace_id.hex())
    assert "19 blocks " in done.output
    assert "model explained" in done.output
    assert "16 tokens a block, 1 group" in done.output
    told = json.loads(kvstore("namespaces", "--json", *stored.at).output)
    assert (told["blocks"], told["spec"]["identity"]) == (19, {"model": "explained"})
    done = kvstore("explain", "--prompt", "-", "--namespace", "0000", *stored.at, stdin="[1]")
    assert done.exit_code == 2
    assert stored.namespace_id.hex()[:12] in done.output


def test_a_namespace_that_is_not_clear_is_asked_for() -> None:
    with Daemon() as daemon:
        at = ("--target", daemon.start().target)
        done = kvstore("get", "00" * 32, *at)
        assert done.exit_code == 1
        assert "no namespace yet" in done.output
        with Client(daemon.target) as client:
            for number, model in enumerate(("one", "two")):
                namespace_id = client.register(sample_namespace(model))
                client.put(
                    namespace_id, [key := BlockKey(bytes([number] * 32))], [sample_record(key)]
                )
            done = kvstore("get", "00" * 32, *at)
            assert done.exit_code == 2
            assert "say --namespace" in done.output
            client.admin.clear(namespace_id)
        assert kvstore("get", "00" * 32, "--json", *at).exit_code == 0, "the only one with blocks"
        daemon.stop()
        daemon.start()
        assert kvstore("get", "00" * 32, "--json", *at).exit_code == 0, "it is known from disk"
        daemon.stop()
        for file in (daemon.directory / "file").glob("*.namespace"):
            file.unlink()
        daemon.start()
        done = kvstore("get", "00" * 32, *at)
        assert done.exit_code == 1
        assert "not known (any more)" in done.output


def test_get_writes_the_verified_bytes_of_a_part(stored: Stored, tmp_path: Path) -> None:
    key = stored.keys[3]
    done = kvstore("get", key.hex(), *stored.at)
    assert (done.exit_code, done.stdout_bytes) == (0, sample_record(key))
    file = tmp_path / "block.bin"
    done = kvstore("get", key.hex(), "-o", str(file), *stored.at)
    assert (done.exit_code, file.read_bytes()) == (0, sample_record(key))
    told = json.loads(kvstore("get", key.hex(), "--json", *stored.at).output)
    assert (told["nbytes"], told["xxh3"]) == (20_000, f"{checksum(sample_record(key)):016x}")


def test_get_says_why_a_block_is_not_there(stored: Stored) -> None:
    done = kvstore("get", stored.keys[8].hex(), *stored.at)
    assert done.exit_code == 1
    assert "is not stored: deleted" in done.output
    done = kvstore("get", "12" * 32, *stored.at)
    assert "never stored" in done.output
    done = kvstore("get", stored.keys[3].hex(), "--group", "7", *stored.at)
    assert done.exit_code == 1
    assert "group 7 of 1" in done.output
