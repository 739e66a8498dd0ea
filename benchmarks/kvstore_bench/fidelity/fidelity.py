"""`kvstore bench fidelity`: what each rung costs in what the model says, and what it saves.

The prompt's KV is rounded to bfloat16, as engines keep it: that is exact. Each rung stores it and
loads it, and the model then reads the rest of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kvstore_bench.codec.texts import TEXTS
from kvstore_bench.fidelity.judge import Judge, Verdict
from kvstore_bench.fidelity.rungs import rungs

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FidelityPlan:
    """tokens: of each text's prompt. follow: tokens behind it, which are judged."""

    tokens: int = 2048
    follow: int = 256
    block_tokens: int = 16


def steps_of() -> int:
    """Return how many steps a run says."""
    return len(TEXTS) * (1 + len(list(rungs())))


def run(model: Path, plan: FidelityPlan, say: Say) -> dict[str, Any]:
    """Measure. Raises InvalidRequest for a plan with more tokens than the texts have."""
    judge = Judge(model, plan.tokens, plan.follow)
    verdicts: dict[str, dict[str, Verdict]] = {}
    ratios: dict[str, list[float]] = {}
    for text in judge.texts:
        say(f"{text}: {plan.tokens} tokens")
        exact = judge.kv(text)
        verdicts.setdefault("exact", {})[text] = judge.judge(text, exact, exact)
        for name, store in rungs():
            say(f"{text}: {name}")
            stored = store(exact, plan.block_tokens)
            verdicts.setdefault(name, {})[text] = judge.judge(text, exact, stored.parts)
            ratios.setdefault(name, []).append(stored.ratio)
    result: dict[str, Any] = {"model": model.name, "plan": asdict(plan)}
    for name, by_text in verdicts.items():
        result[name] = _summed(ratios.get(name, [1.0]), by_text)
    base, fp8 = result["ep54"], result["fp8"]
    result["kl_vs_fp8"] = base["kl"] / fp8["kl"] if fp8["kl"] else None
    result["bytes_vs_fp8"] = fp8["ratio"] / base["ratio"]
    return result


def _summed(ratios: Sequence[float], by_text: dict[str, Verdict]) -> dict[str, Any]:
    verdicts = by_text.values()
    return {
        "ratio": fmean(ratios),
        "kl": fmean(each.kl for each in verdicts),
        "kl_max": max(each.kl for each in verdicts),
        "top1": fmean(each.top1 for each in verdicts),
        "perplexity": fmean(each.perplexity for each in verdicts),
        "bytes_equal": all(each.equal for each in verdicts),
        "texts": {text: asdict(each) for text, each in by_text.items()},
    }
