"""Where a workload comes from: the generator, another tool's parameters, or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.points import opened
from kvstore_bench.chat.traces import Window, load_trace
from kvstore_bench.chat.workloads.bench_multiturn import NAME as BENCH_MULTITURN
from kvstore_bench.chat.workloads.bench_multiturn import BenchMultiturn, bench_multiturn
from kvstore_bench.chat.workloads.generate_config import generate_from
from kvstore_bench.chat.workloads.generator import (
    Shape,
    SizeRange,
    Vocabulary,
    generate,
    vocabulary_of,
)
from kvstore_bench.chat.workloads.multi_round_qa import NAME as MULTI_ROUND_QA
from kvstore_bench.chat.workloads.multi_round_qa import MultiRoundQA, multi_round_qa
from kvstore_bench.chat.workloads.workload import Conversation, Workload, load

Kind = Literal[
    "generated text", "conversations", "generate_conversations", "traces", "multi-round-qa",
    "bench-multiturn",
]  # fmt: skip

TOOLS = (MULTI_ROUND_QA, BENCH_MULTITURN)
NOT_IN_SGLANG = {"request_rate", "distribution"}
CUTS = {"conversations", "turns"}
# Which of the options below belong to which kind of workload. None of them has a default, so what
# is not None was asked for.
OWN: Mapping[Kind, set[str]] = {
    "generated text": CUTS | {"first_tokens", "turn_tokens", "answer_tokens", "tokenizer"},
    "conversations": CUTS,
    "generate_conversations": CUTS | {"tokenizer"},
    "traces": CUTS | {"tokenizer", "speed", "start", "end", "max_requests", "gap_cap"},
    "multi-round-qa": {field.name for field in fields(MultiRoundQA)} | {"tokenizer"},
    "bench-multiturn": {field.name for field in fields(BenchMultiturn)} - NOT_IN_SGLANG
    | {"tokenizer"},
}
NAMES = sorted(set().union(*OWN.values()))


def workload_of(
    given: Mapping[str, Any], *, tag: str | None = None, first_tokens: int | None = None
) -> Workload:
    """Make the workload that options ask for.

    given: the options by name, those not asked for None; `source` is a file, `workload` a tool's
    name. tag: opens every prompt, so that workloads with unlike tags share nothing. first_tokens:
    the size of first questions, for generated text. Raises InvalidRequest that names the option.
    """
    kind = _kind(given)
    for name in NAMES:
        if given.get(name) is not None and name not in OWN[kind]:
            owners = [owner for owner, names in OWN.items() if name in names]
            raise InvalidRequest(f"--{name.replace('_', '-')} is for {' and '.join(owners)}")
    if first_tokens is not None:
        if kind != "generated text":
            raise InvalidRequest("a grid of input lengths is for generated text")
        given = {**given, "first_tokens": SizeRange(first_tokens, first_tokens)}
    if kind == "traces":
        return _trace(given, tag)
    workload = _conversations(kind, given)
    return workload if tag is None else opened(workload, tag)


def _kind(given: Mapping[str, Any]) -> Kind:
    source, tool = given.get("source"), given.get("workload")
    if source is not None and tool is not None:
        raise InvalidRequest("--workload makes its own conversations: leave out --input")
    if tool is not None:
        return "multi-round-qa" if tool == MULTI_ROUND_QA else "bench-multiturn"
    return "generated text" if source is None else _kind_of_file(source)


def _kind_of_file(path: Path) -> Kind:
    try:
        with path.open("rb") as file:
            start = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
        if start.startswith(b"[") or (not start and path.suffix == ".json"):
            return "conversations"
        if start.startswith(b"{") and isinstance(_json(path), dict):
            return "generate_conversations" if "filetype" in _json(path) else "traces"
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error
    return "traces"


def _json(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # several lines of JSON, most likely; their reader says what is wrong


def _conversations(kind: Kind, given: Mapping[str, Any]) -> Workload:
    seed, own = given["seed"], {name: given[name] for name in OWN[kind] if name in given}
    asked = {name: value for name, value in own.items() if value is not None}
    if kind == "conversations":
        found = load(given["source"])
        return _cut(Workload(found, {"format": kind, "file": given["source"].name}), given)
    vocabulary = _vocabulary(asked.pop("tokenizer", None))
    if kind == "generated text":
        shape = Shape(**asked, seed=seed)
        return Workload(generate(shape, vocabulary), {"format": "generated", **asdict(shape)})
    if kind == "multi-round-qa":
        return multi_round_qa(MultiRoundQA(**asked), vocabulary, seed=seed)
    if kind == "bench-multiturn":
        load_options = {
            "request_rate": given.get("request_rate"),
            "distribution": given.get("arrivals"),
        }
        asked |= {name: value for name, value in load_options.items() if value is not None}
        return bench_multiturn(BenchMultiturn(**asked), vocabulary, seed=seed)
    path = given["source"]
    try:
        made = generate_from(_json(path), path.parent, vocabulary, seed=seed)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from error
    return _cut(made, given)


def _cut(workload: Workload, given: Mapping[str, Any]) -> Workload:
    """Keep the first --conversations and --turns of a file."""
    kept = [one for one in workload.dialogues if isinstance(one, Conversation)]
    turns = given.get("turns")
    dialogues = [
        one.first_turns(turns) if turns else one for one in kept[: given.get("conversations")]
    ]
    return Workload(dialogues, workload.source, workload.prescribed)


def _trace(given: Mapping[str, Any], tag: str | None) -> Workload:
    window = Window(
        speed=given.get("speed") or 1.0,
        start_s=given.get("start") or 0.0,
        end_s=given.get("end"),
        requests=given.get("max_requests"),
        gap_cap_s=given.get("gap_cap"),
        sessions=given.get("conversations"),
        turns=given.get("turns"),
    )
    seed = f"{given['seed']}/{tag}" if tag else str(given["seed"])
    return load_trace(given["source"], window, _vocabulary(given.get("tokenizer")), seed=seed)


def _vocabulary(tokenizer: Path | None) -> Vocabulary:
    return vocabulary_of(tokenizer) if tokenizer else Vocabulary()
