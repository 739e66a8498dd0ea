"""A model with Mamba layers: refused, with the reason, before it answers anything."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_a_hybrid_with_mamba_layers_is_refused(start_engine, daemon):
    with pytest.raises(RuntimeError, match="kvstore does not support Mamba layers"):
        start_engine("granite", daemon, dtype="float32", block_size=None)
