"""`kvstore namespaces`, and how other commands find the one that is meant."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from kvstore.cli.kind import Kind
from kvstore.cli.target import connect, daemon_options
from kvstore.client import Client
from kvstore.decide.namespaces import NamespaceUse
from kvstore.decide.planner.explain import differences
from kvstore.model.block import KEY_NBYTES, Namespace, NamespaceId
from kvstore.model.words import SHORT_CHARS, percent, size

START_CHARS_MIN = 4
LISTED_MAX = 20
_DIGITS = set("0123456789abcdef")


class Start(Kind[str]):
    """The first digits of a namespace's id, or all of it."""

    name = "hex"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        text = str(value).lower()
        if not set(text) <= _DIGITS or not START_CHARS_MIN <= len(text) <= 2 * KEY_NBYTES:
            self.fail(
                f"{value!r} is not {START_CHARS_MIN} to {2 * KEY_NBYTES} hex digits: copy them "
                "from `kvstore namespaces`",
                param,
                ctx,
            )
        return text


@click.command()
@daemon_options
def namespaces(target: str, as_json: bool) -> None:
    """List the namespaces a daemon knows: id, blocks, bytes, hits, model and groups.

    Bytes are listed for DRAM and for the file tier. Hits are the share of requested blocks that
    were served since the daemon's start. Namespaces never share blocks: below each are the fields
    in which it differs from the largest one of its model. A namespace without details has stored
    blocks, but no engine has registered it since the daemon's start.

    \b
    Examples:
      kvstore namespaces
      kvstore namespaces --json | jq -r 'select(.blocks > 0) | .namespace'
    """
    with connect(target) as client:
        found = client.admin.namespaces()
    if not found and not as_json:
        click.echo("no namespace is known yet: start an engine, or see `kvstore put`", err=True)
    for use in found:
        differs = _differs(use, found)
        if as_json:
            click.echo(json.dumps(namespace_json(use) | {"differs": differs}))
            continue
        bytes_text = f"{size(use.dram_bytes)} dram, {size(use.file_bytes)} file"
        hits = percent(use.hit_blocks, use.asked_blocks)
        tiers = (
            f"{percent(blocks, use.asked_blocks)} {tier}"
            for tier, blocks in sorted(use.tier_hit_blocks.items())
        )
        by_tier = f" ({', '.join(tiers)})" if use.hit_blocks else ""
        click.echo(
            f"{use.namespace_id.hex()} {use.blocks:>9} blocks  {bytes_text}, {hits} hits{by_tier}  "
            f"{_summary(use)}"
        )
        for field in differs:
            click.echo(f"  {field}")


def _differs(use: NamespaceUse, known: Sequence[NamespaceUse]) -> list[str]:
    """Return the fields in which a namespace differs from the largest one of its model."""
    alike = [each for each in known if each.model == use.model and each.namespace is not None]
    if use.namespace is None or not alike:
        return []
    largest = max(alike, key=lambda each: each.blocks).namespace
    return list(differences(use.namespace, largest)) if largest is not None else []


def namespace_json(use: NamespaceUse) -> dict[str, object]:
    """Return a namespace as `kvstore namespaces --json` prints it."""
    return {
        "namespace": use.namespace_id.hex(),
        "model": use.model,
        "blocks": use.blocks,
        "dram_bytes": use.dram_bytes,
        "file_bytes": use.file_bytes,
        "asked_blocks": use.asked_blocks,
        "hit_blocks": use.hit_blocks,
        "tier_hit_blocks": dict(use.tier_hit_blocks),
        "spec": json.loads(use.namespace.to_json()) if use.namespace else None,
    }


def namespace_option(help_text: str) -> str:
    """Return the help of a --namespace that `find_namespace` reads."""
    return f"{help_text} The first digits of its id are enough; optional with one namespace."


def namespace_id_option(help_text: str) -> str:
    """Return the help of a --namespace that `find_namespace_id` reads."""
    return f"{help_text} The first {START_CHARS_MIN} or more digits of its id are enough."


def find_namespace(client: Client, start: str | None) -> tuple[NamespaceId, Namespace]:
    """Return the one registered namespace whose id starts so. Raises UsageError that lists them."""
    known = client.admin.namespaces()
    meant = _meant(known, start or "")
    if start is None and any(use.blocks for use in known):
        meant = [use for use in known if use.blocks]  # an engine that stored nothing is not meant
    usable = [use for use in meant if use.namespace is not None]
    if len(usable) == 1:
        namespace = usable[0].namespace
        assert namespace is not None
        return client.register(namespace), namespace
    if meant and not usable:
        raise click.ClickException(
            f"namespace {meant[0].namespace_id.hex()[:SHORT_CHARS]} has blocks, but what it stands "
            "for is not known (any more): start an engine that uses it"
        )
    raise _not_one(known, meant, start)


def find_namespace_id(client: Client, start: str | None) -> NamespaceId | None:
    """Return the id that starts so, of whatever the daemon has blocks of or knows; None: of all.

    A whole id may be one that the daemon does not know. Raises UsageError that lists those it does.
    """
    if start is None:
        return None
    if len(start) == 2 * KEY_NBYTES:
        return NamespaceId(bytes.fromhex(start))
    known = client.admin.namespaces()
    meant = _meant(known, start)
    if len(meant) == 1:
        return meant[0].namespace_id
    raise _not_one(known, meant, start)


def _meant(known: Sequence[NamespaceUse], start: str) -> list[NamespaceUse]:
    return [use for use in known if use.namespace_id.hex().startswith(start.lower())]


def _not_one(
    known: Sequence[NamespaceUse], meant: Sequence[NamespaceUse], start: str | None
) -> click.ClickException:
    if not known:
        return click.ClickException("the daemon knows no namespace yet: start an engine first")
    candidates = meant or known
    listed = "".join(
        f"\n  {use.namespace_id.hex()[:SHORT_CHARS]} {_summary(use)}"
        for use in candidates[:LISTED_MAX]
    )
    if len(candidates) > LISTED_MAX:
        listed += f"\n  and {len(candidates) - LISTED_MAX} more: kvstore namespaces"
    problem = "several namespaces fit" if meant else f"no namespace starts with {start}"
    return click.UsageError(f"{problem}; say --namespace with one of:{listed}")


def _summary(use: NamespaceUse) -> str:
    namespace = use.namespace
    if namespace is None:
        return f"model {use.model}: no engine has registered it"
    groups = len(namespace.groups)
    weights = dict(namespace.identity).get("weights", "?")[:SHORT_CHARS]
    return (
        f"model {use.model}, weights {weights}, {namespace.block_tokens} tokens a block, "
        f"{groups} group{'s' * (groups > 1)}"
    )
