"""What tests of the native library share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore_kernels import native


@pytest.fixture(params=list(native.Isa), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Iterator[native.Isa]:
    """Each test runs on every instruction set that the processor has."""
    if native.use_isa(request.param) is not request.param:
        pytest.skip(f"this processor has no {request.param.name}")
    yield request.param
    native.use_isa()
