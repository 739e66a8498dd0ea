"""Many requests at once against one engine, some aborted, every answer judged.

A *turn* is a prompt, the answer of an engine without connector, and at each token of that answer
the *margin*: by how much (in log probability) the best token beat the second. Batches of another
shape round differently, so an engine may leave the reference where the margin is tiny: a tie. A
wrong block of KV changes log probabilities by whole units, so it shows where margins are not tiny.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

TIE = 1e-3
"""float32 rounding moves log probabilities of these models by less than 1e-4."""


def reference(llm: Any, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    """Answer the prompts with an engine that has no connector; return them as turns."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    turns = []
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        best = [sorted(each.logprob for each in at.values()) for at in answer.logprobs]
        margins = [each[-1] - each[-2] for each in best]
        turns.append({"prompt": prompt, "answer": list(answer.token_ids), "margins": margins})
    return turns


class Traffic:
    """Keeps `concurrency` requests in an engine, chosen and aborted at random from one seed."""

    def __init__(
        self,
        engine: Any,
        *,
        turns: list[dict[str, Any]],
        seed: int,
        concurrency: int,
        abort_share: float,
    ) -> None:
        self._engine = engine
        self._turns = turns
        self._random = random.Random(seed)
        self._concurrency = concurrency
        self._abort_share = abort_share
        self._names = map(str, itertools.count())
        self._open: dict[str, dict[str, Any]] = {}
        self._abort_at: dict[str, int] = {}  # the step before which a request is aborted
        self._began: dict[str, float] = {}
        self._answer_s: list[float] = []
        self._steps = 0
        self.counts: dict[str, Any] = dict.fromkeys(("finished", "aborted", "wrong", "ties"), 0)

    def run(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            while len(self._open) < self._concurrency:
                self._submit()
            self._step()
        return self.counts

    def end(self, wait_s: float) -> dict[str, Any]:
        """Submit no more and wait for the rest; what is left then is counted as stuck."""
        deadline = time.monotonic() + wait_s
        while self._open and time.monotonic() < deadline:
            self._step()
        return {**self.counts, "stuck": len(self._open)}

    def answer_times(self) -> list[float]:
        """Return the seconds of each answer since the last call, from submission to end."""
        times, self._answer_s = self._answer_s, []
        return times

    def _submit(self) -> None:
        from vllm import SamplingParams

        name, turn = next(self._names), self._random.choice(self._turns)
        tokens = self._random.randint(1, len(turn["answer"]))
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self._engine.add_request(name, {"prompt_token_ids": turn["prompt"]}, sampling)
        self._open[name] = turn
        self._began[name] = time.monotonic()
        if self._random.random() < self._abort_share:
            # From at once, while it is looked up, to long after most have finished.
            self._abort_at[name] = self._steps + int(self._random.expovariate(1 / 40))

    def _step(self) -> None:
        due = [name for name, step in self._abort_at.items() if step <= self._steps]
        for name in due:
            del self._abort_at[name]
        if due:
            self._engine.abort_request(due)
            for name in due:
                self.counts["aborted"] += self._open.pop(name, None) is not None
                self._began.pop(name, None)
        self._steps += 1
        for output in self._engine.step():
            if output.finished and output.request_id in self._open:
                turn = self._open.pop(output.request_id)
                self._abort_at.pop(output.request_id, None)
                self._answer_s.append(time.monotonic() - self._began.pop(output.request_id))
                self.counts["finished"] += 1
                self._judge(turn, list(output.outputs[0].token_ids))

    def _judge(self, turn: dict[str, Any], tokens: list[int]) -> None:
        expectations = zip(turn["answer"], turn["margins"], strict=True)
        for token, (expected, margin) in zip(tokens, expectations, strict=False):
            if token != expected:
                self.counts["ties" if margin < TIE else "wrong"] += 1
                return
