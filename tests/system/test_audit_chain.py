"""A line that was changed, cut out, added or moved is found, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.errors import ConfigError
from kvstore.system.audit_chain import (
    Chain,
    Head,
    audit_key,
    last_line,
    read_head,
    split_lines,
    verify,
    write_head,
)

KEY = b"k" * 32


def lines_of(count: int, chain: Chain | None = None) -> list[bytes]:
    chain = chain or Chain(KEY)
    return [
        chain.line({"method": "Clear", "n": number}, follows=not number).rstrip(b"\n")
        for number in range(count)
    ]


def test_a_log_as_it_was_written_is_whole() -> None:
    chain = Chain(KEY)
    lines = lines_of(20, chain)
    assert verify(lines, KEY, chain.head) == (20, (), chain.head)
    assert verify([], KEY).faults == ()


@given(st.data())
def test_any_change_of_any_byte_is_found(data: st.DataObject) -> None:
    lines = lines_of(6)
    at = data.draw(st.integers(0, 5))
    place = data.draw(st.integers(0, len(lines[at]) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda new: new != lines[at][place]))
    lines[at] = lines[at][:place] + bytes([byte]) + lines[at][place + 1 :]
    assert verify(lines, KEY).faults


@pytest.mark.parametrize("change", [bytes.upper, lambda mac: mac[:10] + b" \v\t" + mac[10:]])
def test_a_mac_that_is_spelled_otherwise_is_found(change: Callable[[bytes], bytes]) -> None:
    lines = lines_of(3)
    body, mac = lines[1][:-66], lines[1][-66:]
    lines[1] = body + change(mac)
    assert verify(lines, KEY).faults


@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_a_line_that_was_cut_out_is_missed(at: int) -> None:
    chain = Chain(KEY)
    lines = lines_of(6, chain)
    del lines[at]
    faults = verify(lines, KEY, chain.head).faults
    assert len(faults) == 1
    assert "missing" in faults[0].what


def test_lines_that_changed_places_or_came_twice_are_found() -> None:
    lines = lines_of(6)
    assert verify([lines[0], lines[2], lines[1], *lines[3:]], KEY).faults
    assert verify([*lines[:3], lines[2], *lines[3:]], KEY).faults


def test_lines_by_another_key_are_found() -> None:
    assert verify(lines_of(3, Chain(b"x" * 32)), KEY).faults


def test_the_chain_goes_on_over_starts_and_files() -> None:
    chain = Chain(KEY)
    first, second = lines_of(3, chain), lines_of(3, chain)
    assert not verify([*first, *second], KEY).faults
    assert not verify(second, KEY).faults, "older files need not be there"
    assert verify([*first[:-1], *second], KEY).faults == ((3, "lines before it are missing"),)


def test_what_a_crash_cut_off_is_one_fault() -> None:
    chain = Chain(KEY)
    first, second = lines_of(3, chain), lines_of(2, chain)
    found = verify([*first, first[0][:20], *second], KEY)
    assert [fault.line for fault in found.faults] == [4]


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_are_told_to_be_no_lines(lines: list[bytes]) -> None:
    assert len(verify(lines, KEY).faults) == len(lines)


def test_the_last_line_and_the_head_are_found_again(tmp_path: Path) -> None:
    chain = Chain(KEY)
    log, head = tmp_path / "log", tmp_path / "head"
    assert (last_line(log), read_head(head)) == (None, None)
    log.write_bytes(b"\n".join(lines_of(5, chain)) + b"\n" + b"half")
    write_head(head, chain.head)
    assert last_line(log) == read_head(head) == chain.head
    assert isinstance(chain.head, Head)


def test_a_key_is_made_once_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read"):
        audit_key(path)
    made = audit_key(path, make=True)
    assert audit_key(path, make=True) == made
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        audit_key(path)
    path.chmod(0o600)
    path.write_text("no key")
    with pytest.raises(ConfigError, match="not a key"):
        audit_key(path)


def test_lines_are_split_wherever_a_chunk_ends() -> None:
    lines = lines_of(4)
    data = b"\n".join(lines) + b"\n"
    for size in (1, 7, 1000):
        chunks = [data[at : at + size] for at in range(0, len(data), size)]
        assert [*split_lines(chunks)] == lines
