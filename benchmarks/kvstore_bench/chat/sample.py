"""What was measured on one request, and what the numbers mean.

- TTFT: from just before the request is sent to the first non-empty piece of text (the reasoning
  text of a reasoning model counts).
- ITL: the gaps between consecutive non-empty pieces, as `vllm bench serve` has them. A server that
  packs several tokens into a piece shows fewer, longer gaps, and the first piece of an answer may
  hold several, too: neither is corrected, but `tokens_per_chunk` says how many there were.
- latency: to the last piece (what follows it, the usage, carries no token), as vLLM's E2EL is; so
  latency = TTFT + the sum of the ITLs. A request that fails, or has no text: to its end.
- TPOT: (latency - TTFT) / (output tokens - 1), whatever the pieces.

Token counts are the server's own `usage`; where it sends none they are None, never guessed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

ErrorKind = Literal["connect", "timeout", "http", "server", "malformed", "cut"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no complete answer.

    connect: nothing answers there. timeout: past the deadline. http: a status other than 200.
    server: the server reported an error inside the stream. malformed: not the promised format.
    cut: the stream ended before the answer did.
    """

    kind: ErrorKind
    message: str
    status: int | None = None

    @property
    def label(self) -> str:
        """Return the class it is counted under: the kind, for HTTP with the status' class."""
        return self.kind if self.status is None else f"{self.kind}_{self.status // 100}xx"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as it went. Times in seconds; started_s counts from the start of the run.

    turn counts from 1; messages: how many were sent. queued_s: how long it waited past its due time
    (open loop only). ttft_s is None where no text came; output_text is what came, even of a failed
    request.
    """

    conversation_id: str
    turn: int
    messages: int
    started_s: float
    queued_s: float
    ttft_s: float | None
    itl_s: tuple[float, ...]
    latency_s: float
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    output_text: str
    failure: Failure | None

    @property
    def resumed(self) -> bool:
        """Say whether there was a history that a cache could have kept."""
        return self.turn > 1

    @property
    def tpot_s(self) -> float | None:
        """Return seconds per output token after the first; None with fewer than two."""
        if not self.itl_s or not self.output_tokens or self.output_tokens < 2:
            return None
        return sum(self.itl_s) / (self.output_tokens - 1)

    @property
    def output_chunks(self) -> int:
        """Return how many pieces of text came."""
        return 0 if self.ttft_s is None else len(self.itl_s) + 1

    @property
    def mean_itl_s(self) -> float:
        """Return seconds per token after the first (TPOT); 0 for a single token, as vLLM has it.

        Without the server's count of tokens each piece counts as one.
        """
        if self.output_tokens is None:
            return sum(self.itl_s) / len(self.itl_s) if self.itl_s else 0.0
        return self.tpot_s or 0.0

    @property
    def output_sha256(self) -> str:
        """Return the fingerprint by which answers of two runs are compared."""
        return hashlib.sha256(self.output_text.encode()).hexdigest()
