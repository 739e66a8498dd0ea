"""How long a load from a source is waited for: what an engine could use of it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from random import Random

import pytest

from kvstore.decide.ask import Ask
from kvstore.decide.index import StoredBlock
from kvstore.decide.pace import PATIENCE
from kvstore.decide.planner import DAEMON_SESSION
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Group, Match, Namespace, Part, Span
from kvstore.model.checksum import checksum
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.outcome import Reason
from kvstore.move.load_race import Ended, LoadRaces
from kvstore.move.source import Candidate, Window
from tests.sim.loop import SimLoop
from tests.store.node import SPEC, Node

FULL_ONLY = Namespace(2, (Group("full", 10_000),), ())
BLOCKS = 8
BLOCK_S = 0.5  # what computing a block takes the engine
PROMPT_S = BLOCKS * BLOCK_S
NEVER_S = 1000.0


class Blocks:
    """A source of the blocks of one prefix: each is a window of its own and takes `takes_s`.

    loses: after the first step of looking, it has none of them any more.
    """

    name = "blocks"
    coming = 0
    copies = brings_fine = False
    start_window_nbytes = 1
    failure: Reason | None = None

    def __init__(
        self,
        loop: SimLoop,
        namespace: Namespace,
        takes_s: Callable[[int], float],
        *,
        loses: bool = False,
    ) -> None:
        self.races = LoadRaces(Metrics(), loop.time)
        self.found = 0
        self.takes_s = takes_s
        self._namespace = namespace
        self._loses = loses
        self._lost = False

    async def look(self, deadline: float) -> AsyncIterator[None]:
        self.found = BLOCKS
        yield
        self._lost = self._loses

    def has(self, part: Part, key: BlockKey) -> bool:
        return not self._lost

    def with_fine(self, key: BlockKey, block: StoredBlock | None, mask: int) -> int:
        return mask

    def fine_spans(self, keys: Sequence[BlockKey], spans: Sequence[Span]) -> tuple[Span, ...]:
        return ()

    def forget(self, records: Sequence[tuple[Part, BlockKey]]) -> None:
        """There are no fine parts."""

    async def open(self, window: Window) -> Reading:
        return Reading(self._namespace, window, self.takes_s(window.first))


class Reading:
    limbo = None
    checksums: Sequence[int] = ()
    wrong: Sequence[int] = ()

    def __init__(self, namespace: Namespace, window: Window, takes_s: float) -> None:
        self.sizes = [
            namespace.record_nbytes(part)
            for part, begin, end in window.spans
            for _ in range(begin, end)
        ]
        self._takes_s = takes_s

    async def fill(self, targets: Sequence[memoryview | None], deadline: float) -> list[int]:
        await asyncio.sleep(self._takes_s)
        return [checksum(target) if target is not None else 0 for target in targets]

    async def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(None, loop=SimLoop(Random(1))) as node:
        node.store.namespaces.register(FULL_ONLY)
        yield node


def load(
    node: Node, namespace: Namespace, takes_s: Callable[[int], float], *, loses: bool = False
) -> tuple[Ended, float]:
    """Bring a prefix, of which block i takes `takes_s(i)`; return how that ended, and when."""
    assert isinstance(node.loop, SimLoop)
    keys = KeyChain(root_key(namespace.id), 2).update([7] * 2 * BLOCKS)
    began = node.loop.time()
    ask = Ask(DAEMON_SESSION, "test", "", namespace.id, keys, 0, began, BLOCK_S)
    source = Blocks(node.loop, namespace, takes_s, loses=loses)
    fetch = node.store._node.fetch
    promoted = fetch.promote(Candidate(source, source), ask, Match(0, 0), began + NEVER_S / 2)
    ended = node.run(promoted)
    return ended, node.loop.time() - began


def test_what_comes_in_time_is_waited_for(node: Node) -> None:
    for namespace in (FULL_ONLY, SPEC):
        assert load(node, namespace, lambda _: 0.1)[0] is Ended.DONE


def test_what_has_come_of_a_prefix_buys_the_time_of_computing_it(node: Node) -> None:
    ended, took_s = load(node, FULL_ONLY, lambda block: NEVER_S if block == BLOCKS - 1 else 0.1)
    assert ended is Ended.CUT
    assert took_s == pytest.approx(PATIENCE * PROMPT_S + (BLOCKS - 1) * BLOCK_S, abs=0.01)


def test_what_came_behind_a_gap_buys_nothing(node: Node) -> None:
    ended, took_s = load(node, FULL_ONLY, lambda block: NEVER_S if block == 0 else 0.1)
    assert ended is Ended.CUT
    assert took_s == pytest.approx(PATIENCE * PROMPT_S, abs=0.01)


def test_of_a_hybrid_model_a_prefix_cut_short_buys_nothing(node: Node) -> None:
    """The windows that a shorter prefix needs were not asked for."""
    ended, took_s = load(node, SPEC, lambda block: NEVER_S if block == BLOCKS - 1 else 0.1)
    assert ended is Ended.CUT
    assert took_s == pytest.approx(PATIENCE * PROMPT_S, abs=0.01)


def test_a_load_that_would_be_cut_before_it_is_whole_does_not_begin() -> None:
    """Half of what it saves is waited for at most, so one that may take longer is lost."""
    loop = SimLoop(Random(1))
    cases = ((FULL_ONLY, 0.9, True), (SPEC, 0.3, False), (SPEC, 0.2, True))
    for namespace, share, begins in cases:
        races = LoadRaces(Metrics(), loop.time)
        races.pace.note(1 << 20, share * PROMPT_S)  # one load: twice that is usual
        keys = KeyChain(root_key(namespace.id), 2).update([7] * 2 * BLOCKS)
        ask = Ask(DAEMON_SESSION, "test", "", namespace.id, keys, 0, loop.time(), BLOCK_S)
        stakes = ask.stakes(Match(BLOCKS, 0))
        assert stakes is not None
        race = races.race(1 << 20, stakes, whole=namespace.has_windows)
        assert (race is not None) is begins
    loop.close()


def test_a_hit_that_gets_shorter_while_a_source_is_asked_ends_no_acquire(node: Node) -> None:
    """What was begun early is all that is left: nothing beyond the hit that there was."""
    assert load(node, FULL_ONLY, lambda _: 0.1, loses=True) == (Ended.DONE, 0.1)
