from __future__ import annotations

import base64
import pickle
import secrets
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.format.frame import NONCE_NBYTES, TAG_NBYTES, WrappedKey
from kvstore.model.errors import ConfigError
from kvstore.sealing import CommandRoot, Erasure, FileRoot, Keyring, Secret, parse_root_key
from kvstore.sealing.aead import SMALL_NBYTES

KEY = bytes(range(32))
TENANT, OTHER = b"t" * 16, b"o" * 16
# A key service in a few lines: XOR with a pad in a file of each tenant, which `forget` removes.
SERVICE = """
import os, sys
folder, data = sys.argv[1], sys.stdin.buffer.read()
pad = os.path.join(folder, os.environ["KVSTORE_KEY_TENANT"])
what = os.environ["KVSTORE_KEY_OPERATION"]
if what == "forget":
    os.unlink(pad)
    sys.exit()
if what == "wrap" and not os.path.exists(pad):
    open(pad, "wb").write(os.urandom(32))
key = bytes(a ^ b for a, b in zip(data, open(pad, "rb").read(), strict=True))
sys.stdout.buffer.write(key if what == "wrap" else key.hex().encode())
"""


def service(tmp_path: Path) -> CommandRoot:
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    return CommandRoot([sys.executable, str(script), str(tmp_path)])


def key_file(tmp_path: Path, data: bytes, mode: int = 0o400) -> Path:
    path = tmp_path / "root.key"
    path.write_bytes(data)
    path.chmod(mode)
    return path


def sealed_by(ring: Keyring) -> tuple[WrappedKey, bytes, bytes]:
    key = ring.new_key()
    target = memoryview(bytearray(5 + 16))
    seal = key.seal(b"hello", b"aad", target)
    return key.wrapped, bytes(target), seal[:NONCE_NBYTES]


def opens(ring: Keyring, sealed: tuple[WrappedKey, bytes, bytes]) -> bool:
    wrapped, data, nonce = sealed
    key, target = ring.open(wrapped), memoryview(bytearray(5))
    return key is not None and key.open(data, nonce, b"aad", target) and target == b"hello"


@pytest.mark.parametrize(
    "text",
    [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", base64.b64encode(KEY) + b"\n"],
)
def test_a_root_key_is_bytes_hex_or_base64(tmp_path: Path, text: bytes) -> None:
    assert parse_root_key(text) == KEY
    FileRoot.read(key_file(tmp_path, text))


@pytest.mark.parametrize("text", [b"", b"short", b"\0" * 32, b"00" * 32, KEY * 2, b"z" * 64])
def test_what_is_no_key_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ConfigError, match="kvstore key create"):
        FileRoot.read(key_file(tmp_path, text))


@given(st.binary(max_size=100))
def test_any_bytes_are_a_key_or_none(data: bytes) -> None:
    key = parse_root_key(data)
    assert key is None or len(key) == 32


@pytest.mark.parametrize("mode", [0o440, 0o404, 0o600 | stat.S_IWGRP, 0o644])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 0400"):
        FileRoot.read(key_file(tmp_path, KEY, mode))


def test_a_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvstore key create .*root\.key"):
        FileRoot.read(tmp_path / "root.key")
    with pytest.raises(ConfigError):
        FileRoot.read(tmp_path)


def test_keys_are_stored_and_opened_again() -> None:
    root = FileRoot(KEY)
    ring = Keyring.create(root, TENANT)
    again = Keyring.load(root, TENANT, ring.encode(), "here")
    assert opens(again, sealed_by(ring))
    assert again.epochs == [1]
    assert again.name(b"x", b"y") == ring.name(b"x", b"y") != ring.name(b"x", b"z")


def test_no_key_is_in_what_is_stored() -> None:
    ring = Keyring.create(FileRoot(KEY), TENANT)
    stored = ring.encode()
    for each in (KEY, *(key.key.reveal() for key in ring.keys.values())):
        for form in (each, each.hex().encode(), base64.b64encode(each)):
            assert form not in stored


def test_another_root_tenant_or_file_is_said() -> None:
    stored = Keyring.create(FileRoot(KEY), TENANT).encode()
    with pytest.raises(ConfigError, match="does not open it"):
        Keyring.load(FileRoot(secrets.token_bytes(32)), TENANT, stored, "here")
    with pytest.raises(ConfigError, match="another tenant"):
        Keyring.load(FileRoot(KEY), OTHER, stored, "here")
    forged = stored.replace(base64.b64encode(TENANT), base64.b64encode(OTHER))
    with pytest.raises(ConfigError, match="does not open it"):
        Keyring.load(FileRoot(KEY), OTHER, forged, "here")
    with pytest.raises(ConfigError, match="wrapped by a file"):
        Keyring.load(CommandRoot(["false"]), TENANT, stored, "here")


@given(st.binary(max_size=300))
def test_any_bytes_are_keys_or_a_config_error(data: bytes) -> None:
    with pytest.raises(ConfigError, match="no keys"):
        Keyring.load(FileRoot(KEY), TENANT, data, "here")


def test_a_new_epoch_is_for_new_segments_and_the_old_one_still_opens() -> None:
    root = FileRoot(KEY)
    old = Keyring.create(root, TENANT)
    before = sealed_by(old)
    ring = old.rotated(root)
    assert (before[0].epoch, sealed_by(ring)[0].epoch) == (1, 2)
    again = Keyring.load(root, TENANT, ring.encode(), "here")
    assert opens(again, before)
    gone = again.without({1})
    assert gone.epochs == [2]
    assert not opens(gone, before)
    assert gone.name(b"x", b"y") == old.name(b"x", b"y")


