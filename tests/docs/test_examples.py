"""Every example of the documents and of `--help`: run where it can run here, else read as it is.

Commands of `kvstore` are run in this process against a real daemon with blocks in it; names that
stand for something (/nvme, MODEL, 5e88...) are replaced by something that is there. What cannot
run here is in READ_ONLY with the reason: its options, values and settings must exist all the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvstore import Client, KeyChain, root_key
from kvstore.cli import main
from kvstore.cli.tree import walk
from kvstore.client.request_hints import HEADERS
from kvstore.model.tenant import Role
from kvstore.settings import load_settings
from kvstore.system import fingerprints
from kvstore.system.audit_chain import Chain, audit_key
from kvstore.system.token_file import changing, make_token
from kvstore.testing.daemon import Daemon
from kvstore.testing.llamacpp import llama_site
from kvstore.testing.samples import sample_namespace, sample_records
from kvstore_lmcache.settings import Settings as LMCacheSettings
from kvstore_lmcache.settings import parse_settings as parse_lmcache_settings
from kvstore_sglang.settings import SGLANGS_OWN
from kvstore_sglang.settings import Settings as SGLangSettings
from kvstore_sglang.settings import parse_settings as parse_sglang_settings
from kvstore_trtllm.settings import Settings as TrtllmSettings
from kvstore_vllm.handoff import PREFILLER, Remote
from kvstore_vllm.hints import RequestHints
from kvstore_vllm.settings import Settings, parse_settings
from tests.cli.parse import parse
from tests.connectors.llamacpp.tiny import make_model
from tests.docs.examples import (
    DOCUMENTS,
    LANGUAGES,
    ROOT,
    Command,
    Line,
    document_lines,
    every_block,
    help_lines,
)
from tests.tls import Authority

TOKENS = list(range(4, 84))
STDIN = b"hello"
REQUEST = "chatcmpl-8c1f"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

# Not run here: the words a command begins with, and why.
READ_ONLY: dict[str, str] = {
    "kvstore bench chat": "needs a server with a model",
    "kvstore bench compare": "needs the results of two runs of it",
    "kvstore bench store": "takes minutes",
    "kvstore bench tenants": "takes minutes",
    "kvstore tenant add": "needs a daemon with tenants: see tests/server/test_tenant_admin.py",
    "kvstore tenant set": "needs a daemon with tenants: see tests/server/test_tenant_admin.py",
    "kvstore tenant delete": "needs a daemon with tenants: see tests/server/test_tenant_admin.py",
    "kvstore bench tier": "takes minutes, needs fio or a bucket",
    "kvstore bench transformers": "takes minutes",
    "kvstore bench recovery": "takes minutes",
    "kvstore bench index": "takes minutes",
    "kvstore bench cluster": "takes minutes",
    "kvstore bench events": "takes minutes, needs an indexer",
    "kvstore events register": "needs an indexer: see tests/events/test_dynamo.py",
    "kvstore events watch": "runs until Ctrl-C",
    "kvstore bench codec": "takes minutes, needs a model",
    "kvstore bench fidelity": "takes minutes, needs a model",
    "kvstore bench scrub": "takes minutes",
    "kvstore bench gpu": "needs a GPU",
    "kvstore bench peers": "takes minutes, needs other systems",
    "kvstore plan": "takes a minute",
    "kvstore trace record": "records for hours",
    "kvstore trace synth": "makes up to a million requests",
    "kvstore monitor": "runs until Ctrl-C",
    "kvstore top": "runs until Ctrl-C",
}
# Exit code 1 of these says that nothing was found, or that something is to be mended.
MAY_FIND_NOTHING = {"doctor", "explain", "hint", "get", "delete", "tree"}
# Other programs: nothing of ours is in their arguments, or a check below looks for it.
PROGRAMS = {
    "cp", "docker", "echo", "export", "jq", "kill", "man", "mkdir", "sha256sum", "source", "sudo",
    "helm", "kubectl", "mooncake_master", "systemctl", "tee",
}  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture(scope="module")
def tried() -> Iterator[Daemon]:
    """Another one, for examples that make namespaces: elsewhere a key must say which it is of."""
    with Daemon() as daemon:
        yield daemon.start()


class Secured:
    """A daemon that speaks TLS and asks for a token, and files for its clients."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        pair, (text, entry) = self.authority.issue("server"), make_token("default", Role.WRITER)
        self.token = directory / "token"
        self.token.write_text(text)
        with changing(directory / "tokens") as entries:
            entries.append(entry)
        self.daemon = Daemon(
            "server.listen=127.0.0.1:0",
            f"tls.cert={pair.cert}",
            f"tls.key={pair.key}",
            f"security.tokens={directory}/tokens",
            file=False,
        )


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    secured = Secured(tmp_path_factory.mktemp("secured"))
    with secured.daemon.start():
        yield secured


