"""The log as text and as JSON, its last lines, and what is taken out of it for strangers."""

import json
import logging
import sys

import pytest

from kvstore.system.logs import LINE_CHARS_MAX, LINES_MAX, JsonFormatter, LastLines, fields_of
from kvstore.system.redaction import redacted, without_credentials


def record(message: str, *values: object, **more: object) -> logging.LogRecord:
    return logging.LogRecord("kvstore.daemon", logging.WARNING, "f", 1, message, values, **more)  # type: ignore[arg-type]


def told(message: str, *values: object) -> dict[str, object]:
    line = JsonFormatter().format(record(message, *values, exc_info=None))
    assert "\n" not in line
    found: dict[str, object] = json.loads(line)
    return found


def test_a_line_has_its_pairs_as_fields() -> None:
    line = told("node=serving port=%d start_s=%.3f reason=%r", 7, 0.25, 'it\'s "new"\nline')
    assert line["message"].startswith("node=serving port=7")  # type: ignore[attr-defined]
    assert (line["level"], line["logger"]) == ("warning", "kvstore.daemon")
    assert (line["node"], line["port"], line["start_s"]) == ("serving", 7, 0.25)
    assert line["reason"] == 'it\'s "new"\nline'
    assert str(line["time"]).endswith("Z")


def test_no_pair_takes_the_place_of_what_every_line_has() -> None:
    line = told("time=1 level=2 logger=3 message=4")
    assert (line["level"], line["logger"]) == ("warning", "kvstore.daemon")
    assert line["message"] == "time=1 level=2 logger=3 message=4"


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("plain words", {}),
        ("a=1 b=-2.5 c=x=y", {"a": 1, "b": -2.5, "c": "x=y"}),
        ("a='it\\'s' b=\"q\" d='", {"a": "it's", "b": "q", "d": "'"}),
        ("a= b=1e5 c=9999999999999999999999", {"a": "", "b": "1e5", "c": "9" * 22}),
        ("Upper=1 http://x/?q=1 k='\\x'", {"k": "'\\x'"}),
    ],
)
def test_pairs(message: str, fields: dict[str, object]) -> None:
    assert fields_of(message) == fields


def test_what_was_raised_is_a_field_of_the_same_line() -> None:
    try:
        raise ValueError("no\nluck")
    except ValueError:
        line = JsonFormatter().format(record("x=1", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "ValueError: no\nluck" in json.loads(line)["exception"]


def test_the_last_lines_are_bounded() -> None:
    lines = LastLines()
    lines.setFormatter(logging.Formatter("%(message)s"))
    for number in range(LINES_MAX + 5):
        lines.emit(record("%d %s", number, "x" * 2 * LINE_CHARS_MAX, exc_info=None))
    kept = lines.lines()
    assert len(kept) == LINES_MAX
    assert kept[0].startswith("5 ")
    assert max(map(len, kept)) == LINE_CHARS_MAX
    assert lines.lines(2) == kept[-2:]
    assert lines.lines(0) == []


SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"endpoint=http://user:{SECRET}@host:9000/x",
        f"url='https://host/x?X-Amz-Signature={SECRET}&y=1' next",
        f"Authorization: Bearer {SECRET}",
        f'{{"authorization": "Basic {SECRET}"}}',
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f'"aws_secret_access_key": "{SECRET}"',
        f"password = '{SECRET}'",
        f"azure_storage_account_key={SECRET};",
        f"api-key: {SECRET}",
        f"token={SECRET}, and more",
        f"see https://host/path#{SECRET}",
    ],
)
def test_credentials_do_not_reach_a_stranger(text: str) -> None:
    assert SECRET not in redacted(text)
    assert "[redacted]" in redacted(text)


def test_access_keys_and_hashes_are_cut() -> None:
    assert redacted("key AKIAIOSFODNN7EXAMPLE here") == "key [redacted] here"
    assert redacted(f"block {'ab' * 32} gone") == "block abababab... gone"


@pytest.mark.parametrize(
    "text",
    [
        '{"lookup_tokens": 123, "block_tokens": 16}',
        "socket=/run/kvstore/kvstore.sock port=7700",
        "http://127.0.0.1:4318/v1/traces",
        "s3://bucket/prefix, region us-east-1",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_addresses_are_shown_without_credentials() -> None:
    assert without_credentials(f'"http://u:{SECRET}@h:1/p?k={SECRET}"') == (
        '"http://[redacted]@h:1/p?[redacted]"'
    )
