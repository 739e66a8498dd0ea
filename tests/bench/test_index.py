"""What a block costs in memory is measured, and stays under its bound."""

from kvstore_bench.store import index_daemon
from kvstore_bench.store.index import IndexPlan, run

BYTES_PER_BLOCK_MAX = 700


def test_a_block_costs_less_than_its_bound_with_either_policy() -> None:
    result = run(IndexPlan(blocks=40_000, samples=20), lambda text: None)
    assert set(result["bytes_per_block"]) == {"lru", "hz"}
    assert max(result["bytes_per_block"].values()) < BYTES_PER_BLOCK_MAX
    assert min(*result["match_p50_us"].values(), *result["put_p50_us"].values()) > 0


def test_daemons_are_filled_and_asked_with_either_policy() -> None:
    plan = IndexPlan(blocks=16_384, samples=20)  # an extent's worth
    result = index_daemon.run(plan, lambda text: None)
    assert min(result["resident_blocks"].values()) >= plan.blocks
    assert set(result["put_p50_us"]) == set(result["match_p50_us"]) == {"lru", "hz"}
    assert min(*result["match_p50_us"].values(), *result["put_p50_us"].values()) > 0
