"""Whether vLLM's arguments let the connector work. Read from text; vLLM itself is not needed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from kvstore.store.findings import Finding, note, ok, wrong

CONNECTOR = "KVStoreConnector"
PLUGINS = "vllm.general_plugins"
_UNSUPPORTED = (
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


def read_arguments(text: str) -> dict[str, Any]:
    """Read "--key value", "--key=value", "--no-key" and "--key.inner value". Raises UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"--vllm-args: {error}; quote them as in a shell") from error
    found: dict[str, Any] = {}
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        follows = words[at + 1] if at + 1 < len(words) else "--"
        if not equals and not follows.startswith("--"):
            equals, value = "=", follows
        if not equals:
            name, value = (name[3:], "false") if name.startswith("no-") else (name, "true")
        _put(found, name, _value(value))
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Read vLLM's --config file. Raises ClickException."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(
            f"{path} is no text in UTF-8: name the file that `vllm serve --config` reads"
        ) from error
    try:
        loaded = json.loads(text)
    except ValueError:
        loaded = _yaml(path, text)
    if not isinstance(loaded, dict):
        raise click.ClickException(f"{path} is not a mapping of vLLM's arguments")
    found: dict[str, Any] = {}
    for name, value in loaded.items():
        _put(found, str(name), _value(value) if isinstance(value, str) else value)
    return found


def check_vllm(arguments: Mapping[str, Any], target: str) -> Iterator[Finding]:
    """Yield findings. target: of the daemon this engine should use."""
    transfer = arguments.get("kv_transfer_config")
    if not isinstance(transfer, dict) or transfer.get("kv_connector") != CONNECTOR:
        yield wrong(
            "vllm connector",
            f"--kv-transfer-config does not name {CONNECTOR}: vLLM runs without kvstore",
            f"--kv-transfer-config '{_example(target)}'",
        )
    else:
        yield from _transfer(transfer, target)
    if arguments.get("enable_prefix_caching") is False:
        yield wrong(
            "vllm prefix",
            "prefix caching is off: the connector refuses to start; vLLM turns it off where "
            "an engine cannot go on from a stored prefix",
            "drop --no-enable-prefix-caching",
        )
    else:
        yield ok("vllm prefix", "prefix caching is on")
    algorithm = arguments.get("prefix_caching_hash_algo", "vLLM's default")
    yield ok("vllm hashes", f"{algorithm}; kvstore hashes token ids itself, so any will do")
    for name in _UNSUPPORTED:
        if int(arguments.get(name) or 1) > 1:
            flag = name.replace("_", "-")
            yield wrong("vllm parallel", f"--{flag} is not supported yet", f"drop --{flag}")
    if arguments.get("calculate_kv_scales") is True:
        yield wrong(
            "vllm KV scales",
            "scales calculated at run time differ between engines",
            "drop --calculate-kv-scales",
        )


def _transfer(transfer: Mapping[str, Any], target: str) -> Iterator[Finding]:
    """Check the section of a KVStoreConnector."""
    registered = any(each.name == "kvstore" for each in entry_points(group=PLUGINS))
    if registered or transfer.get("kv_connector_module_path") == "kvstore_vllm.connector":
        yield ok("vllm connector", f"{CONNECTOR} can be loaded")
    else:
        yield wrong(
            "vllm connector",
            f"vLLM would not find {CONNECTOR} in this environment",
            "pip install kvstore-tiers   (into vLLM's environment)",
        )
    policy = transfer.get("kv_load_failure_policy", "fail")
    if policy == "recompute":
        yield ok("vllm failures", "kv_load_failure_policy is recompute")
    else:
        yield wrong(
            "vllm failures",
            f"kv_load_failure_policy is {policy}: a block that cannot be loaded ends its request",
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config',
        )
    role = transfer.get("kv_role")
    if role in ("kv_both", "kv_producer", "kv_consumer"):
        yield ok("vllm role", str(role))
    else:
        yield wrong("vllm role", f"kv_role is {role}", 'add "kv_role": "kv_both"')
    yield _target(transfer.get("kv_connector_extra_config"), target)


def _target(extra: Any, target: str) -> Finding:
    own = extra.get("target", "") if isinstance(extra, dict) else ""
    do = f'set "kv_connector_extra_config": {{"target": "{target}"}}'
    if not isinstance(own, str) or not own.startswith("unix:"):
        return wrong("vllm target", f"{own or 'none'}: the connector needs a unix socket", do)
    if not Path(own.removeprefix("unix:")).is_socket():
        return wrong("vllm target", f"there is no socket at {own}", f"kvstore serve, or {do}")
    if own != target:
        return note("vllm target", f"{own} is not the daemon that was checked here, {target}", do)
    return ok("vllm target", own)


def _example(target: str) -> str:
    return json.dumps(
        {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"target": target},
        }
    )


def _put(found: dict[str, Any], name: str, value: Any) -> None:
    """Set an argument; "a.b" is item b of a."""
    name, *inner = name.replace("-", "_").split(".")
    for each in reversed(inner):
        value = {each: value}
    before = found.get(name)
    if isinstance(before, dict) and isinstance(value, dict):
        value = before | value
    found[name] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise click.ClickException(
            f"{path} is not JSON, and PyYAML is not installed: pip install pyyaml"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.ClickException(f"{path} is neither JSON nor YAML: {error}") from error
