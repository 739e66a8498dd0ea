"""Several models that share a node: what prompts take to compute, and what hits save of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvstore.model.errors import InvalidRequest
from kvstore.replay.workload import Request, Workload, key_of

TOKENS = 1000  # that a cost is said of
MODELS_MAX = 64


@dataclass(slots=True)
class ModelHits:
    """What one model's requests hit. s_per_1000: seconds of prefill of so many tokens. saved_s: of
    prefill, by hits."""

    model: str
    s_per_1000: float
    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    @property
    def saved_s(self) -> float:
        return self.hit_tokens * self.s_per_1000 / TOKENS

    def note(self, tokens: int, hit_tokens: int) -> None:
        """Count a request."""
        self.requests += 1
        self.tokens += tokens
        self.hit_tokens += hit_tokens

    def to_dict(self) -> dict[str, Any]:
        ratio = self.hit_tokens / max(1, self.tokens)
        return {**asdict(self), "token_hit_ratio": ratio, "saved_s": self.saved_s}


def check_mix(workload: Workload, mix: Mapping[str, float]) -> None:
    """Raise InvalidRequest unless each model of a workload has its cost, and each cost a model."""
    models = workload.models
    if len(models) > MODELS_MAX:
        raise InvalidRequest(f"{len(models)} models; {MODELS_MAX} are allowed")
    lacking, unknown = sorted(models - mix.keys()), sorted(mix.keys() - models)
    known = ", ".join(sorted(models)) or "none"
    if lacking:
        raise InvalidRequest(f"no cost is said of {', '.join(lacking)}; the trace has {known}")
    if unknown:
        raise InvalidRequest(f"the trace does not have {', '.join(unknown)}, but {known}")


def named(workload: Workload, model: str) -> Workload:
    """Return a workload whose requests are of a model, unless they say of which they are."""
    requests = [each if each.model else replace(each, model=model) for each in workload.requests]
    return replace(workload, requests=requests)


def merged(workloads: Sequence[Workload]) -> Workload:
    """Return workloads beside each other: each begins at once, and no block is another's. Raises
    InvalidRequest for blocks of several sizes."""
    sizes = sorted({each.block_tokens for each in workloads})
    if len(sizes) > 1:
        raise InvalidRequest(
            f"traces with blocks of {', '.join(map(str, sizes))} tokens: say --block-tokens"
        )
    requests: list[Request] = []
    blocks = 0
    for number, workload in enumerate(workloads):
        begin = workload.requests[0].at_s
        requests += [
            replace(
                each,
                at_s=each.at_s - begin,
                blocks=array("q", [blocks + block for block in each.blocks]),
                session=f"{number}/{each.session}",
            )
            for each in workload.requests
        ]
        blocks += len(workload.keys)
    requests.sort(key=lambda each: each.at_s)
    first = workloads[0]
    return replace(
        first,
        name="+".join(each.name for each in workloads),
        requests=requests,
        keys=[key_of(number) for number in range(blocks)],
        unique_blocks=sum(each.unique_blocks for each in workloads),
        skipped=sum(each.skipped for each in workloads),
        first_skipped=next((each.first_skipped for each in workloads if each.skipped), ""),
    )
