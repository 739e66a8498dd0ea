"""Packages that SGLang imports for what is not tested here: images (there is no torchvision for
every build of torch), and data sets of its benchmarks, which its test kit imports."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from unittest.mock import MagicMock

import transformers
from transformers.utils import is_datasets_available, is_torchvision_available

NAMES = {
    "torchvision": ("transforms", "transforms.functional"),
    "datasets": (),
}


def put_stand_ins() -> None:
    """Let SGLang's modules be imported in this process where these are not."""
    assert transformers.AutoProcessor  # transformers looks for them, and remembers
    is_datasets_available()
    is_torchvision_available()
    for package, parts in NAMES.items():
        if find_spec(package) is None:
            for name in (package, *(f"{package}.{part}" for part in parts)):
                module = MagicMock(name=name)
                module.__spec__ = ModuleSpec(name, None)
                sys.modules[name] = module
