"""The documentation site: what `make docs` builds from mkdocs.yml, docs/ and docs/generate.py.

The build itself, with its own look at every link, is `make docs`. What is tested here needs no
MkDocs: which pages there are, what is generated for them, and where their links lead.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import kvstore
from docs import generate
from kvstore.cli import main
from kvstore.cli.tree import walk
from kvstore.metrics import Metrics
from kvstore.model.outcome import Reason
from kvstore.settings import Settings, TenantSettings, entries
from tests.docs.examples import DOCUMENTS, ROOT

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()
PAGES = [path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md"))]
LINKING = sorted(
    {*DOCUMENTS, *ROOT.glob("*.md"), *ROOT.glob("tests/*.md"), *ROOT.glob("benchmarks/**/*.md")}
)
ALERT = re.compile(r"expr: (.*)")


def _heading_anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub, and the site's `slugify`, make of a page's headings."""
    text = generate.FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"([\w/-]+\.md)$", CONFIG.split("\nvalidation:")[0], re.MULTILINE)
    listed += generate.design_pages()
    assert sorted(f"docs/{each}" for each in listed) == PAGES


def test_a_browser_that_shows_the_site_asks_no_other_host() -> None:
    assert "font: false" in CONFIG
    assert re.findall(r"https?://", CONFIG) == []


