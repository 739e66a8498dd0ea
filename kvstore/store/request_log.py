"""What the store keeps of its answers: counts by tier and by what ended each hit, and the last
of them for `kvstore explain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstore.decide.ask import Ask
from kvstore.decide.planner import Explainer, Leases, Outcomes, Planner, SessionId
from kvstore.decide.slow_log import SlowLog
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.outcome import COMPLETE, POOL_REASONS, Ending, Explanation, Outcome, Reason
from kvstore.store.answers import Answers


class RequestLog:
    """The books of what was asked and served."""

    def __init__(
        self,
        planner: Planner,
        leases: Leases,
        metrics: Metrics,
        *,
        outcomes_max: int,
        now: Callable[[], float],
        slow: SlowLog | None = None,
        answers: Answers | None = None,
    ) -> None:
        """slow, answers: what is told of each answer; None: of one's own, that nobody looks at."""
        self._slow = slow or SlowLog(now)
        self._answers = answers or Answers()
        self._planner = planner
        self._metrics = metrics
        self._now = now
        self._explainer = Explainer(planner.index, planner.departures, leases)
        self._outcomes = Outcomes(outcomes_max, now)

    def outcomes(self, request_id: str, limit: int) -> list[Outcome]:
        """Return how the last requests were answered whose id starts so, newest first."""
        return self._outcomes.find(request_id, limit)

    def explain(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Explanation:
        """Return where each block of a prefix is now, and what would end its hit."""
        match = self._planner.match(namespace_id, keys)
        return self._explainer.explanation(namespace_id, keys, match)

    def count(
        self,
        ask: Ask,
        *,
        asked: int,
        dram: int,
        file: int,
        objects: int = 0,
        peers: int = 0,
        pool: int = 0,
    ) -> None:
        """Count blocks asked for and served."""
        metrics, known = self._metrics, self._planner.index.namespaces
        tokens = known.use(ask.namespace_id).block_tokens
        served = {"dram": dram, "file": file, "object": objects, "peer": peers, "pool": pool}
        if ask.is_guest:
            asked = sum(served.values())
        model, label = known.asked(ask.namespace_id, asked, served)
        metrics.lookups.inc(asked)
        metrics.lookup_tokens.inc(asked * tokens)
        metrics.saved_prefill_seconds.inc(sum(served.values()) * ask.recompute_s_per_block)
        metrics.model_lookups.labels(model).inc(asked)
        metrics.namespace_lookups.labels(label).inc(asked)
        for tier, blocks in served.items():
            metrics.hits.labels(tier).inc(blocks)
            metrics.hit_tokens.labels(tier).inc(blocks * tokens)
            metrics.model_hits.labels(model, tier).inc(blocks)
            if blocks:
                metrics.namespace_hits.labels(label, tier).inc(blocks)

    def note(
        self,
        ask: Ask,
        hit: int,
        why: Reason | None,
        lease_id: int = 0,
        *,
        file: int = 0,
        objects: int = 0,
        peers: int = 0,
        peer: str = "",
        pool: int = 0,
        base: int = 0,
    ) -> None:
        """Remember an answer, and how many blocks of the hit came from the file and object tiers,
        from other hosts, and from the pool.

        peer: the host that gave most of these, or should have. base: how many came without a fine
        part that they should have. why: what kept the hit from being what is stored, if anything
        did. A guest's answer is noted as if it had asked for what it got: no more is known of it.
        """
        ending = self._ending(ask, hit, why, peer) if not ask.is_guest else None
        if ask.is_guest:
            ask = replace(ask, keys=ask.keys[:hit], skip_blocks=0)
        self._metrics.base_hit_blocks.inc(base)
        self._metrics.requests.labels(ending.reason if ending else COMPLETE).inc()
        outcome = Outcome(
            request_id=ask.request_id,
            client=ask.client,
            namespace_id=ask.namespace_id,
            asked_blocks=len(ask.keys),
            skip_blocks=ask.skip_blocks,
            hit_blocks=hit,
            file_blocks=file,
            object_blocks=objects,
            took_s=self._now() - ask.began,
            ending=ending,
            base_blocks=base,
            peer_blocks=peers,
            peer=peer,
            pool_blocks=pool,
            last_key=ask.keys[-1] if ask.keys else b"",
            session_id=ask.session_id,
        )
        self._outcomes.note(ask.session, outcome, lease_id)
        known = self._planner.index.namespaces.spec(ask.namespace_id)
        self._answers.acquired(outcome, known.block_tokens if known is not None else 0)
        self._note_slow(ask, outcome.took_s, ending.reason if ending else COMPLETE)

    def note_parts(self, ask: Ask, found: int) -> None:
        """Note that parts of blocks were asked for, and how many there were."""
        if ask.is_guest:
            ask = replace(ask, keys=ask.keys[:found])
        self._note_slow(ask, self._now() - ask.began, f"{found} records")

    def _note_slow(self, ask: Ask, took_s: float, result: str) -> None:
        self._slow.note(
            "acquire",
            took_s + ask.waits.seconds.get("recall", 0.0),  # which came before it began
            ask.waits.seconds,
            blocks=len(ask.keys),
            namespace_id=ask.namespace_id,
            request_id=ask.request_id,
            client=ask.client,
            session_id=ask.session_id,
            result=result,
        )

    def released(self, session: SessionId, lease_id: int, *, held: bool) -> None:
        """Note how a request's lease ended."""
        self._outcomes.released(session, lease_id, held=held)

    def _ending(self, ask: Ask, hit: int, why: Reason | None, peer: str) -> Ending | None:
        if why is not None and (peer or why in POOL_REASONS) and hit < len(ask.keys):
            return Ending(why, hit)
        if why is not None:
            stored = self._planner.match(
                ask.namespace_id, ask.keys, ask.skip_blocks, refined=ask.refined
            ).hit_blocks
            if stored > hit or why is Reason.LEASED_BYTES:
                return Ending(why, hit)
        if ask.refined:
            match = self._planner.match(ask.namespace_id, ask.keys, ask.skip_blocks)
            if match.hit_blocks > hit:
                return Ending(Reason.COARSE, hit)
        return self._explainer.ending(ask.namespace_id, ask.keys, hit, ask.skip_blocks)
