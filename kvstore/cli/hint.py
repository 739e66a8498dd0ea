"""`kvstore hint`: tell a daemon what will be asked for, or will not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import click

from kvstore.cli.namespaces import Start, find_namespace, namespace_option
from kvstore.cli.prompt import read_tokens
from kvstore.cli.target import F, connect, daemon_options
from kvstore.cli.words import duration, size
from kvstore.client import Client
from kvstore.model.block import Namespace
from kvstore.model.hint import HintKind, HintReport, Prefix, Short
from kvstore.settings import parse_size

KEYS_MAX = 8192  # of one call

_DONE = {
    HintKind.END: "{done} of {blocks} blocks are this session's alone and will leave first",
    HintKind.EXPECT: "{done} of {blocks} blocks are expected in {lasts}",
    HintKind.PREFETCH: "{done} of {blocks} blocks came up into dram ({size}) in {took}",
    HintKind.PIN: "{done} of {blocks} blocks ({size}) are pinned for {lasts}",
    HintKind.DEMOTE: "{done} of {blocks} blocks ({size}) left dram for the file tier in {took}",
}
_SHORT = {
    Short.UNKNOWN_SESSION: "no request of this session was seen, or it was too long ago",
    Short.NOT_STORED: "none of its blocks is stored",
    Short.SHARED: "the others are used by somebody else, too, or held",
    Short.CAP: "no more may be held: see limits.pinned_fraction and limits.leased_fraction",
    Short.DEADLINE: "the others did not come up in time",
    Short.NO_ROOM: "no slot of the arena could be freed for the others",
    Short.READ_FAILED: "the disk failed to read the others: see the daemon's log",
    Short.NO_FILE_TIER: "the daemon has no file tier",
    Short.NOT_WRITTEN: "the others are not in the file tier yet",
    Short.BUSY: "too many hints are being carried out: try again in a while",
    Short.UNKNOWN: "for a reason this release does not know",
}


@click.group()
def hint() -> None:
    """Say what a session will do: it is over, will be back, is to stay, come up or go down.

    SESSION is the id its requests were sent with (the vLLM connector's session_id); or name the
    prefix by --prompt. A wrong hint costs hits, never a right answer. Exit code 1: nothing of it is
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
        click.argument("session", required=False),
        click.option(
            "--prompt",
            type=click.File("r", encoding="utf-8"),
            help="The prefix: a JSON list of token ids, or text; - is stdin.",
        ),
        click.option("--namespace", type=Start(), help=namespace_option("Of --prompt.")),
        click.option(
            "--tokenizer",
            metavar="PATH",
            help="tokenizer.json, or the model directory that has it: --prompt is then text.",
        ),
        click.option("--salt", default="", help="The cache salt the request was sent with."),
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
    help="Seconds it may take.",
)


@hint.command("end", short_help="The session is over.")
@_named
def end(**named: Any) -> None:
    """The session is over: what it alone has used is the first to leave.

    \b
    Example:
      kvstore hint end chat-17
    """
    _send(lambda client, target: client.end_session(target), **named)


@hint.command("expect", short_help="The session asks again in a while.")
@_named
@click.option("--in", "in_s", type=click.FloatRange(0), required=True, help="Seconds from now.")
def expect(in_s: float, **named: Any) -> None:
    """The session asks again in a while: keep its blocks, have them in dram by then.

    \b
    Example:
      kvstore hint expect chat-17 --in 30
    """
    _send(lambda client, target: client.expect(target, in_s), **named)


@hint.command("prefetch", short_help="Bring blocks up into dram.")
@_named
@_deadline
def prefetch(deadline_s: float, **named: Any) -> None:
    """Bring blocks up into dram, and wait until they are there.

    \b
    Example:
      kvstore hint prefetch --prompt tokens.json --deadline 2
    """
    _send(lambda client, target: client.prefetch(target, deadline_s=deadline_s), **named)


@hint.command("pin", short_help="Keep blocks in dram for a while.")
@_named
@_deadline
@click.option(
    "--ttl",
    "ttl_s",
    type=click.FloatRange(0),
    required=True,
    help="Seconds; 0 lets go. The daemon's bound: limits.pin_ttl_max_s.",
)
@click.option("--bytes", "bytes_max", metavar="SIZE", default="0", help="At most; 0: any.")
def pin(deadline_s: float, ttl_s: float, bytes_max: str, **named: Any) -> None:
    """Keep blocks in dram for a while, from the first on; all pins together are bounded.

    \b
    Example:
      kvstore hint pin --prompt system.txt --tokenizer /models/llama --ttl 600 --bytes 2GiB
    """
    nbytes = parse_size(bytes_max)
    _send(
        lambda client, target: client.pin(target, ttl_s, bytes_max=nbytes, deadline_s=deadline_s),
        **named,
    )


@hint.command("demote", short_help="Let blocks leave dram for the file tier now.")
@_named
@_deadline
def demote(deadline_s: float, **named: Any) -> None:
    """Let what this session alone has used leave dram now, for the file tier.

    \b
    Example:
      kvstore hint demote chat-17 --json
    """
    _send(lambda client, target: client.demote(target, deadline_s=deadline_s), **named)


def _send(
    give: Callable[[Client, str | Prefix], HintReport],
    *,
    target: str,
    as_json: bool,
    session: str | None,
    prompt: TextIO | None,
    namespace: str | None,
    tokenizer: str | None,
    salt: str,
) -> None:
    if not session and prompt is None:
        raise click.UsageError("say SESSION, or --prompt")
    tokens = read_tokens(prompt, tokenizer) if prompt is not None else None
    with connect(target) as client:
        about: str | Prefix = session or ""
        if tokens is not None:
            _, spec = find_namespace(client, namespace)
            about = _prefix(spec, tokens, salt, session or "")
        report = give(client, about)
    if as_json:
        click.echo(json.dumps(asdict(report)))
    else:
        click.echo("\n".join(_lines(report)))
    nothing = report.short in (Short.UNKNOWN_SESSION, Short.NOT_STORED)
    click.get_current_context().exit(int(nothing))


def _prefix(spec: Namespace, tokens: list[int], salt: str, session: str) -> Prefix:
    most = tokens[: KEYS_MAX * spec.block_tokens]
    return Prefix.of_tokens(spec, most, cache_salt=salt.encode(), session_id=session)


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
