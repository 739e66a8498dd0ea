"""`kvstore explain`: why did this miss?"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, TextIO

import click

from kvstore.cli.namespaces import Start, find_namespace, namespace_option
from kvstore.cli.prompt import read_tokens
from kvstore.cli.target import Text, connect, daemon_options
from kvstore.model.block import Namespace
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.outcome import BlockRange, Explanation, Outcome, is_request
from kvstore.model.words import duration, ending_lines, percent, printable, reason_text

LAST_DEFAULT = 10
MATCHING_MAX = 1000  # a daemon answers no more at once


@click.command()
@daemon_options
@click.argument("request_id", type=Text(), required=False)
@click.option(
    "--last",
    type=click.IntRange(1, 1000),
    is_flag=False,
    flag_value=LAST_DEFAULT,
    help=f"Explain the last requests, {LAST_DEFAULT} unless N is given.",
    metavar="[N]",
)
@click.option(
    "--prompt",
    type=click.File("r", encoding="utf-8"),
    help="Explain what this prompt would hit now: a JSON list of token ids, or text; - is stdin.",
)
@click.option("--namespace", type=Start(), help=namespace_option("Namespace of --prompt."))
@click.option(
    "--tokenizer",
    metavar="PATH",
    help="tokenizer.json, or the model directory that has it: --prompt is then text.",
)
@click.option("--salt", type=Text(), default="", help="The cache salt the request was sent with.")
def explain(
    *,
    target: str,
    as_json: bool,
    request_id: str | None,
    last: int | None,
    prompt: TextIO | None,
    namespace: str | None,
    tokenizer: str | None,
    salt: str,
) -> None:
    """Explain how long a hit was, and why it ended there.

    REQUEST_ID is the id in the engine's answer, or the start of one. The daemon remembers the last
    requests (limits.outcomes_max), as keys, never as tokens. A LoRA adapter or an image changes the
    keys of a prompt: explain such a request by its request id.

    \b
    Examples:
      kvstore explain chatcmpl-8c1f...
      kvstore explain --last 20
      kvstore explain --prompt tokens.json --namespace 5e88
      kvstore explain --prompt prompt.txt --tokenizer /models/llama
    """
    if sum(choice is not None for choice in (request_id, last, prompt)) != 1:
        raise click.UsageError("say one of REQUEST_ID, --last and --prompt")
    if prompt is not None:
        tokens = read_tokens(prompt, tokenizer)
        _explain_prompt(target, tokens, namespace, salt, as_json=as_json)
        return
    with connect(target) as client:
        outcomes = client.admin.outcomes(request_id or "", limit=last or MATCHING_MAX)
        known = {use.namespace_id: use.namespace for use in client.admin.namespaces()}
        blocks = {each: spec.block_tokens for each, spec in known.items() if spec is not None}
    if request_id and not outcomes:
        raise click.ClickException(
            f"no request {request_id} is remembered: it did not ask this daemon, or is older "
            "than the last requests that are remembered (limits.outcomes_max)"
        )
    if not outcomes and not as_json:
        click.echo("no request asked the daemon since it started")
    remark = ""
    if request_id:
        outcomes, remark = _meant(request_id, outcomes)
    for outcome in outcomes:
        block_tokens = blocks.get(outcome.namespace_id, 0)
        if as_json:
            click.echo(json.dumps(_outcome_json(outcome, block_tokens)))
        else:
            click.echo("\n".join(_outcome_lines(outcome, block_tokens)))
    if remark and not as_json:
        click.echo(remark)


def _meant(request_id: str, found: list[Outcome]) -> tuple[list[Outcome], str]:
    """Return the outcomes to show, and what to say of the others; `found` has the exact first."""
    exact = [each for each in found if is_request(request_id, each.request_id)]
    shown = exact or found[:LAST_DEFAULT]
    others = len(found) - len(shown)
    if not others:
        return shown, ""
    more = "or more " if len(found) == MATCHING_MAX else ""
    return shown, f"({others} {more}other remembered ids begin with {request_id})"


def _explain_prompt(
    target: str, tokens: list[int], namespace: str | None, salt: str, *, as_json: bool
) -> None:
    with connect(target) as client:
        namespace_id, spec = find_namespace(client, namespace)
        chain = KeyChain(root_key(namespace_id, salt.encode()), spec.block_tokens)
        # As connectors do: one token at least is left to compute, and a hit is of one call.
        whole = chain.update(tokens[:-1])
        keys = whole[: client.batch_keys_max]
        found = client.admin.explain(namespace_id, keys)
    if as_json:
        about = {"namespace": namespace_id.hex(), "tokens": len(tokens), "blocks": len(keys)}
        click.echo(json.dumps(about | asdict(found)))
        return
    cut = f" (of {len(whole)}: limits.batch_keys_max)" if len(keys) < len(whole) else ""
    lines = [
        f"{len(tokens)} tokens, of which {len(keys)} blocks of {spec.block_tokens} can be a hit "
        f"(namespace {namespace_id.hex()[:12]}){cut}",
        *(f"  blocks {_numbers(each):<13} {_where(each)}" for each in found.ranges),
    ]
    click.echo("\n".join([*lines, *_hit_lines(found, spec, len(keys))]))


def _hit_lines(found: Explanation, spec: Namespace, asked: int) -> list[str]:
    lines = [
        f"hit: {found.hit_blocks} blocks, {found.hit_blocks * spec.block_tokens} tokens "
        f"({percent(found.hit_blocks, asked)}); {found.resident_blocks} of them are in dram"
    ]
    if found.ending is not None:
        lines += _indented("ends at ", ending_lines(found.ending))
    return lines


def _numbers(each: BlockRange) -> str:
    return f"{each.begin}" if each.end == each.begin + 1 else f"{each.begin}-{each.end - 1}"


def _where(each: BlockRange) -> str:
    if each.reason is not None:
        return reason_text(each.reason, each.left_s)
    if each.dram:
        return "in dram and file" if each.file else "in dram"
    return "in file" if each.file else "some parts in dram, the others in file"


def _outcome_lines(outcome: Outcome, block_tokens: int) -> list[str]:
    asked = outcome.asked_blocks - outcome.skip_blocks
    hit = outcome.hit_blocks - outcome.skip_blocks
    below = outcome.file_blocks + outcome.object_blocks
    below += outcome.peer_blocks + outcome.pool_blocks
    objects = f", {outcome.object_blocks} from object" if outcome.object_blocks else ""
    if outcome.peer_blocks:
        objects += f", {outcome.peer_blocks} from peer {outcome.peer[:8]}"
    if outcome.pool_blocks:
        objects += f", {outcome.pool_blocks} from pool"
    again = f", asked {outcome.asks} times" if outcome.asks > 1 else ""
    own = f" beyond the engine's own {outcome.skip_blocks}" if outcome.skip_blocks else ""
    request_id = printable(outcome.request_id) or "(without an id)"
    client = printable(outcome.client) or "a client without a name"
    lines = [
        f"request {request_id}, {duration(outcome.age_s)} ago, from {client}{again}",
        f"  hit {hit} of {asked} blocks{own} ({percent(hit, asked)}, {hit * block_tokens} tokens): "
        f"{hit - below} from dram, {outcome.file_blocks} from file{objects}, in "
        f"{duration(outcome.took_s)}",
    ]
    if outcome.ending is not None:
        lines += _indented("ended at ", ending_lines(outcome.ending))
    if outcome.peer and not outcome.peer_blocks:
        lines.append(f"  peer {outcome.peer[:8]} has, or had, more of it")
    if outcome.base_blocks:
        lines.append(f"  {outcome.base_blocks} of these blocks came without their fine part")
    if outcome.lease == "expired":
        lines.append("  but its lease had expired when it was released: the engine computed it")
    return lines


def _indented(lead: str, lines: list[str]) -> list[str]:
    return [f"  {lead}{lines[0]}", *(f"  {line}" for line in lines[1:])]


def _outcome_json(outcome: Outcome, block_tokens: int) -> dict[str, Any]:
    fields = asdict(outcome)
    fields["namespace_id"], fields["last_key"] = outcome.namespace_id.hex(), outcome.last_key.hex()
    return fields | {"block_tokens": block_tokens}
