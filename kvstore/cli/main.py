"""The command group: finds commands late, turns errors into exit codes.

Exit codes: 0 done; 1 refused or failed; 2 wrong usage or settings; 3 no daemon answers.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

import kvstore
from kvstore.errors import ConfigError, KVStoreError, Unavailable

# Commands are imported when they are called: `serve` needs the whole daemon, `stats` only a client.
_COMMANDS = {
    "serve": "kvstore.cli.serve:serve",
    "doctor": "kvstore.cli.doctor:doctor",
    "status": "kvstore.cli.status:status",
    "top": "kvstore.cli.top:top",
    "explain": "kvstore.cli.explain:explain",
    "hint": "kvstore.cli.hint:hint",
    "stats": "kvstore.cli.inspect:stats",
    "namespaces": "kvstore.cli.namespaces:namespaces",
    "scan": "kvstore.cli.inspect:scan",
    "get": "kvstore.cli.get:get",
    "flush": "kvstore.cli.change:flush",
    "delete": "kvstore.cli.change:delete",
    "clear": "kvstore.cli.change:clear",
    "inspect": "kvstore.cli.directory:inspect",
    "verify": "kvstore.cli.directory:verify",
    "gc": "kvstore.cli.directory:gc",
    "replay": "kvstore.cli.replay:replay_command",
    "trace": "kvstore.cli.trace:trace",
    "plan": "kvstore.cli.plan:plan",
    "bench": "kvstore_bench.cli:bench",
}


class WrongSettings(click.ClickException):
    """A setting is wrong."""

    exit_code = 2


class NoDaemon(click.ClickException):
    """Nobody answered."""

    exit_code = 3


class LazyGroup(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), name)
        except ImportError as error:
            if cmd_name != "bench":
                raise
            return _missing_bench(error)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise WrongSettings(str(error)) from error
        except Unavailable as error:
            hint = "Is a daemon running there? Start one with: kvstore serve"
            raise NoDaemon(f"{error}\n{hint}") from error
        except KVStoreError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvstore.__version__, prog_name="kvstore")
def main() -> None:
    """A tiered, shared KV cache for LLM serving.

    Exit codes: 0 done, 1 refused or failed, 2 wrong usage or settings, 3 no daemon answers.
    """


def _missing_bench(error: ImportError) -> click.Command:
    """Stand in for the benchmarks where they are not installed."""

    @click.command(
        "bench",
        context_settings={"ignore_unknown_options": True},
        short_help="Measure (needs the extra kvstore-tiers[bench]).",
    )
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def bench(args: tuple[str, ...]) -> None:
        raise click.ClickException(
            f"the benchmarks are not installed ({error}): pip install 'kvstore-tiers[bench]'"
        )

    return bench