def test_a_new_root_rewraps_the_keys_and_nothing_else() -> None:
    ring = Keyring.create(FileRoot(KEY), TENANT)
    new = FileRoot(secrets.token_bytes(32))
    stored = ring.rewrapped(new).encode()
    assert opens(Keyring.load(new, TENANT, stored, "here"), sealed_by(ring))
    with pytest.raises(ConfigError):
        Keyring.load(FileRoot(KEY), TENANT, stored, "here")


def test_a_key_of_another_tenant_or_epoch_does_not_open() -> None:
    root = FileRoot(KEY)
    ring, other = Keyring.create(root, TENANT), Keyring.create(root, OTHER)
    wrapped, data, nonce = sealed_by(ring)
    assert not opens(other, (wrapped, data, nonce))
    assert not opens(other, (wrapped._replace(tenant=OTHER), data, nonce))
    assert not opens(ring.rotated(root), (wrapped._replace(epoch=2), data, nonce))
    assert not opens(ring, (wrapped._replace(epoch=0), data, nonce))
    assert not opens(ring, (wrapped._replace(wrapped=bytes(40)), data, nonce))


def test_a_wrong_tag_leaves_nothing_of_what_was_decrypted() -> None:
    key = Keyring.create(FileRoot(KEY), TENANT).new_key()
    data = secrets.token_bytes(1 << 20)
    sealed = memoryview(bytearray(len(data) + 16))
    seal = key.seal(data, b"", sealed)
    sealed[1 << 19] ^= 1
    target = memoryview(bytearray(len(data)))
    assert not key.open(sealed, seal[:NONCE_NBYTES], b"", target)
    assert not any(target)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, SMALL_NBYTES, SMALL_NBYTES + 1, 1 << 20])
def test_what_was_sealed_opens_where_it_lies(nbytes: int) -> None:
    key, plain = Keyring.create(FileRoot(KEY), TENANT).new_key(), secrets.token_bytes(nbytes)
    stored = memoryview(bytearray(nbytes + TAG_NBYTES))
    seal = key.seal(plain, b"aad", stored)
    assert not nbytes or stored[:nbytes] != plain
    data = stored[:nbytes]
    assert key.open_in_place(data, seal, b"aad")
    assert data == plain


@pytest.mark.parametrize("nbytes", [64, SMALL_NBYTES + 1])
@pytest.mark.parametrize("wrong", ["data", "nonce", "tag", "aad"])
def test_what_does_not_open_where_it_lies_becomes_zeros(wrong: str, nbytes: int) -> None:
    key = Keyring.create(FileRoot(KEY), TENANT).new_key()
    stored = memoryview(bytearray(nbytes + TAG_NBYTES))
    seal, aad = bytearray(key.seal(b"x" * nbytes, b"aad", stored)), bytearray(b"aad")
    part, at = {"data": (stored, 7), "nonce": (seal, 0), "tag": (seal, -1), "aad": (aad, 0)}[wrong]
    part[at] ^= 1
    assert not key.open_in_place(stored[:nbytes], bytes(seal), bytes(aad))
    assert stored[:nbytes] == bytes(nbytes)


def test_a_command_wraps_and_unwraps_a_secret_of_each_tenant(tmp_path: Path) -> None:
    root = service(tmp_path)
    ring, other = Keyring.create(root, TENANT), Keyring.create(root, OTHER)
    again = Keyring.load(service(tmp_path), TENANT, ring.encode(), "here")
    assert opens(again, sealed_by(ring))
    assert again.rotated(root).epochs == [1, 2]
    assert root.forget(TENANT, ring.root) is Erasure.FORGOTTEN
    with pytest.raises(ConfigError, match="exit code 1"):
        Keyring.load(service(tmp_path), TENANT, ring.encode(), "here")
    assert opens(Keyring.load(service(tmp_path), OTHER, other.encode(), "here"), sealed_by(other))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import time; time.sleep(60)", "no answer in 0.5 s"),
        ("print(end='')", "no wrapped key"),
        ("import sys; sys.stdout.write(sys.stdin.read(0) + 'x' * 40)", "no key of 32 bytes"),
        ("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", "no wrapped key"),
        ("print('ab' * 32)", "its answer is no key"),
        ("print('0123456789abcdef' * 4)", "not the key that was wrapped"),
    ],
)
def test_a_command_that_fails_is_said(code: str, said: str) -> None:
    root = CommandRoot([sys.executable, "-c", code], timeout_s=0.5 if "sleep" in code else 10)
    with pytest.raises(ConfigError, match=said):
        root.create(TENANT)


def test_a_command_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        CommandRoot(["/nowhere/kms"]).create(TENANT)


def test_a_root_file_erases_only_as_far_as_its_backups(tmp_path: Path) -> None:
    root = FileRoot(KEY)
    assert root.forget(TENANT, b"") is Erasure.BACKUPS
    assert CommandRoot(["false"]).forget(TENANT, b"stored") is Erasure.BACKUPS


def test_a_secret_is_neither_printed_nor_pickled() -> None:
    secret = Secret(KEY)
    ring = Keyring.create(FileRoot(KEY), TENANT)
    for each in (secret, ring.keys[1], ring.new_key()):
        assert KEY.hex() not in repr(each)
        assert "Secret" in repr(each) or "AeadKey" in repr(each)
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_white_space_inside_a_key_makes_it_none() -> None:
    """As hex it would be a shorter key."""
    text = KEY.hex().encode()
    assert parse_root_key(text[:6] + b"\n" + text[7:]) is None
    assert parse_root_key(text[:6] + b"  " + text[8:]) is None
