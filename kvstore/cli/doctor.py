"""`kvstore doctor`: is this machine, this daemon and this engine set up as they should be?"""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvstore.cli.check_bucket import check_bucket
from kvstore.cli.check_daemon import check_daemon
from kvstore.cli.check_disk import check_disk
from kvstore.cli.check_engines import check_engines
from kvstore.cli.check_gpu import check_gpus
from kvstore.cli.check_keys import check_keys
from kvstore.cli.check_machine import check_machine
from kvstore.cli.check_pool import check_pool
from kvstore.cli.check_security import check_security, check_shown
from kvstore.cli.check_vllm import check_vllm, read_arguments, read_config
from kvstore.cli.target import Target, shown, shown_options, target_for
from kvstore.settings import Settings, load_settings
from kvstore.store.findings import Finding, is_wrong


@click.command()
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The daemon's TOML file, as for `kvstore serve`.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="As for `kvstore serve`."
)
@click.option(
    "--target",
    type=Target(),
    help="The daemon to ask; default: the settings' socket, or else as for every command.",
)
@shown_options
@click.option("--vllm-args", metavar="ARGS", help="Arguments of `vllm serve`, as one text.")
@click.option(
    "--vllm-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="vLLM's own --config file, YAML or JSON.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(
    ctx: click.Context,
    *,
    config: Path | None,
    overrides: tuple[str, ...],
    target: str | None,
    vllm_args: str | None,
    vllm_config: Path | None,
    as_json: bool,
) -> None:
    """Check limits, memory, disk, bucket, addresses, keys, the daemon, and vLLM's settings.

    Prints each problem with a command that solves it; exit code 1 if there is a problem. A running
    daemon is checked by its own settings. --config and --set describe a daemon to be started. The
    check writes and reads back at most 64 MiB in an unnamed temporary file in the directory of the
    file tier, and an object of 64 bytes in the bucket of object.url.

    \b
    Examples:
      kvstore doctor
      kvstore doctor --config /etc/kvstore.toml --json
      kvstore doctor --vllm-args "MODEL --kv-transfer-config '{...}'"
      kvstore doctor --vllm-config vllm.yaml
    """
    settings = load_settings(config, overrides)
    at = target or target_for(settings)
    engine: dict[str, object] = {}
    if vllm_config is not None:
        engine |= read_config(vllm_config)
    if vllm_args is not None:
        engine |= read_arguments(vllm_args)
    findings = check_all(settings, at)
    if vllm_args is not None or vllm_config is not None:
        findings += check_vllm(engine, at)
    bad = is_wrong(findings)
    if as_json:
        told = [finding.to_json() for finding in findings]
        click.echo(json.dumps({"healthy": not bad, "findings": told}))
    else:
        click.echo("\n".join(line for finding in findings for line in finding.lines()))
        click.echo("\nsomething is wrong: see above" if bad else "\nnothing is wrong")
    ctx.exit(1 if bad else 0)


def check_all(settings: Settings, target: str) -> list[Finding]:
    """Return everything that was looked at, but for engines' arguments."""
    daemon = check_daemon(target, settings)
    judged = daemon.settings or settings
    return [
        *check_machine(judged, running=daemon.running),
        *check_gpus(target),
        *check_engines(),
        *check_disk(judged.file),
        *check_keys(judged),
        *check_security(judged),
        *check_shown(shown().get("token_file"), shown().get("tls_key")),
        # A running daemon has other credentials than this command, and says itself how it goes.
        *([] if daemon.running else check_bucket(judged.object)),
        *check_pool(judged.pool, running=daemon.running),
        *daemon.findings,
    ]
