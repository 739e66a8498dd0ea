"""Compile the native library into the wheel, or into the tree for an editable install.

The wheel is then one for this platform and every Python 3. Without a compiler it is made all the
same, without the library, for any platform: engines store records as they are, and say so.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "kvstore_kernels/native"


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling calls `initialize` before it collects the files of a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version
        spec = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            build.build_if_stale()
        except build.NoCompiler as error:
            (NATIVE / build.NAME).unlink(missing_ok=True)
            self.app.display_warning(f"kvstore without its native library: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
