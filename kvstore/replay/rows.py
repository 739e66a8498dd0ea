"""Lines of traces into rows: what each format calls things, and in which units."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, TypeAlias

import msgspec

from kvstore.model.errors import InvalidRequest

TOKENS_MAX = 10_000_000
MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
WEKA_BLOCK_TOKENS_MAX = 8192
RECORDED_BLOCK_TOKENS_MAX = 65536
MODEL_CHARS_MAX = 200
NESTED_MAX = 16  # sub-agents of sub-agents


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded request.

    at_s: arrival, from an arbitrary zero. session: rows of one session are asked one after the
    other; None stands alone. blocks: ids of the prompt's blocks; equal ids in an equal scope have
    equal content. text: the prompt itself, where the trace has it. line: of the file, from 1.
    model: that was asked, "" if the trace does not say.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    session: str | None = None
    blocks: Sequence[int | str] = ()
    scope: str = ""
    text: str | None = None
    line: int = 0
    model: str = ""


def json_parse(name: str) -> Parse:
    if name not in JSON_FIELDS:
        raise InvalidRequest(f"no trace format {name!r}; choose one of {', '.join(FORMATS)}")
    needed = JSON_FIELDS[name]
    convert = _STATEFUL[name]() if name in _STATEFUL else _CONVERT[name]

    def parse(number: int, line: str) -> list[Row]:
        item = json_item(number, line)
        lacking = needed - item.keys()
        if lacking:
            raise InvalidRequest(
                f"line {number} has no {', '.join(sorted(lacking))}: not a line of {name}"
            )
        return convert(number, item)

    return parse


def weka_block(number: int, first: dict[str, Any]) -> int:
    tokens = _whole(number, first, "block_size")
    # Of a trace whose requests are none there is something better to say.
    requests = first.get("requests")
    if not 1 <= tokens <= WEKA_BLOCK_TOKENS_MAX and isinstance(requests, list) and requests:
        raise InvalidRequest(f'line {number}: "block_size" must be 1 to {WEKA_BLOCK_TOKENS_MAX}')
    return tokens


def _mooncake(number: int, item: dict[str, Any]) -> list[Row]:
    session = item.get("session_id")
    row = Row(
        number_of(number, item, "timestamp") / 1e3,
        _whole(number, item, "input_length"),
        _whole(number, item, "output_length"),
        None if session is None else str(session),
        _ids(number, item),
        line=number,
        model=str(item.get("model") or "")[:MODEL_CHARS_MAX],
    )
    return [row]


def _bailian() -> _Convert:
    """Make what reads Bailian's rows: a chat belongs to the session of the one it goes on from."""
    session_of: dict[Any, str] = {}

    def convert(number: int, item: dict[str, Any]) -> list[Row]:
        chat = item["chat_id"]
        session = session_of.get(item.get("parent_chat_id", -1), str(chat))
        row = Row(
            number_of(number, item, "timestamp"),
            _whole(number, item, "input_length"),
            _whole(number, item, "output_length"),
            session,
            _ids(number, item),
            line=number,
        )
        session_of[chat] = session
        return [row]

    return convert


def recorded_block(number: int, item: dict[str, Any]) -> int:
    tokens = _whole(number, item, "block_tokens")
    if not 1 <= tokens <= RECORDED_BLOCK_TOKENS_MAX:
        raise InvalidRequest(
            f'line {number}: "block_tokens" must be 1 to {RECORDED_BLOCK_TOKENS_MAX}'
        )
    return tokens


def _recorded() -> _Convert:
    """Make what reads `kvstore trace record`'s rows, all of one block size."""
    first: list[int] = []

    def convert(number: int, item: dict[str, Any]) -> list[Row]:
        tokens = recorded_block(number, item)
        first.append(tokens)
        if tokens != first[0]:
            raise InvalidRequest(
                f"line {number} has blocks of {tokens} tokens, those before it {first[0]}: record"
                " one namespace at a time (--namespace)"
            )
        del first[1:]
        ids = _ids(number, item)
        session = item.get("session_id")
        row = Row(
            number_of(number, item, "at_s"),
            tokens * len(ids),
            0,
            None if session is None else str(session),
            ids,
            line=number,
        )
        return [row]

    return convert


def _weka(number: int, item: dict[str, Any]) -> list[Row]:
    """Flatten a session; sub-agents take their turn in it at the time they were spawned."""
    name = str(item["id"])
    found = _weka_requests(number, name, item["requests"], 0.0, NESTED_MAX)
    return sorted(found, key=lambda row: row.at_s)


def _weka_requests(
    number: int, name: str, requests: Any, start_s: float, depth_max: int
) -> list[Row]:
    if not isinstance(requests, list) or not all(isinstance(one, dict) for one in requests):
        raise InvalidRequest(f'line {number}: "requests" must be a list of objects')
    if not depth_max:
        raise InvalidRequest(f"line {number}: sub-agents nested more than {NESTED_MAX} deep")
    found: list[Row] = []
    for request in requests:
        at_s = start_s + number_of(number, request, "t")
        if request.get("type") == "subagent":
            nested = request.get("requests", [])
            found += _weka_requests(number, name, nested, at_s, depth_max - 1)
            continue
        inputs, outputs = (_whole(number, request, field) for field in ("in", "out"))
        ids = _ids(number, request)
        # Ids mean something inside one session only.
        found.append(Row(at_s, inputs, outputs, name, ids, scope=name, line=number))
    return found


