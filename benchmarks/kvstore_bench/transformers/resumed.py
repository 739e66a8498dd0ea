"""`kvstore bench transformers`: time to first token of a prompt that was computed before.

One model, greedy, one prompt a round. In a round the prompt is generated from without kvstore, with
an empty store (which saves it), from DRAM, and, after the daemon was killed with SIGKILL and
started again, from its files; the first two take turns in going first. All answers must be equal.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvstore import Client, InvalidRequest, Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.store import await_arena

Say = Callable[[str], None]

COMING_S = 10.0

SOURCES = {
    "cold": "without kvstore",
    "saving": "kvstore, nothing stored yet",
    "dram": "kvstore, from DRAM",
    "file": "kvstore, from files after SIGKILL",
    "hbm": "kvstore, from the GPU's own memory",
}
WAIT_S = 120.0
WEIGHTS_S = 600.0  # at the most, to hash them
EXTENT_NBYTES = 32 << 20
LONG_TOKENS = 16_384
TOKENS_MAX = 1 << 18  # of the random model: a prompt and its answer


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What to ask how often. dram_bytes must hold twice what a round stores: half of it is lent.

    hbm_bytes: a pool in the model's own memory, measured too if it is not 0.
    exact: answers must be equal. In bfloat16 they need not be: rounding follows the batch's shape.
    """

    prompt_tokens: int = 2000
    new_tokens: int = 8
    rounds: int = 5
    block_tokens: int = 32
    dram_bytes: int = 512 << 20
    file_bytes: int = 4 << 30
    hbm_bytes: int = 0
    seed: int = 0
    exact: bool = True


def random_llama(tokens: int, device: str = "cpu") -> Any:
    """Return a Llama with seeded random weights in float32 for prompts of so many tokens: 8 layers
    of 512, or for long prompts one of 128, because attention takes the square of their length.

    With the usual initial range (0.02) it repeats one token whatever it is asked.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    long = tokens > LONG_TOKENS
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=128 if long else 512,
        intermediate_size=1408,
        num_hidden_layers=1 if long else 8,
        num_attention_heads=2 if long else 8,
        num_key_value_heads=1 if long else 4,
        max_position_embeddings=TOKENS_MAX,
        initializer_range=0.1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to(device)


def load_model(path: Path, device: str = "cpu") -> Any:
    """Return the model in `path` in float32: lower precision rounds by the shape of the batch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval().to(device)


def run(model: Any, plan: ResumePlan, directory: Path, say: Say) -> dict[str, Any]:
    """Measure with a daemon of our own in a scratch folder of `directory`, removed again.

    say: called `asks(plan)` times with what was measured. Raises InvalidRequest if two answers
    differ that should not.
    """
    seconds: dict[str, list[float]] = {source: [] for source in _sources(plan)}
    with daemon_of(plan, directory) as daemon:
        _round(model, plan, daemon, -1, lambda text: say(f"warming up, {text}"))
        for number in range(plan.rounds):
            here = partial(_say_in_round, say, number, plan)
            for name, value in _round(model, plan, daemon, number, here).items():
                seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "ttft_dram_vs_cold": medians["dram"] / medians["cold"],
        "ttft_file_vs_cold": medians["file"] / medians["cold"],
        "ttft_saving_vs_cold": medians["saving"] / medians["cold"],
        **({"ttft_hbm_vs_cold": medians["hbm"] / medians["cold"]} if plan.hbm_bytes else {}),
        **{f"ttft_{name}_s": value for name, value in medians.items()},
        "device": str(model.device),
        "model": f"{type(model).__name__}, {model.num_parameters():,} parameters, {model.dtype}",
        "seconds": seconds,
        "plan": asdict(plan),
    }