@pytest.fixture
def place(
    daemon: Daemon, secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """A directory with what examples name; returns what to replace in them, longest first."""
    namespace = sample_namespace()
    keys = KeyChain(root_key(namespace.id), namespace.block_tokens).update(TOKENS)
    with Client(daemon.target) as client:
        client.register(namespace)
        client.put(namespace.id, keys, sample_records(keys), durable=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVSTORE_TARGET", daemon.target)
    _fill(tmp_path)
    shutil.copytree(daemon.directory / "file", tmp_path / "unused")
    return {
        "unix:/run/kvstore/kvstore.sock": daemon.target,
        "/run/kvstore/kvstore.sock": str(daemon.socket),
        "unix:/run/kvstore/acme/kvstore.sock": daemon.target,
        "/etc/kvstore.toml": str(tmp_path / "kvstore.toml"),
        "/etc/kvstore/ca.pem": str(secured.authority.ca),
        "/etc/kvstore/tokens": str(tmp_path / "tokens"),
        "/var/log/kvstore/": f"{tmp_path}/log/",
        "kv.example.com:7700": secured.daemon.address,
        "engine.token": str(secured.token),
        "/var/lib/kvstore": str(daemon.directory / "file"),
        "/nvme/kvstore": str(daemon.directory / "file"),
        "/mnt/nvme0/kv": str(daemon.directory / "file"),
        "/mnt/nvme1/kv": str(daemon.directory / "file"),
        "/mnt/nvme0": str(tmp_path),
        "/nvme0": str(tmp_path),
        "/nvme1": str(tmp_path),
        "/nvme": str(tmp_path),
        "/models/Llama-3.1-8B": str(tmp_path / "model"),
        "/models/llama": str(tmp_path / "model"),
        "/models/gemma": str(tmp_path / "model"),
        "/tmp/": f"{tmp_path}/",
        "~/": f"{tmp_path}/",
        "lmcache=peers/bin/python": "lmcache=/bin/sh",
        "5e88...": namespace.id.hex(),
        "5e88": namespace.id.hex(),
        "0a1b...": keys[0].hex(),
        "2c3d...": keys[1].hex(),
        f"{REQUEST}...": REQUEST,
    }


def _fill(directory: Path) -> None:
    """Write the files that examples read."""
    model = directory / "model"
    model.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
    }
    for target in (model / "config.json", directory / "config.json"):
        target.write_text(json.dumps(config))
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, **{f"t{token}": token for token in TOKENS}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    text = " ".join(f"t{token}" for token in TOKENS)
    for name in ("prompt.txt", "system.txt"):
        (directory / name).write_text(text)
    (directory / "tokens.json").write_text(json.dumps(TOKENS))
    (directory / "block.bin").write_bytes(STDIN)
    security = [
        f"security.audit={directory}/log/audit.jsonl",
        f"security.tokens={directory}/tokens",
    ]
    (directory / "kvstore.toml").write_text(load_settings(None, security).to_toml())
    (directory / "log").mkdir()
    chain = Chain(audit_key(directory / "log/audit.jsonl.key", make=True))
    for name in ("audit.jsonl.1", "audit.jsonl"):
        (directory / "log" / name).write_bytes(chain.line({"event": "start"}, follows=True))
    (directory / "vllm.yaml").write_text("model: MODEL\n")
    for name in ("chats.json", "mooncake.jsonl.gz", "generate_multi_turn.json"):
        (directory / name).write_text("")
    made = str(directory / "made.jsonl")
    assert CliRunner().invoke(main, ["trace", "synth", made, "--requests", "50"]).exit_code == 0
    chats = ("trace.jsonl", "trace.jsonl.gz", "monday.jsonl.gz", "now.jsonl.gz")
    kinds = {"70b.jsonl.gz": "chat", "1b.jsonl.gz": "chat", "both.jsonl.gz": "models-chat"}
    for name, kind in {**dict.fromkeys(chats, "chat"), **kinds}.items():
        synth = ["trace", "synth", str(directory / name), "--requests", "50", "--kind", kind]
        assert CliRunner().invoke(main, synth).exit_code == 0


def _targets(target: str) -> dict[str, Any]:
    """Return click's default map: every command asks this daemon."""
    found: dict[str, Any] = {}
    for context in walk(main, "kvstore"):
        if any(parameter.name == "target" for parameter in context.command.params):
            inner = found
            for name in context.command_path.split()[1:]:
                inner = inner.setdefault(name, {})
            inner["target"] = target
    return found


@pytest.mark.parametrize("line", [*document_lines(), *help_lines()], ids=str)
def test_a_line_of_shell(
    line: Line, daemon: Daemon, tried: Daemon, place: dict[str, str], tmp_path: Path
) -> None:
    assert line.commands, "nothing is called"
    if re.search(r"kvstore (put|selftest)|--tokens", line.text):
        daemon = tried
    if "kvstore gc" in line.text:  # of a directory that no daemon uses
        place |= {name: str(tmp_path / "unused") for name in ("/var/lib/kvstore", "/nvme/kvstore")}
    if re.search(r"kvstore key|gc --seal|--root-key-file", line.text):
        place |= _encrypted(tmp_path, line.text)
    for command in line.commands:
        words = [_put_in_place(word, place) for word in command.words]
        output = _put_in_place(command.output, place)
        if words[0] == "kvstore":
            _kvstore(Command(tuple(words), output), line, daemon)
        else:
            _another_program(words)


def _encrypted(directory: Path, text: str) -> dict[str, str]:
    """Make root keys and an encrypted directory, unless that is what the line does."""
    keys, tier = directory / "keys", directory / "unused"
    keys.mkdir()
    names = () if "key create" in text else ("kvstore.key", "new.key")
    for name in names:
        assert CliRunner().invoke(main, ["key", "create", str(keys / name)]).exit_code == 0
    if names and "--seal" not in text:
        seal = ["gc", "--seal", str(tier), "--root-key-file", str(keys / "kvstore.key")]
        assert CliRunner().invoke(main, seal).exit_code == 0
    overrides = [f"file.path={tier}", f"security.root_key_file={keys / 'kvstore.key'}"]
    (directory / "kvstore.toml").write_text(load_settings(None, overrides).to_toml())
    return {"/mnt/keys": str(keys), "/var/lib/kvstore": str(tier)}


def _put_in_place(word: str, place: Mapping[str, str]) -> str:
    for name, real in place.items():
        if name in word and not any(real in word for real in place.values()):
            word = word.replace(name, real)
    return word


def _kvstore(command: Command, line: Line, daemon: Daemon) -> None:
    words = list(command.words)
    context = parse(words)
    if any(" ".join(words).startswith(name) for name in READ_ONLY):
        return
    if context.command.name == "serve":
        words.append("--print-config")  # reads every setting, and ends
    if context.command.name == "clear" and "--yes" not in words:
        words.append("--yes")
    if words[1:3] == ["config", "set"]:  # not every machine has this much memory
        words = [re.sub(r"(dram.capacity)=\d+GiB", r"\1=96MiB", word) for word in words]
    ran = CliRunner().invoke(
        main, words[1:], prog_name="kvstore", default_map=_targets(daemon.target), input=STDIN
    )
    nothing = {1} if words[1] in MAY_FIND_NOTHING else set()
    assert ran.exit_code in {0} | nothing, f"{line}\n{ran.output}\n{ran.exception!r}"
    assert ran.exception is None or isinstance(ran.exception, SystemExit), repr(ran.exception)
    if command.output:
        Path(command.output).parent.mkdir(parents=True, exist_ok=True)
        Path(command.output).write_bytes(ran.stdout_bytes)


def _another_program(words: list[str]) -> None:
    while re.match(r"[A-Z_]+=", words[0]):  # a variable for this program
        words = words[1:]
    program, text = words[0].rpartition("/")[2], " ".join(words)
    for extras in re.findall(r"(?:kvstore-tiers|\.whl|\.)\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= set(EXTRAS), f"no such extra: {extras}"
    if program == "make":
        targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
        assert {word for word in words[1:] if "=" not in word} <= targets
    elif program == "vllm":
        _vllm(words)
    elif program == "lmcache":
        _lmcache(words)
    elif program in ("python", "python3"):
        assert words[1] == "-m"
        if words[2] == "sglang.launch_server":  # it is in a folder of its own
            _sglang(words)
        else:
            assert importlib.util.find_spec(words[2]) is not None
    elif program != "pip":
        assert program in PROGRAMS, f"{program}: not known here"


def _lmcache(words: list[str]) -> None:
    adapter = json.loads(words[words.index("--l2-adapter") + 1])
    assert adapter["class_name"] in importlib.import_module(adapter["module_path"]).__all__
    parse_lmcache_settings(adapter["adapter_params"], "adapter_params")


def _sglang(words: list[str]) -> None:
    extra = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    assert extra["class_name"] in importlib.import_module(extra["module_path"]).__all__
    assert set(extra) & set(SGLANGS_OWN) >= {"backend_name", "interface_v1"}
    parse_sglang_settings(extra)


def _vllm(words: list[str]) -> None:
    if "--kv-transfer-config" in words:
        _transfer(json.loads(words[words.index("--kv-transfer-config") + 1]))
    if "--middleware" in words:
        module, _, name = words[words.index("--middleware") + 1].rpartition(".")
        assert hasattr(importlib.import_module(module), name)


def _transfer(config: dict[str, Any]) -> None:
    """Check a kv_transfer_config as vLLM hands it to the connectors."""
    extra = config.get("kv_connector_extra_config", {})
    if config["kv_connector"] == "KVStoreConnector":
        parse_settings(extra)
        assert config["kv_load_failure_policy"] == "recompute"
    for below in extra.get("connectors", ()):
        _transfer(below)
    for tier in extra.get("secondary_tiers", ()):
        pytest.importorskip("vllm")
        from kvstore_vllm.tier import TierSettings

        assert tier.pop("type") == "kvstore"
        msgspec.convert(tier, TierSettings)


def test_every_block_says_its_language() -> None:
    assert [each.place for each in every_block() if each.language not in LANGUAGES] == []


def test_what_is_only_read_is_still_there() -> None:
    lines = [*document_lines(), *help_lines()]
    calls = [" ".join(command.words) for line in lines for command in line.commands]
    assert [name for name in READ_ONLY if not any(call.startswith(name) for call in calls)] == []


@pytest.mark.parametrize("block", every_block("json"), ids=lambda block: block.place)
def test_a_block_of_json(block: Any) -> None:
    text = block.text.strip()
    found = json.loads(text if text.startswith("{") else f"{{{text}}}")
    if "kv_connector" in found:
        _transfer(found)
    elif PREFILLER in found["kv_transfer_params"]:
        msgspec.convert(found["kv_transfer_params"][PREFILLER], Remote)
    else:
        msgspec.convert(found["kv_transfer_params"]["kvstore"], RequestHints)


@pytest.mark.parametrize("block", every_block("yaml"), ids=lambda block: block.place)
def test_a_block_of_alerts_of_a_pod_or_of_lmcache(block: Any) -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(block.text)
    if "spec" in found:
        mounts = found["spec"]["containers"][0]["volumeMounts"]
        assert {"name": "kvstore", "mountPath": "/run/kvstore"} in mounts
        (config,) = re.findall(r"--kv-transfer-config=(\{.*\})", block.text)
        _transfer(json.loads(config))
        return
    if "extra_config" in found:
        prefix = "remote_storage_plugin.kvstore."
        given = {name.removeprefix(prefix): value for name, value in found["extra_config"].items()}
        module = importlib.import_module(given.pop("module_path"))
        assert given.pop("class_name") in module.__all__
        parse_lmcache_settings(given, prefix)
        return
    if "kv_connector_config" in found:
        connector = found["kv_connector_config"]
        module = importlib.import_module(connector["connector_module"])
        assert {connector[f"connector_{half}_class"] for half in ("scheduler", "worker")} == set(
            module.__all__
        )
        return
    (group,) = found["groups"]
    for rule in group["rules"]:
        assert rule["alert"].startswith("KVStore")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["expr"]


@pytest.mark.parametrize("block", every_block("toml"), ids=lambda block: block.place)
def test_a_block_of_settings(block: Any, tmp_path: Path) -> None:
    (tmp_path / "kvstore.toml").write_text(block.text)
    load_settings(tmp_path / "kvstore.toml", ())


@pytest.mark.parametrize("block", every_block("python"), ids=lambda block: block.place)
def test_a_block_of_python(
    block: Any,
    daemon: Daemon,
    secured: Secured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run as it is written, but for addresses, files and the model."""
    code = block.text.replace("unix:/run/kvstore/kvstore.sock", daemon.target)
    code = code.replace("kv.example.com:7700", secured.daemon.address)
    code = code.replace("engine.token", str(secured.token))
    code = code.replace("/etc/kvstore/ca.pem", str(secured.authority.ca))
    if "from_pretrained" in code:
        torch = pytest.importorskip("torch")
        from tests.connectors.vllm.tiny_models import make_llama, make_tokenizer

        torch.manual_seed(7)
        make_llama().save_pretrained(tmp_path / "model")
        make_tokenizer().save_pretrained(tmp_path / "model")
        assert "Qwen/Qwen3-0.6B" in code
        code = code.replace("Qwen/Qwen3-0.6B", str(tmp_path / "model"))
    if "kvstore_llamacpp" in code:
        _llama(tmp_path / "model.gguf", monkeypatch)
        code = code.replace("model.gguf", str(tmp_path / "model.gguf"))
    exec(compile(code, block.place, "exec"), {"__name__": "__main__"})


def _llama(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a tiny GGUF that counts as older than this process. Skips without llama-cpp-python."""
    site = llama_site()
    if site is None:
        pytest.skip("llama-cpp-python is not here: run `make setup-llamacpp`")
    pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(fingerprints, "process_began", lambda: time.time() + 60)
    make_model(model, "llama")


def _first_column(header: str) -> set[str]:
    """Return the code in the first column of the table that begins with this header."""
    text = next(document.read_text() for document in DOCUMENTS if header in document.read_text())
    rows = text.partition(header)[2].split("\n\n")[0].splitlines()[2:]
    return set(re.findall(r"`([\w-]+)(?:: [^`]*)?`", " ".join(row.split("|")[1] for row in rows)))


def test_the_table_of_the_connectors_settings_is_complete() -> None:
    names = _first_column("| `kv_connector_extra_config` | default |")
    assert names == set(Settings.__struct_fields__)


def test_the_table_of_lmcaches_settings_is_complete() -> None:
    names = _first_column("| setting of LMCache's | default |")
    assert names == set(LMCacheSettings.__struct_fields__)


def test_the_table_of_sglangs_settings_is_complete() -> None:
    names = _first_column("| setting of SGLang's | default |")
    assert names == set(SGLangSettings.__struct_fields__)


def test_the_table_of_tensorrt_llms_settings_is_complete() -> None:
    names = _first_column("| key of `TRTLLM_KVSTORE` | default |")
    assert names == set(TrtllmSettings.__struct_fields__)


def test_the_table_of_hints_is_complete() -> None:
    assert _first_column("| field | when the request has finished |") == set(
        RequestHints.__struct_fields__
    )


def test_the_headers_of_hints_are_those_that_are_read() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    named = {name.lower() for name in re.findall(r"`(X-Session-[\w-]+)", text)}
    assert named == {name.decode() for name in HEADERS}


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs"])
def test_settings_that_documents_name_exist(document: str) -> None:
    paths = sorted((ROOT / document).rglob("*.md")) if document == "docs" else [ROOT / document]
    known = tomllib.loads(load_settings(None, ()).to_toml())
    for path in paths:
        for section, name in re.findall(rf"`({'|'.join(known)})\.(\w+)[`=]", path.read_text()):
            assert name in known[section], f"{path.name}: there is no setting {section}.{name}"


def test_the_table_of_extras_is_complete() -> None:
    assert _first_column("| extra | for |") == set(EXTRAS)


def test_the_extras_that_documents_name_exist() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    named = {
        name
        for each in re.findall(r"(?:kvstore-tiers|pip install '\.)\[([\w,]+)\]", text)
        for name in each.split(",")
    }
    assert {"web", "pool"} <= named
    assert named <= {*EXTRAS, "X"}  # X stands for any of them
