"""The command group: finds commands late, turns errors into exit codes.

Exit codes: 0 done; 1 refused or failed; 2 wrong usage or settings; 3 no daemon answers.
"""

from __future__ import annotations

import errno
import importlib
import json
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NoReturn

import click

import kvstore
from kvstore.model.errors import ConfigError, KVStoreError, SessionEnded, Unavailable

# Commands are imported when they are called: `serve` needs the whole daemon, `stats` only a client.
# So what `kvstore --help` says of each stands here: group -> command -> (where it is, one line).
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Run": {
        "serve": ("kvstore.cli.serve:serve", "Run a daemon until SIGTERM or Ctrl-C."),
        "doctor": ("kvstore.cli.doctor:doctor", "Check machine, disk, daemon and vLLM settings."),
        "support": ("kvstore.cli.support:support", "Write one file for an issue report."),
    },
    "Look": {
        "status": ("kvstore.cli.status:status", "Show a daemon's state on one screen."),
        "top": ("kvstore.cli.top:top", "Watch tiers, hits, bandwidth and sessions, live."),
        "page": ("kvstore.cli.page:page", "Print the address of a daemon's page in a browser."),
        "stats": ("kvstore.cli.inspect:stats", "Print all counters of a daemon."),
        "monitor": ("kvstore.cli.monitor:monitor", "Watch requests as they are answered."),
        "slow": ("kvstore.cli.slow:slow", "Show what took longest, and what it waited for."),
        "explain": ("kvstore.cli.explain:explain", "Explain why a request missed."),
        "members": ("kvstore.cli.members:members", "List the daemons that share what they hold."),
        "events": ("kvstore.cli.events:events", "Read KV events; tell an indexer of them."),
        "namespaces": ("kvstore.cli.namespaces:namespaces", "List models and their namespaces."),
        "tree": ("kvstore.cli.prefixes:tree", "Show what is stored as a tree of prefixes."),
        "scan": ("kvstore.cli.inspect:scan", "List stored blocks."),
    },
    "Try": {
        "whoami": ("kvstore.cli.whoami:whoami", "Show who you are to a daemon."),
        "ping": ("kvstore.cli.ping:ping", "Measure a daemon's round trip time."),
        "put": ("kvstore.cli.put:put", "Store the bytes of a file."),
        "get": ("kvstore.cli.get:get", "Read the bytes of one block."),
        "selftest": (
            "kvstore.cli.selftest:selftest",
            "Check that put, get and flush work.",
        ),
    },
    "Change": {
        "hint": ("kvstore.cli.hint:hint", "Announce what a session will do next."),
        "tenant": ("kvstore.cli.tenant:tenant", "List, add, change or delete tenants."),
        "config": ("kvstore.cli.config:config", "Show or change a running daemon's settings."),
        "flush": ("kvstore.cli.change:flush", "Wait until everything is durable."),
        "delete": ("kvstore.cli.change:delete", "Delete blocks by key."),
        "clear": ("kvstore.cli.change:clear", "Delete all blocks of one namespace, or of all."),
    },
    "Secure": {
        "token": ("kvstore.cli.token:token", "Create, list and revoke tokens."),
        "audit": ("kvstore.cli.audit:audit", "Read an audit log; check that it is whole."),
    },
    "Directories": {
        "inspect": ("kvstore.cli.directory:inspect", "Show what a file tier directory contains."),
        "verify": ("kvstore.cli.directory:verify", "Check every byte of a file tier directory."),
        "gc": ("kvstore.cli.directory:gc", "Free dead space in a file tier directory."),
        "key": ("kvstore.cli.key:key", "Make, show and rotate keys of encrypted data."),
    },
    "Plan": {
        "trace": ("kvstore.cli.trace:trace", "Record a daemon's traffic, or synthesize it."),
        "replay": ("kvstore.cli.replay:replay_command", "Simulate the hits of a cache on a trace."),
        "plan": ("kvstore.cli.plan:plan", "Size tiers, drives and bandwidth for a load."),
    },
    "Measure": {
        "bench": ("kvstore_bench.cli:bench", "Measure what a cache gains, and what it costs."),
    },
    "Install": {
        "completion": ("kvstore.cli.completion:completion", "Print a shell's completion script."),
        "man": ("kvstore.cli.man:man", "Write a man page for each command."),
    },
}
_AS_JSON = "kvstore.as_json"
_COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


class WrongSettings(click.ClickException):
    """A setting is wrong."""

    exit_code = 2


class NoDaemon(click.ClickException):
    """Nobody answered."""

    exit_code = 3


def is_answered(error: Unavailable) -> bool:
    """Tell whether a daemon was reached and refused, or what failed is no call to one."""
    import grpc
    import grpc.aio

    from kvstore.rpc.status import is_answer

    cause = error.__cause__
    if isinstance(cause, grpc.aio.AioRpcError):
        silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return is_answer(cause) or cause.code() not in silent
    # A reason stays on the side that refuses: here it is a bucket's.
    return bool(error.reason) or isinstance(error, SessionEnded)


def _tell(ctx: click.Context, error: str, exit_code: int) -> None:
    """Say as JSON what went wrong, where JSON was asked for."""
    if ctx.meta[_AS_JSON]:
        with suppress(OSError):  # what went wrong may be the standard output itself
            click.echo(json.dumps({"error": error, "exit_code": exit_code}))


def _fail(error: OSError) -> NoReturn:
    """End after an error of the system."""
    if error.errno == errno.EPIPE:  # `| head`: click ends without a word
        raise error
    where = f"{error.filename}: " if error.filename is not None else ""
    raise click.ClickException(f"{where}{error.strerror or error}") from error


class LazyGroup(click.Group):
    """A group whose commands are imported on first use, and listed by what they are for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        place, summary = _COMMANDS[cmd_name]
        module, _, name = place.partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), name)
        except ImportError as error:
            if cmd_name != "bench":
                raise
            command = _missing_bench(error)
        command.short_help = summary
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in _COMMANDS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        close = get_close_matches(name, _COMMANDS)
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        raise click.UsageError(f"there is no command {name!r}.{meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                rows = [(f"{name:<{width}}", line) for name, (_, line) in commands.items()]
                formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_AS_JSON] = "--json" in (args[: args.index("--")] if "--" in args else args)
        try:
            return super().parse_args(ctx, args)
        except OSError as error:  # of --help and --version, which are printed here
            _fail(error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._invoke(ctx)
        except click.ClickException as error:
            _tell(ctx, error.format_message(), error.exit_code)
            raise
        except click.Abort:
            _tell(ctx, "nobody confirmed, so nothing was done: --yes does not ask", 1)
            raise

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise WrongSettings(str(error)) from error
        except Unavailable as error:
            if is_answered(error):
                raise click.ClickException(str(error)) from error
            hint = "Is a daemon running there? Start one with: kvstore serve"
            raise NoDaemon(f"{error}\n{hint}") from error
        except KVStoreError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            _fail(error)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvstore.__version__, prog_name="kvstore")
def main() -> None:
    """A tiered, shared KV cache for LLM serving.

    Exit codes: 0 done, 1 refused or failed, 2 wrong usage or settings, 3 no daemon answers.
    With --json an error is JSON as well, on the standard output: {"error": ..., "exit_code": ...}.
    """


def _missing_bench(error: ImportError) -> click.Command:
    """Stand in for the benchmarks where they are not installed."""

    @click.command("bench", context_settings={"ignore_unknown_options": True})
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def bench(args: tuple[str, ...]) -> None:
        raise click.ClickException(
            f"the benchmarks are not installed ({error}): pip install 'kvstore-tiers[bench]'"
        )

    return bench
