"""What the documentation site adds to the pages of docs/, as hooks of MkDocs.

- Marks such as `<!-- generated: settings -->` are replaced by lists that are made from the
  declarations in the code, so that they are never out of date.
- Links from a page to a file or folder of the repository outside docs/ lead to a copy of it in the
  site: pages of Markdown as pages, images as they are, folders and other files as listings.
- The navigation gets the pages of docs/design, and those of the repository's root.
- After the build every link, image, style sheet and script of every page is looked up: those that
  lead nowhere, and those that a browser would fetch from another host, are warnings.
"""

from __future__ import annotations

import inspect
import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, is_dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import click
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
COPIES = "repository"  # folder of the site for what is outside docs/
# Pages at the root of the repository that the site has as well, where they exist.
PROJECT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
READ_FIRST = ("life-of-a-put", "life-of-a-get", "formats", "failure-model")  # of docs/design
MARK = re.compile(r"^<!-- generated: (\w+)((?: \w+)*) -->$", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2`*$", re.MULTILINE | re.DOTALL)
IMAGES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".cu": "cuda"}
LIVE = "It can change while the daemon runs."

logger = logging.getLogger("mkdocs.plugins.kvstore")


# ---- lists made from the code --------------------------------------------------------------------


def settings() -> str:
    """Return every setting: its key, default and description, by section."""
    from kvstore.settings import Settings, TenantSettings
    from kvstore.settings.values import declared, toml_key, toml_value

    named = Settings().sections()
    tenant = TenantSettings(name="NAME")
    lines: list[str] = []
    for name, section in [*named, (f"tenants.{tenant.name}", tenant)]:
        lines += [f"## {name}", "", _text(inspect.getdoc(type(section)) or ""), ""]
        for item in declared(section):
            value = toml_value(item, getattr(section, item.name))
            found = f"`{value}`" if item.default_factory is MISSING else "depends on the user"
            live = f" {LIVE}" if item.metadata["live"] else ""
            lines += [f"### `{name}.{toml_key(item)}`", "", f"Default: {found}.{live}", ""]
            lines += [_text(item.metadata["doc"]), ""]
    return "\n".join(lines)


def commands() -> str:
    """Return the help of every command."""
    from kvstore.cli import main
    from kvstore.cli.tree import walk

    return "\n".join(line for context in walk(main, "kvstore") for line in _command(context))


def metrics() -> str:
    """Return every metric: its name, type and what it counts."""
    from kvstore.metrics import PREFIX, Metrics

    lines = ["| metric | type | |", "| --- | --- | --- |"]
    for family in Metrics().registry.collect():
        if family.name.startswith(PREFIX):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            lines.append(f"| `{name}` | {family.type} | {_text(family.documentation)} |")
    return "\n".join(lines)


def reasons() -> str:
    """Return why a hit can end, and what `kvstore explain` advises."""
    from kvstore.model.outcome import Reason
    from kvstore.model.words import advice_text, reason_text

    lines = ["| reason | `kvstore explain` says | what to do |", "| --- | --- | --- |"]
    for reason in Reason:
        said = reason_text(reason, 3600.0), advice_text(reason) or "nothing"
        lines.append(f"| `{reason}` | {' | '.join(map(_text, said))} |")
    return "\n".join(lines)


def names(*wanted: str) -> str:
    """Return what mkdocstrings replaces by the documentation of some of the public names."""
    return "\n\n".join(map(_name, wanted))


def _name(name: str) -> str:
    """Of a class of fields, its signature lists them; only documented members follow."""
    import kvstore

    found = getattr(kvstore, name)
    has_fields = is_dataclass(found) or hasattr(found, "_fields")
    options = "\n    options:\n      show_if_no_docstring: false" if has_fields else ""
    return f"::: kvstore.{name}{options}"


GENERATED: dict[str, Callable[..., str]] = {
    "settings": settings,
    "commands": commands,
    "metrics": metrics,
    "reasons": reasons,
    "names": names,
}


def _command(context: click.Context) -> Iterator[str]:
    command = context.command
    depth = min(3, context.command_path.count(" ") + 1)
    if depth > 1:
        yield from (f"{'#' * depth} {context.command_path}", "")
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))
    for number, paragraph in enumerate(paragraphs):
        if paragraph.startswith("\b"):
            yield from ("```text", inspect.cleandoc(paragraph.removeprefix("\b\n")), "```", "")
        else:
            yield from (_text(" ".join(paragraph.split())), "")
        if number == 0:
            yield from ("```text", usage, "```", "")
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            yield from (f"`{record[0]}`", f":   {_text(record[1])}", "")


def _text(text: str) -> str:
    """Return a text in which Markdown finds code between backticks, and nothing else."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part
        if part.startswith("`")
        else re.sub(r"([\\*_|\[\]])", r"\\\1", part.replace("<", "&lt;"))
        for part in parts
    )


# ---- links out of docs/ --------------------------------------------------------------------------


def leaving_links(markdown: str) -> Iterator[re.Match[str]]:
    """Yield the links of a page to files: (lead, path, anchor, end). Code blocks have none."""
    code = [(found.start(), found.end()) for found in FENCE.finditer(markdown)]
    for found in LINK.finditer(markdown):
        if not any(begin <= found.start() < end for begin, end in code):
            yield found


