"""Start a worker under any Python: this package is made importable there, nothing beside it."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def _import_package() -> None:
    sys.path.pop(0)  # this folder, whose modules are called like the packages they import
    folder = Path(__file__).resolve().parents[1]
    spec = spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[folder.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _import_package()
    from kvstore_bench.peers.worker import main

    main(int(sys.argv[1]))
