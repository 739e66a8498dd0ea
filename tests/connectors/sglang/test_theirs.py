"""SGLang's own tests of hierarchical-cache storage that need neither a GPU nor a server.

They are in no package. So they run where there is a checkout of SGLang:

    git clone --filter=blob:none https://github.com/sgl-project/sglang && cd sglang
    git checkout 9c32fc2a4227c284eafa4660968456a327db1418
    git show f9e9de94220ec96e5d8eccb327a6f1ffb5b02183:UNIT > UNIT    # if it is not there
    KVSTORE_SGLANG_TESTS=$PWD/test pytest tests/connectors/sglang/test_theirs.py

where UNIT is test/registered/unit/mem_cache/test_hicache_storage_unit.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.connectors.sglang.test_inside import run_inside

PASSED_MIN = 41


def test_theirs_with_our_storage(site: Path) -> None:
    if not os.environ.get("KVSTORE_SGLANG_TESTS"):
        pytest.skip("KVSTORE_SGLANG_TESTS names no folder `test` of a checkout of SGLang")
    done = run_inside(site, "theirs.py")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= PASSED_MIN