@pytest.mark.parametrize("document", LINKING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    page = document.relative_to(ROOT).as_posix()
    for found in generate.leaving_links(document.read_text()):
        target = ROOT / generate.target_of(page, found[2])
        assert target.exists(), f"{page}: {found[2]}"
        in_docs = DOCS in target.parents
        assert not (in_docs and target.is_dir()), f"{page}: {found[2]}: the site shows no folders"
        anchor = (found[3] or "").removeprefix("#")
        if anchor and target.suffix == ".md":
            assert anchor in _heading_anchors(target), f"{page}: {found[2]}{found[3]}"


def test_a_picture_that_is_a_link_leads_where_both_of_them_do() -> None:
    page = "[![the page](benchmarks/results/demo.png)](docs/page.md#who)"
    assert [found[2] for found in generate.leaving_links(page)] == [
        "benchmarks/results/demo.png",
        "docs/page.md",
    ]
    site = "[![the page](benchmarks/results/demo.png)](../page.md#who)"
    assert generate.rewritten("README.md", page) == site


@pytest.mark.parametrize("document", LINKING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_anchors_of_the_same_page_exist(document: Path) -> None:
    anchors = _heading_anchors(document)
    assert set(re.findall(r"\]\(#([^)]+)\)", document.read_text())) <= anchors


def test_the_marks_of_all_pages_are_known() -> None:
    texts = [(ROOT / page).read_text() for page in PAGES]
    assert {name for text in texts for name, _ in generate.MARK.findall(text)} == set(
        generate.GENERATED
    )


def test_the_list_of_settings_has_every_setting() -> None:
    told = generate.settings()
    every = entries(Settings(tenants=(TenantSettings(name="name"),)))
    every = [each._replace(key=each.key.replace(".name.", ".NAME.")) for each in every]
    assert re.findall(r"^### `(.*)`$", told, re.MULTILINE) == [e.key for e in every]
    assert "Default: `10.0`." in told
    assert told.count(generate.LIVE) == sum(each.live for each in every)


def test_the_list_of_commands_has_every_command() -> None:
    told = generate.commands()
    named = re.findall(r"^##+ (kvstore .*)$", told, re.MULTILINE)
    assert named == [each.command_path for each in walk(main, "kvstore")][1:]
    assert "kvstore hint expect chat-17 --in 30" in told


def test_the_list_of_metrics_has_every_metric() -> None:
    told = re.findall(r"^\| `kvstore_(\w+)`", generate.metrics(), re.MULTILINE)
    assert len(told) == len(set(told)) > 40
    assert {"hit_blocks_total", "dirty_bytes", "rpc_seconds"} <= set(told)


def test_the_list_of_reasons_has_every_reason() -> None:
    told = re.findall(r"^\| `(\w+)`", generate.reasons(), re.MULTILINE)
    assert told == [str(reason) for reason in Reason]


def test_the_api_has_every_public_name_once() -> None:
    marks = generate.MARK.findall((DOCS / "api.md").read_text())
    listed = [each for name, wanted in marks if name == "names" for each in wanted.split()]
    assert sorted(listed) == sorted(kvstore.__all__)
    assert generate.names(*listed).count("::: kvstore.") == len(listed)


def test_alerts_name_metrics_and_labels_that_exist() -> None:
    known = {family.name: family for family in Metrics().registry.collect()}
    text = (DOCS / "operations.md").read_text()
    for expression in ALERT.findall(text):
        for name in re.findall(r"kvstore_\w+", expression):
            assert name.removesuffix("_total") in known, f"{expression}: there is no {name}"
    assert "sum(increase(" not in text  # which host it is would be lost
    metrics = Metrics()
    metrics.file_device_state.labels("/nvme0", "full").set(1)
    (sample,) = metrics.file_device_state.collect()[0].samples
    assert sample.labels == {"device": "/nvme0", "state": "full"}
    assert 'kvstore_file_device_state{state!="ok"} == 1' in text


def test_text_of_the_code_is_not_taken_for_markup() -> None:
    assert generate._text("<socket>.arena, `a_b` and a_b [N]") == (
        r"&lt;socket>.arena, `a_b` and a\_b \[N\]"
    )


def test_links_out_of_docs_lead_to_copies_in_the_site() -> None:
    text = "\n".join(
        [
            "[a](../deploy/compose.yaml) [b](../README.md#more)",
            "![c](../benchmarks/results/demo.png) [d](vllm.md#hints)",
            "[e](https://example.org/x.md) [f](#here) [g](../kvstore/cli/main.py#L7)",
            "```text",
            "[h](../README.md)",
            "```",
        ]
    )
    assert generate.rewritten("docs/install.md", text).splitlines() == [
        "[a](repository/deploy/compose.yaml.md) [b](repository/README.md#more)",
        "![c](repository/benchmarks/results/demo.png) [d](vllm.md#hints)",
        "[e](https://example.org/x.md) [f](#here) [g](repository/kvstore/cli/main.py.md#line-0-7)",
        "```text",
        "[h](../README.md)",
        "```",
    ]
    assert generate.rewritten("README.md", "[a](docs/vllm.md) [b](LICENSE)") == (
        "[a](../vllm.md) [b](LICENSE.md)"
    )


def test_a_copy_of_a_file_is_a_listing_and_of_a_folder_its_contents() -> None:
    listing = generate.copied("deploy/compose.yaml")
    assert isinstance(listing, str)
    assert (ROOT / "deploy/compose.yaml").read_text() in listing
    contents = generate.copied("kvstore/cli")
    assert isinstance(contents, str)
    assert "- `serve.py` `kvstore serve`: one daemon in the foreground." in contents
    assert isinstance(generate.copied("benchmarks/results/demo.png"), bytes)


def test_what_is_broken_in_a_built_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html">b</a><a href="b.html#none">c</a><a href="#top">d</a>'
        '<a href="gone.html">e</a><a href="https://example.org">f</a><img src="no.png">'
        '<script src="https://cdn.example.org/x.js"></script><link rel="stylesheet" href="s.css">'
    )
    (tmp_path / "b.html").write_text("<p>B</p>")
    (tmp_path / "s.css").write_text("")
    count, wrong = generate.broken(tmp_path)
    assert count == 8
    assert wrong == [
        "a.html: b.html#none has no such anchor",
        "a.html: gone.html leads nowhere",
        "a.html: no.png leads nowhere",
        "a.html: fetches https://cdn.example.org/x.js",
    ]


def test_the_extra_has_what_make_docs_calls() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.split(r"[><=]", each)[0] for each in extra["docs"]}
    assert names == {"mkdocs", "mkdocs-material", "mkdocstrings-python"}
