"""Keys are the same everywhere and for ever; a running sequence hashes only what is new."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.block import Group, Namespace, NamespaceId
from kvstore.model.errors import InvalidRequest
from kvstore.model.keys import KeyChain, block_key, encode_extras, root_key
from kvstore.model.names import model_name

NAMESPACE = Namespace(
    block_tokens=4,
    groups=(Group("full", 4096), Group("sliding", 8192, window_tokens=512, shards=2)),
    identity=(("model", "tiny"), ("weights", "0" * 64)),
)

GOLDEN_NAMESPACE_ID = "a2d80795e8c049029f0f04d70ca2067717a120cbea6c652d8a7b96edc7186620"
GOLDEN_KEYS = [
    "d0a533b29715a7d4524b65d7dad4ed7adfebe36b745bd5caca905b34fabc898b",
    "06070a7671082f82250eda4688e67f5d131087573f3518ada4001380a730ebe3",
]


def test_the_golden_vectors_hold() -> None:
    root = root_key(NAMESPACE.id)
    chain = KeyChain(root, 4)
    keys = chain.update(list(range(11)))
    assert NAMESPACE.id.hex() == GOLDEN_NAMESPACE_ID
    assert [key.hex() for key in keys] == GOLDEN_KEYS
    assert root_key(NAMESPACE.id, b"alice") != root


def test_the_construction_is_what_the_docstring_says() -> None:
    root = hashlib.sha256(
        b"kvstore.root.v1" + struct.pack("<I", 1) + NAMESPACE.id + struct.pack("<I", 5) + b"alice"
    ).digest()
    assert root_key(NAMESPACE.id, b"alice") == root
    extras = encode_extras([("lora", b"x")])
    body = b"kvstore.block.v1" + root + struct.pack("<5I", 4, 7, 8, 9, 2**32 - 1) + extras
    assert block_key(root, [7, 8, 9, 2**32 - 1], extras) == hashlib.sha256(body).digest()  # type: ignore[arg-type]


def test_another_process_with_another_hash_seed_makes_the_same_keys() -> None:
    code = (
        "from kvstore.model.keys import *; from kvstore.model.block import NamespaceId;"
        "print(KeyChain(root_key(NamespaceId(bytes(32))), 2).update([1, 2, 3, 4])[-1].hex())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1234", "PYTHONPATH": ":".join(sys.path)},
    )
    here = KeyChain(root_key(NamespaceId(bytes(32))), 2).update([1, 2, 3, 4])[-1].hex()
    assert out.stdout.strip() == here


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40))
def test_growing_a_sequence_gives_the_keys_of_hashing_it_whole(tokens: list[int], cut: int) -> None:
    root = root_key(NAMESPACE.id)
    grown = KeyChain(root, 4)
    grown.update(tokens[:cut])
    assert grown.update(tokens) == KeyChain(root, 4).update(tokens)
    assert len(grown.keys) == len(tokens) // 4


def test_only_new_blocks_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    chain = KeyChain(root_key(NAMESPACE.id), 4)
    tokens = list(range(40))
    chain.update(tokens)
    chain.update([*tokens, 1, 2, 3, 4], lambda index: hashed.append(index) or b"")  # type: ignore[func-returns-value]
    assert hashed == [10]


@given(
    st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=4),
    st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=4),
)
def test_different_extras_never_encode_alike(
    one: list[tuple[str, bytes]], other: list[tuple[str, bytes]]
) -> None:
    assert (encode_extras(one) == encode_extras(other)) == (one == other)


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], [1.5]])
def test_a_token_that_is_no_u32_is_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        block_key(root_key(NAMESPACE.id), tokens)


def test_namespaces_that_differ_in_one_field_share_no_key() -> None:
    others = [
        Namespace(8, NAMESPACE.groups, NAMESPACE.identity),
        Namespace(4, NAMESPACE.groups[:1], NAMESPACE.identity),
        Namespace(4, (Group("full", 4096), Group("sliding", 8192, 511, 2)), NAMESPACE.identity),
        Namespace(4, NAMESPACE.groups, (("model", "tiny"), ("weights", "1" * 64))),
        Namespace(4, NAMESPACE.groups, NAMESPACE.identity, fidelity="fp8"),
    ]
    ids = {NAMESPACE.id, *(other.id for other in others)}
    assert len(ids) == 6
    assert len({block_key(root_key(i), [1, 2, 3, 4]) for i in ids}) == 6


def test_a_name_is_for_people_alone() -> None:
    named = replace(NAMESPACE, name="google/gemma-3-270m")
    assert (named, named.id) == (NAMESPACE, NAMESPACE.id)
    assert named.title == "google/gemma-3-270m"
    assert NAMESPACE.title == "tiny"
    digest = replace(NAMESPACE, identity=(("model", "ab" * 32),))
    assert digest.title == "ab" * 6
    assert (
        Namespace.from_json(NAMESPACE.to_json(), "bell\a\n" + "x" * 200).title == "bell" + "x" * 122
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("google/gemma-3-270m", "google/gemma-3-270m"),
        ("/models/Llama-3.1-8B/", "Llama-3.1-8B"),
        ("./tiny", "tiny"),
        ("/root/.cache/hub/models--google--gemma/snapshots/0a1b", "google/gemma"),
        ("", ""),
    ],
)
def test_a_model_is_called_by_what_it_was_loaded_from(source: str, name: str) -> None:
    assert model_name(source) == name


def test_a_namespace_survives_its_text() -> None:
    again = Namespace.from_json(NAMESPACE.to_json())
    assert again == NAMESPACE
    assert again.id == NAMESPACE.id


@given(
    st.text(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3)
        ),
    ).map(lambda value: __import__("json").dumps(value))
)
def test_any_other_text_is_a_typed_error(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Namespace.from_json(text)
