"""Print the requirements of `make gpu` beside torch, cupy, transformers and numpy, a line each."""

from __future__ import annotations

import tomllib
from pathlib import Path

TESTING = ("pytest", "pytest-timeout", "pluggy", "iniconfig", "packaging", "pygments")
PROPERTIES = ("hypothesis", "sortedcontainers", "attrs")


def main() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    ours = [each for each in project["dependencies"] if not each.startswith("numpy")]
    print("\n".join([*ours, *TESTING, *PROPERTIES, "typing-extensions"]))


if __name__ == "__main__":
    main()
