"""`kvstore hint`: tell a daemon what will be asked for, or will not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import click

from kvstore.cli.namespaces import Start, find_namespace, namespace_option
from kvstore.cli.prompt import read_tokens
from kvstore.cli.target import F, Text, connect, daemon_options
from kvstore.client import Client
from kvstore.model.block import Namespace
from kvstore.model.hint import HintKind, HintReport, Prefix, Short
from kvstore.model.words import duration, size
from kvstore.settings import parse_size

_DONE = {
    HintKind.END: "{done} of {blocks} blocks belong to this conversation alone: evicted first",
    HintKind.EXPECT: "{done} of {blocks} blocks are expected in {lasts}",
    HintKind.PREFETCH: "{done} of {blocks} blocks were promoted to dram ({size}) in {took}",
    HintKind.PIN: "{done} of {blocks} blocks ({size}) are pinned for {lasts}",
    HintKind.DEMOTE: "{done} of {blocks} blocks ({size}) were demoted to the file tier in {took}",
}
_SHORT = {
    Short.UNKNOWN_SESSION: "no request of this conversation was seen, or it was too long ago",
    Short.NOT_STORED: "none of its blocks is stored",
    Short.SHARED: "other conversations use the others, or they are leased or pinned",
    Short.CAP: "no more blocks may be held: see limits.pinned_fraction and limits.leased_fraction",
    Short.DEADLINE: "the others were not promoted in time",
    Short.NO_ROOM: "the arena had no slot to free for the others",
    Short.READ_FAILED: "the disk failed to read the others: see the daemon's log",
    Short.NO_FILE_TIER: "the daemon has no file tier",
    Short.NOT_WRITTEN: "the others are not in the file tier yet",
    Short.BUSY: "too many hints are in progress: try again later",
    Short.UNKNOWN: "this release does not know the reason",
}


@click.group()
def hint() -> None:
    """Tell the daemon what a conversation will do next: end, ask again, or keep its blocks.

    CONVERSATION is the session_id of its requests to the vLLM connector. --prompt names a prefix
    instead. A wrong hint can cost hits; it never changes an answer. Exit code 1 if no block is
    stored.

    \b
    Examples:
      kvstore hint end chat-17
      kvstore hint expect chat-17 --in 30
      kvstore hint prefetch --prompt tokens.json --deadline 2
      kvstore hint pin --prompt system.txt --tokenizer /models/llama --ttl 600 --bytes 2GiB
      kvstore hint demote chat-17 --json
    """


def _named(command: F) -> F:
    """Add what a hint is about."""
    options: tuple[Callable[[F], F], ...] = (
        click.argument("conversation", type=Text(), required=False),
        click.option(
            "--prompt",
            type=click.File("r", encoding="utf-8"),
            help="The prefix: a JSON list of token ids, or text; - is stdin.",
        ),
        click.option("--namespace", type=Start(), help=namespace_option("Namespace of --prompt.")),
        click.option(
            "--tokenizer",
            metavar="PATH",
            help="tokenizer.json, or the model directory that has it: --prompt is then text.",
        ),
        click.option(
            "--salt", type=Text(), default="", help="The cache salt the request was sent with."
        ),
        daemon_options,
    )
    for option in reversed(options):
        command = option(command)
    return command


_deadline = click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    help="Seconds that the command may take.",
)


@hint.command("end", short_help="A conversation is over.")
@_named
def end(**named: Any) -> None:
    """Announce that a conversation is over: blocks that only it used are evicted first.

    \b
    Example:
      kvstore hint end chat-17
    """
    _send(lambda client, target: client.hints.end_session(target), **named)


@hint.command("expect", short_help="A conversation will ask again soon.")
@_named
@click.option("--in", "in_s", type=click.FloatRange(0), required=True, help="Seconds from now.")
def expect(in_s: float, **named: Any) -> None:
    """Announce the next request of a conversation: its blocks are resident by then.

    \b
    Example:
      kvstore hint expect chat-17 --in 30
    """
    _send(lambda client, target: client.hints.expect(target, in_s), **named)


@hint.command("prefetch", short_help="Promote blocks to dram.")
@_named
@_deadline
def prefetch(deadline_s: float, **named: Any) -> None:
    """Promote blocks to dram, and wait until they are resident.

    \b
    Example:
      kvstore hint prefetch --prompt tokens.json --deadline 2
    """
    _send(lambda client, target: client.hints.prefetch(target, deadline_s=deadline_s), **named)


@hint.command("pin", short_help="Pin blocks in dram for a while.")
@_named
@_deadline
@click.option(
    "--ttl",
    "ttl_s",
    type=click.FloatRange(0),
    required=True,
    help="Seconds, up to limits.pin_ttl_max_s; 0 ends the pin.",
)
@click.option(
    "--bytes",
    "bytes_max",
    metavar="SIZE",
    default="0",
    help="Pin at most so many bytes; 0: no limit.",
)
def pin(deadline_s: float, ttl_s: float, bytes_max: str, **named: Any) -> None:
    """Pin the first blocks of a prefix in dram for a while, within limits.pinned_fraction.

    \b
    Example:
      kvstore hint pin --prompt system.txt --tokenizer /models/llama --ttl 600 --bytes 2GiB
    """
    nbytes = parse_size(bytes_max)
    _send(
        lambda client, target: client.hints.pin(
            target, ttl_s, bytes_max=nbytes, deadline_s=deadline_s
        ),
        **named,
    )


@hint.command("demote", short_help="Demote blocks to the file tier now.")
@_named
@_deadline
def demote(deadline_s: float, **named: Any) -> None:
    """Demote blocks that only this conversation used from dram to the file tier now.

    \b
    Example:
      kvstore hint demote chat-17 --json
    """
    _send(lambda client, target: client.hints.demote(target, deadline_s=deadline_s), **named)


def _send(
    give: Callable[[Client, str | Prefix], HintReport],
    *,
    target: str,
    as_json: bool,
    conversation: str | None,
    prompt: TextIO | None,
    namespace: str | None,
    tokenizer: str | None,
    salt: str,
) -> None:
    if not conversation and prompt is None:
        raise click.UsageError("say CONVERSATION, or --prompt")
    tokens = read_tokens(prompt, tokenizer) if prompt is not None else None
    with connect(target) as client:
        about: str | Prefix = conversation or ""
        if tokens is not None:
            _, spec = find_namespace(client, namespace)
            about = _prefix(spec, tokens, salt, conversation or "", client.batch_keys_max)
        report = give(client, about)
    if as_json:
        click.echo(json.dumps(asdict(report)))
    else:
        click.echo("\n".join(_lines(report)))
    nothing = report.short in (Short.UNKNOWN_SESSION, Short.NOT_STORED)
    click.get_current_context().exit(int(nothing))


def _prefix(
    spec: Namespace, tokens: list[int], salt: str, conversation: str, keys_max: int
) -> Prefix:
    """Name the first blocks of a prompt: a hint is one call, because the next one about the same
    prefix takes its place."""
    if len(tokens) // spec.block_tokens > keys_max:
        click.echo(
            f"the hint is about the first {keys_max} blocks: for more, raise "
            "limits.batch_keys_max of the daemon",
            err=True,
        )
    most = tokens[: keys_max * spec.block_tokens]
    return Prefix.of_tokens(spec, most, cache_salt=salt.encode(), session_id=conversation)


def _lines(report: HintReport) -> list[str]:
    lines = [
        _DONE[report.kind].format(
            done=report.done_blocks,
            blocks=report.blocks,
            size=size(report.done_bytes),
            took=duration(report.took_s),
            lasts=duration(report.lasts_s),
        )
    ]
    return lines + ([_SHORT[report.short]] if report.short else [])
