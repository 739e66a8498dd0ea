"""Check the chart, and write what was found as JSON: `python -m tests.helm.check --json FILE`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

BEGAN = time.perf_counter()

from tests.helm.chart import (  # noqa: E402 - importing them is part of what it takes
    VALUES,
    accepted_typos,
    invalid,
    lint,
    problems,
    render,
    values_of,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path: Path = parser.parse_args().json
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    for each in VALUES:
        values = values_of(each)
        rendered = render(values)
        kinds.update(found["kind"] for found in rendered.objects)
        found = [*lint(values), *invalid(rendered.objects), *problems(rendered)]
        wrong += [f"{each.name}: {told}" for told in found]
    seconds = time.perf_counter() - BEGAN
    accepted, tried = accepted_typos()
    result = {
        "values_files": len(VALUES),
        "objects": {"count": kinds.total(), "by_kind": dict(sorted(kinds.items()))},
        "invalid": len(wrong),
        "schema_typos": tried,
        "schema_accepts_typos": len(accepted),
        "seconds": round(seconds, 2),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    for told in [*wrong, *(f"accepted: {each}" for each in accepted)]:
        print(told, file=sys.stderr)
    return 1 if wrong or accepted else 0


if __name__ == "__main__":
    sys.exit(main())
