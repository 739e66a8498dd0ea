"""Mutated and arbitrary bytes to every parser: a typed error, bounded memory, no crash."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.service import SERVICE
from tests.fuzz.strategies import mutations
from tests.fuzz.targets import TARGETS, check

MEMORY_KIB_MAX = 64 << 10
EXAMPLES = {"service": 40, "recovery": 80}


@pytest.fixture
def memory() -> Iterator[None]:
    """Measured by the kernel: tracing every allocation takes longer than the test."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KIB_MAX


@pytest.mark.parametrize("name", [*TARGETS, "service"])
@pytest.mark.usefixtures("memory")
def test_hostile_bytes_are_answered_with_a_typed_error(name: str) -> None:
    target = SERVICE if name == "service" else TARGETS[name]
    for seed in target.seeds:
        check(target, seed)

    @settings(
        max_examples=EXAMPLES.get(name, 150),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(mutations(target))
    def fuzz(data: bytes) -> None:
        check(target, data)

    fuzz()