@contextmanager
def daemon_of(plan: ResumePlan, directory: Path) -> Iterator[Daemon]:
    """A daemon of our own with files in a scratch folder of `directory`, removed again."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory) as scratch,
        Daemon(
            f"file.path={Path(scratch) / 'file'}",
            f"file.capacity={plan.file_bytes}",
            "file.segment=256MiB",
            f"dram.capacity={plan.dram_bytes}",
            f"dram.extent={max(EXTENT_NBYTES, plan.dram_bytes // 16)}",
        ) as daemon,
    ):
        yield daemon.start()


def asks(plan: ResumePlan) -> int:
    """Return how many prompts a run generates from, the round that warms up included."""
    return len(_sources(plan)) * (plan.rounds + 1)


def _say_in_round(say: Say, number: int, plan: ResumePlan, text: str) -> None:
    say(f"round {number + 1} of {plan.rounds}, {text}")


def _sources(plan: ResumePlan) -> list[str]:
    return [source for source in SOURCES if source != "hbm" or plan.hbm_bytes]


def _round(model: Any, plan: ResumePlan, daemon: Daemon, number: int, say: Say) -> dict[str, float]:
    """Return the seconds to the first token by where the prefix came from."""
    ids = prompt_of(model, plan, number)
    answers = []
    seconds = {}

    def ask(name: str, generate: Callable[..., Any]) -> None:
        seconds[name], answer = first_token_s(generate, ids, plan.new_tokens)
        answers.append(answer)
        say(f"{SOURCES[name]}: {seconds[name]:.2f} s")

    with _opened(model, plan, daemon, ids) as prefixes:
        for name in ("cold", "saving") if number % 2 else ("saving", "cold"):
            ask(name, prefixes.generate if name == "saving" else model.generate)
        if not prefixes.flush(WAIT_S):
            raise Unavailable("what was saved is not durable after two minutes")
        ask("dram", prefixes.generate)
        check_hit(prefixes, ids, plan)
    daemon.kill()
    daemon.start()
    with _opened(model, plan, daemon, ids) as prefixes:
        ask("file", prefixes.generate)
        check_hit(prefixes, ids, plan)
    if plan.hbm_bytes:
        with _opened(model, plan, daemon, ids, plan.hbm_bytes) as prefixes:
            prefixes.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
            if not prefixes.flush(WAIT_S) or not prefixes.hbm_blocks:
                raise Unavailable("nothing was kept in the pool: raise hbm_bytes")
            ask("hbm", prefixes.generate)
            check_hit(prefixes, ids, plan)
    if plan.exact and any(answer != answers[0] for answer in answers):
        raise InvalidRequest("a resumed answer differs from the one computed without kvstore")
    return seconds


def prompt_of(model: Any, plan: ResumePlan, number: int) -> Any:
    """Return the token ids (1, n) of one of many prompts."""
    import torch

    generator = torch.Generator().manual_seed(plan.seed + number)
    top = model.config.vocab_size
    return torch.randint(3, top, (1, plan.prompt_tokens), generator=generator).to(model.device)


@contextmanager
def _opened(
    model: Any, plan: ResumePlan, daemon: Daemon, ids: Any, hbm_bytes: int = 0
) -> Iterator[Any]:
    """Open the model's prefixes on an arena that is there, and connected."""
    from kvstore_transformers import Prefixes

    with Client(daemon.target) as client:
        await_arena(client, plan.dram_bytes)
    with Prefixes(
        model, daemon.target, block_tokens=plan.block_tokens, hbm_bytes=hbm_bytes
    ) as prefixes:
        if not prefixes.wait_ready(WEIGHTS_S):
            raise Unavailable(f"the weights were not hashed within {WEIGHTS_S:.0f} s")
        prefixes.load(ids.flip(1)[:, : plan.block_tokens + 1])  # connects
        yield prefixes


def check_hit(prefixes: Any, ids: Any, plan: ResumePlan) -> None:
    """Raise Unavailable unless all blocks of a prompt come back."""
    wanted, until = (plan.prompt_tokens - 1) // plan.block_tokens, time.monotonic() + COMING_S
    while (blocks := prefixes.load(ids).restored_blocks) < wanted and time.monotonic() < until:
        time.sleep(0.05)  # a load that computing has overtaken still comes
    if blocks != wanted:
        raise Unavailable(f"only {blocks} blocks came back: raise --dram-mib")


def first_token_s(
    generate: Callable[..., Any], ids: Any, new_tokens: int
) -> tuple[float, list[int]]:
    """Return the seconds from the call to its first token, and the tokens."""
    stamp = _Stamp()
    started = time.perf_counter()
    output = generate(
        ids,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=stamp,
    )
    return stamp.first_at - started, output[0].tolist()


class _Stamp:
    """A streamer that notes when the first token came. The prompt is streamed before it."""

    def __init__(self) -> None:
        self.first_at = 0.0
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
        elif not self.first_at:
            self.first_at = time.perf_counter()

    def end(self) -> None: ...
