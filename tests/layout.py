"""Does the layout still explain itself? `python -m tests.layout` counts what makes it hard to read.

It looks at everything that is shipped: kvstore, connectors, kernels, benchmarks; not at tests and
not at generated code. Exit status 1 if a bound is passed.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("kvstore", "connectors", "kernels", "benchmarks")
GENERATED = (ROOT / "kvstore/rpc/v1", ROOT / "kvstore/rpc/etcd")

MODULES_MAX = 5  # directly in kvstore/, beside the packages
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
PUBLIC_METHODS_MAX = 20
REASON = "One idea:"  # a longer file says in its docstring why it is one


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not set(GENERATED) & set(path.parents):
                yield path


def public_methods(tree: ast.ClassDef) -> int:
    """Count the methods and properties that callers may use; a setter is its property."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    names = {each.name for each in tree.body if isinstance(each, kinds)}
    return len([name for name in names if not name.startswith("_")])


def function_lines(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (tree.end_lineno or 0) - tree.lineno + 1


def long_files() -> dict[str, int]:
    found = {}
    for path in sources():
        text = path.read_text()
        lines = len(text.splitlines())
        if lines > FILE_LINES_MAX and REASON not in (ast.get_docstring(ast.parse(text)) or ""):
            found[str(path.relative_to(ROOT))] = lines
    return found


def long_functions() -> dict[str, int]:
    return {
        f"{path.relative_to(ROOT)}:{each.name}": function_lines(each)
        for path in sources()
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and function_lines(each) > FUNCTION_LINES_MAX
    }


def wide_classes() -> dict[str, int]:
    return {
        f"{path.relative_to(ROOT)}:{each.name}": public_methods(each)
        for path in sources()
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.ClassDef) and public_methods(each) > PUBLIC_METHODS_MAX
    }


def modules() -> list[str]:
    return sorted(path.name for path in (ROOT / "kvstore").glob("*.py"))


def layout() -> dict[str, object]:
    """Return what passes a bound, by name, with its size."""
    beside = [name for name in modules() if name != "__init__.py"]
    return {
        "modules": beside,
        "modules_over": max(0, len(beside) - MODULES_MAX),
        "long_files": long_files(),
        "long_functions": long_functions(),
        "wide_classes": wide_classes(),
    }


def holds(found: dict[str, object]) -> bool:
    return not any(value for name, value in found.items() if name != "modules")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    found = layout()
    print(json.dumps(found, indent=2))
    return 0 if holds(found) else 1


if __name__ == "__main__":
    sys.exit(main())
