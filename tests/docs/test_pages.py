"""What the pages tell people to type, and what is where, fits the chart, the units and the code."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import kvstore
from kvstore.settings import Settings
from tests.docs.examples import DOCUMENTS, ROOT

DOCS = ROOT / "docs"


def _section(page: Path, heading: str) -> str:
    _, _, rest = page.read_text().partition(f"\n## {heading}\n")
    assert rest, f"{page.name} has no section {heading}"
    return rest.partition("\n## ")[0]


def test_probes_are_those_of_the_chart() -> None:
    chart = (ROOT / "helm/kvstore/templates/daemonset.yaml").read_text()
    probed = set(re.findall(r"httpGet: \{path: (/\w+)", chart))
    told = " ".join(_section(DOCS / "daemon.md", "Probes and metrics").split())
    assert probed == {"/healthz", "/readyz"}
    assert all(f"`{path}`" in told for path in probed)
    # Its exit code counts what was wrong since the start, so it would never be ready again.
    assert "Do not use `kvstore status` as a probe" in told
    assert "exec probe" not in told


def test_nobody_is_sent_to_an_index_that_has_no_such_package() -> None:
    for document in DOCUMENTS:
        found = re.findall(r"pip install '?kvstore[\w-]*(?:\[[\w,]+\])?'?", document.read_text())
        allowed = ["pip install 'kvstore-tiers[X]'"] if document.name == "install.md" else []
        assert found == allowed, document.name


def test_commands_of_a_unit_are_found_where_it_is_installed() -> None:
    commands = _section(DOCS / "install.md", "systemd").partition("```bash")[2].partition("```")[0]
    before, found, _ = commands.partition("\nkvstore ")
    assert found
    assert "\nexport PATH=/opt/kvstore/bin:$PATH" in before


def test_the_first_page_leads_to_every_page_of_the_navigation() -> None:
    listed = set(re.findall(r"^ +- (?:\w+: )?(\w+(?:-\w+)*\.md)$", _navigation(), re.MULTILINE))
    linked = set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / "index.md").read_text()))
    assert listed - linked == {"index.md"}


def _navigation() -> str:
    return (ROOT / "mkdocs.yml").read_text().split("\nvalidation:")[0]


def test_the_api_describes_each_thing_once_and_all_that_calls_take() -> None:
    named = re.findall(r"^::: (kvstore\.[\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    classes = [_resolved(each) for each in named]
    assert len(classes) == len(set(classes))
    assert {"BlockTokens", "Pieces"} <= set(kvstore.__all__)
    assert all(hasattr(kvstore, name) for name in kvstore.__all__)


def _resolved(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def test_kv_that_is_left_behind_is_told() -> None:
    told = _section(DOCS / "kubernetes.md", "Uninstall")
    assert "/var/lib/kvstore" in told
    assert "kvstore clear --all --yes" in told
    assert "deleted blocks may" in _section(DOCS / "operations.md", "Backup")


def test_ports_are_the_defaults() -> None:
    ports = set(re.findall(r"\b\d{4}\b", _ports()))
    assert ports == {"7700", "7701", "7702", "5567", "5568"}
    settings = Settings()
    assert settings.server.metrics_listen.endswith(":7701")
    assert (settings.server.listen, settings.cluster.listen, settings.events.publish) == ("",) * 3


def _ports() -> str:
    """Return the table of ports."""
    return _section(DOCS / "security.md", "Who may ask").partition("| port |")[2].split("\n\n")[0]
