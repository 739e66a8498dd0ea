"""Signatures of an engine's classes, read from its sources: nothing of the engine is imported.

A connector stands on classes of an engine whose wheel may need a GPU to be imported, or gigabytes
to be there at all. What it uses of them is kept as facts of a version, in JSON, and compared with
the connector's own sources.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, TypedDict


class Facts(TypedDict):
    """What a class offers. methods: their parameters by name, "x=" with a default, "*", "*args" and
    "**kwargs" as they are written. abstract: methods a subclass has to have. fields: attributes
    that are declared in the body, members of an enumeration among them."""

    methods: dict[str, list[str]]
    abstract: list[str]
    fields: list[str]


def class_facts(path: Path, name: str) -> Facts:
    """Return what a class and its bases in the same file offer. Raises KeyError without it."""
    classes = {
        node.name: node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    return _facts(classes, name)


def function_facts(path: Path, name: str) -> list[str]:
    """Return the parameters of a function. Raises KeyError without it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return parameters(node)
    raise KeyError(name)


def _facts(classes: dict[str, ast.ClassDef], name: str) -> Facts:
    tree = classes[name]
    found: Facts = {"methods": {}, "abstract": [], "fields": []}
    for base in tree.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            inherited = _facts(classes, base.id)
            found["methods"].update(inherited["methods"])
            found["abstract"] += inherited["abstract"]
            found["fields"] += inherited["fields"]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found["methods"][node.name] = parameters(node)
            if node.name in found["abstract"]:
                found["abstract"].remove(node.name)
            if any("abstractmethod" in ast.unparse(each) for each in node.decorator_list):
                found["abstract"].append(node.name)
        found["fields"] += _declared(node)
    found["fields"] = sorted(set(found["fields"]))
    found["abstract"].sort()
    return found


def _declared(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [each.id for each in node.targets if isinstance(each, ast.Name)]
    if isinstance(node, ast.FunctionDef) and node.name == "__init__":
        return [
            each.attr
            for inner in ast.walk(node)
            for each in _targets(inner)
            if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
        ]
    return []


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the parameters of a function, without its own object."""
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    plain = len(names) - len(given.defaults)
    found = [name if at < plain else f"{name}=" for at, name in enumerate(names)]
    if given.vararg:
        found.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        found.append("*")
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(f"{each.arg}=" if default is not None else each.arg)
    if given.kwarg:
        found.append(f"**{given.kwarg.arg}")
    return found[1:] if found[:1] in (["self"], ["cls"]) else found


def takes(own: list[str], called: list[str]) -> bool:
    """Say whether a method takes every call that one with the parameters `called` takes."""
    has_rest = any(each.startswith("**") for each in own)
    if any(each.startswith("**") for each in called):
        return has_rest and takes(own, called[:-1])
    at = 0
    for each in called:
        if each.startswith("*"):
            return own[at:] == called[at:]
        here = own[at : at + 1]
        if here and here[0].rstrip("=") == each.rstrip("="):
            if each.endswith("=") and not here[0].endswith("="):
                return False
            at += 1
        else:
            return has_rest or bool(here and here[0].startswith("*") and len(here[0]) > 1)
    return all(each.startswith("*") or each.endswith("=") for each in own[at:])


def gather(folder: Path, wanted: dict[str, dict[str, list[str]]]) -> dict[str, Any]:
    """Return the facts of classes, by "file:class", and of functions, by "file:function()"."""
    found: dict[str, Any] = {}
    for file, names in wanted.items():
        for name in names["classes"]:
            found[f"{file}:{name}"] = class_facts(folder / file, name)
        for name in names.get("functions", []):
            found[f"{file}:{name}()"] = function_facts(folder / file, name)
    return found


def to_text(facts: Any) -> str:
    """Return facts as JSON, a list on one line."""
    text = json.dumps(facts, indent=1, sort_keys=True)
    return re.sub(r"\[\n[^\[\]]*\]", lambda found: re.sub(r"\n\s*", " ", found[0]), text)