def _agent(number: int, item: dict[str, Any]) -> list[Row]:
    if not isinstance(item["input"], str) or not isinstance(item["output"], str):
        raise InvalidRequest(f'line {number}: "input" and "output" must be strings')
    # The trace has no token counts: words are what can be said without the model's tokenizer.
    inputs, outputs = (max(1, len(item[name].split())) for name in ("input", "output"))
    at_s = number_of(number, item, "timestamp") / 1e6
    session, text = str(item["session_id"]), item["input"]
    return [Row(at_s, inputs, outputs, session, text=text, line=number)]


def conversation(number: int, item: Any) -> list[Row]:
    """Return a request for every user message: all that was said up to it."""
    messages = item.get("messages") if isinstance(item, dict) else None
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f'line {number}: expected an object with "id" and "messages"')
    rows: list[Row] = []
    said: list[str] = []
    for message in messages:
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else ("", "")
        )
        if not isinstance(role, str) or not isinstance(content, str):
            raise InvalidRequest(f'line {number}: a message needs "role" and "content"')
        said.append(f"<{role}>{content}")
        if role == "user":
            text = "\n".join(said)
            words = len(text.split())
            rows.append(Row(0.0, words, 0, str(item.get("id", number)), text=text, line=number))
    return rows


def _azure(number: int, item: Mapping[str, Any]) -> list[Row]:
    try:
        # fromisoformat takes six digits of a second; the trace has seven.
        at_s = datetime.fromisoformat(str(item["TIMESTAMP"])[:26]).timestamp()
    except ValueError as error:
        raise InvalidRequest(f"line {number}: TIMESTAMP: {error}") from error
    inputs, outputs = (_whole(number, item, name) for name in ("ContextTokens", "GeneratedTokens"))
    return _answered(Row(at_s, inputs, outputs, line=number))


def _burstgpt(number: int, item: Mapping[str, Any]) -> list[Row]:
    at_s = number_of(number, item, "Timestamp")
    names = ("Request tokens", "Response tokens")
    inputs, outputs = (_whole(number, item, name) for name in names)
    return _answered(Row(at_s, inputs, outputs, item.get("Session ID") or None, line=number))


def _answered(row: Row) -> list[Row]:
    """Leave out failed requests: they have no answer."""
    return [row] if row.output_tokens > 0 else []


Parse: TypeAlias = Callable[[int, Any], Iterable[Row]]
_Convert: TypeAlias = Callable[[int, dict[str, Any]], list[Row]]
# In the order in which they are looked for: Bailian's fields include Mooncake's.
JSON_FIELDS: Mapping[str, set[str]] = {
    "bailian": {"chat_id", "timestamp", "input_length"},
    "kvstore": {"at_s", "block_tokens", "hash_ids"},
    "mooncake": {"timestamp", "input_length", "output_length"},
    "weka": {"id", "block_size", "requests"},
    "agent": {"timestamp", "input", "output", "session_id"},
}
_STATEFUL: Mapping[str, Callable[[], _Convert]] = {"bailian": _bailian, "kvstore": _recorded}
_CONVERT: Mapping[str, _Convert] = {"mooncake": _mooncake, "weka": _weka, "agent": _agent}
CSV_FORMATS: Mapping[str, tuple[set[str], Callable[[int, Mapping[str, Any]], list[Row]]]] = {
    "azure": ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
    "burstgpt": ({"Timestamp", "Request tokens", "Response tokens"}, _burstgpt),
}
BLOCK_TOKENS = {"mooncake": MOONCAKE_BLOCK_TOKENS, "bailian": BAILIAN_BLOCK_TOKENS}
FORMATS = tuple(chain(JSON_FIELDS, ["conversations"], CSV_FORMATS))


def json_item(number: int, line: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"line {number} is no JSON object: {error}") from error


def number_of(
    number: int, item: Mapping[str, Any], name: str, default: float | None = None
) -> float:
    if default is not None and name not in item:
        return default
    try:
        value = float(item[name])
    except (KeyError, TypeError, ValueError):
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidRequest(f'line {number}: "{name}" must be a number from 0')
    return value


def _whole(number: int, item: Mapping[str, Any], name: str) -> int:
    value = number_of(number, item, name)
    if value != int(value) or value > TOKENS_MAX:
        raise InvalidRequest(f'line {number}: "{name}" must be a whole number up to {TOKENS_MAX:,}')
    return int(value)


def _ids(number: int, item: Mapping[str, Any]) -> Sequence[int | str]:
    ids = item.get("hash_ids", [])
    try:
        return array("q", ids)  # a long trace has tens of millions
    except (TypeError, OverflowError):
        if not isinstance(ids, list) or not all(isinstance(one, int | str) for one in ids):
            raise InvalidRequest(f'line {number}: "hash_ids" must be a list of ids') from None
        return tuple(ids)