def target_of(page: str, link: str) -> str:
    """Return the path in the repository to which a link of a page there leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(link)))


def uri_of(target: str) -> str:
    """Return the path in the site of something in the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if (ROOT / target).is_dir():
        readme = f"{target}/README.md"
        return f"{COPIES}/{readme}" if (ROOT / readme).exists() else f"{COPIES}/{target}/index.md"
    as_it_is = Path(target).suffix in {".md", *IMAGES}
    return f"{COPIES}/{target}" if as_it_is else f"{COPIES}/{target}.md"


def path_of(uri: str) -> str:
    """Return the path in the repository of a page of Markdown of the site."""
    return uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else f"docs/{uri}"


def copied(target: str) -> str | bytes:
    """Return the content of the site's copy of something outside docs/."""
    path = ROOT / target
    if path.is_dir():
        readme = path / "README.md"
        return readme.read_text() if readme.exists() else _listing(path)
    if path.suffix in IMAGES:
        return path.read_bytes()
    text = path.read_text()
    return text if path.suffix == ".md" else _source(path, text)


def _source(path: Path, text: str) -> str:
    ticks = "`" * 4
    head = f"---\nsearch:\n  exclude: true\n---\n# {path.relative_to(ROOT)}\n\n"
    language = LANGUAGES.get(path.suffix, "text")
    return f'{head}{ticks}{language} linenums="1"\n{text}\n{ticks}\n'


def _listing(path: Path) -> str:
    """Return the files of a folder, with the first line of what each says of itself."""
    lines = ["---", "search:", "  exclude: true", "---", f"# {path.relative_to(ROOT)}", ""]
    for each in sorted(path.iterdir()):
        if not each.name.startswith((".", "__pycache__")):
            about = each / "__init__.py" if each.is_dir() else each
            text = about.read_text() if about.suffix == ".py" and about.exists() else ""
            found = re.match(r'"""(.*?)("""|$)', text, re.M)
            lines.append(f"- `{each.name}` {_text(found[1]) if found else ''}")
    return "\n".join(lines)


def rewritten(page: str, markdown: str) -> str:
    """Return a page of the repository with its links to files as they are in the site."""
    uri = uri_of(page)
    made, at = [], 0
    for found in leaving_links(markdown):
        target = target_of(page, found[2])
        link = posixpath.relpath(uri_of(target), posixpath.dirname(uri) or ".")
        anchor = re.sub(r"^#L(\d+).*$", r"#line-0-\1", found[3] or "")
        made += [markdown[at : found.start()], found[1], link, anchor, found[4]]
        at = found.end()
    return "".join([*made, markdown[at:]])


# ---- the built site ------------------------------------------------------------------------------


class _Built(HTMLParser):
    """The links of a built page, its anchors, and what a browser fetches to show it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = {"", "__skip"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(given.get("href", ""))
        elif "src" in given:
            self.fetched.append(given["src"])


def broken(site: Path) -> tuple[int, list[str]]:
    """Return how many links the pages of a built site have, and what is wrong with some."""
    pages = {path: _Built(path.read_text()) for path in sorted(site.rglob("*.html"))}
    count, wrong = 0, []
    for path, page in pages.items():
        about = path.relative_to(site)
        for link in page.links + page.fetched:
            count += 1
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                if link in page.fetched:
                    wrong.append(f"{about}: fetches {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if path.name == "404.html" or (target.is_dir() and (target / "index.html").exists()):
                continue
            if not target.exists():
                wrong.append(f"{about}: {link} leads nowhere")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{about}: {link} has no such anchor")
    return count, wrong


# ---- hooks of MkDocs -----------------------------------------------------------------------------


def design_pages() -> list[str]:
    """Return the pages about the design, as paths in the site, in the order they are read."""
    found = {path.stem for path in (ROOT / "docs/design").glob("*.md")}
    ordered = [*READ_FIRST, *sorted(found.difference(READ_FIRST))]
    pages = ["first-afternoon.md", *(f"design/{name}.md" for name in ordered)]
    return [page for page in pages if (ROOT / "docs" / page).exists()]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add to the navigation what follows from the files that exist."""
    architecture, *others = (f"{COPIES}/{page}" for page in PROJECT if (ROOT / page).exists())
    config.nav = [
        *(config.nav or []),
        {"Design": [architecture, *design_pages()]},
        {"Project": others},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside docs/, and what that links to."""
    from mkdocs.structure.files import File, InclusionLevel

    known = {each.src_uri for each in files}
    waiting = [(path_of(each.src_uri), each.content_string) for each in files.documentation_pages()]
    waiting.append(("project.md", "".join(f"[]({page})" for page in PROJECT)))
    while waiting:
        page, markdown = waiting.pop()
        for found in leaving_links(markdown):
            target = target_of(page, found[2])
            uri = uri_of(target)
            if uri in known or not (ROOT / target).exists() or target.startswith("docs/"):
                continue
            known.add(uri)
            content = copied(target)
            made: File = File.generated(config, uri, content=content)
            if target not in PROJECT:
                made.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(made)
            if isinstance(content, str):
                waiting.append((path_of(uri), content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put in what is generated, and lead links out of docs/ to the copies."""
    written = rewritten(path_of(page.file.src_uri), markdown)
    return MARK.sub(lambda found: GENERATED[found[1]](*found[2].split()), written)


def on_post_build(config: MkDocsConfig) -> None:
    """Look every link up."""
    count, wrong = broken(Path(config.site_dir))
    for each in wrong:
        logger.warning(each)
    pages = len(list(Path(config.site_dir).rglob("*.html")))
    logger.info(f"{pages} pages, {count} links, {len(wrong)} broken")
