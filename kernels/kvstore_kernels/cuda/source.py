"""The CUDA sources as one text: what stands beside them is put in the place of its `#include`."""

from __future__ import annotations

import re
from importlib.resources import files

_INCLUDE = re.compile(r'^#include "([a-z0-9_.]+)"$', re.MULTILINE)


def source_of(name: str) -> str:
    """Return a source as it is given to NVRTC, which is told of no folders.

    CuPy keeps what it compiled by this text, so a change in an included file is seen, too.
    """
    text = files("kvstore_kernels.cuda").joinpath(name).read_text()
    return _INCLUDE.sub(lambda found: source_of(found[1]), text)
