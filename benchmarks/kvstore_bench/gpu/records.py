"""Time to first token of a prompt that was computed before, by what its records are: raw, coded
exactly (L3), or lossy (EP).

One model, one daemon, and three `Prefixes` that differ in `record` and `fidelity` alone. Each
stores every prompt. From DRAM they are asked in turns, a prompt in each round; then the daemon is
killed and started again, and they are asked in turns from its files. Who goes first changes with
the round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore import Client, ConfigError, InvalidRequest, Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.store import await_arena
from kvstore_bench.transformers.resumed import (
    WAIT_S,
    ResumePlan,
    check_hit,
    daemon_of,
    first_token_s,
    prompt_of,
)

if TYPE_CHECKING:
    from kvstore_transformers import Prefixes

Say = Callable[[str], None]

FORMS: Mapping[str, Mapping[str, Any]] = {
    "raw": {"record": "raw"},
    "l3": {"record": "l3"},
    "ep": {"fidelity": "ep"},
}
PLACES = {"dram": "from DRAM", "nvme": "from files"}
FIELDS = tuple(f"ttft_32k_{place}_{form}_vs_raw" for form in ("l3", "ep") for place in PLACES)
WEIGHTS_ID = "kvstore bench gpu"  # nobody else asks this daemon: hashing would take time only
REACHED_S = 60.0
LOAD_DEADLINE_S = 20.0
"""For slow disks: what is measured is the load, and not what is computed because of it."""


def measure_records(model: Any, plan: ResumePlan, directory: Path, say: Say) -> dict[str, Any]:
    """Return times to first token with coded records, as shares of those with raw ones.

    None for a form that this machine cannot code; `say` is told why. plan.dram_bytes must hold
    what all three store of a prompt, and twice what the raw one does; the daemon's files hold
    plan.rounds prompts of all three. Raises InvalidRequest if plan.exact, and an answer that came
    from L3 is not that from raw records.
    """
    seconds: dict[str, dict[str, list[float]]] = {place: {} for place in PLACES}
    prompts = [prompt_of(model, plan, number) for number in range(plan.rounds)]
    answers: dict[str, list[Any]] = {}
    bounced = 0

    def ask(place: str, form: str, prefixes: Prefixes, ids: Any) -> None:
        took_s, answer = first_token_s(prefixes.generate, ids, plan.new_tokens)
        check_hit(prefixes, ids, plan)
        seconds[place].setdefault(form, []).append(took_s)
        answers.setdefault(form, []).append(answer)
        say(f"{form} {PLACES[place]}: {took_s:.2f} s")

    with daemon_of(plan, directory) as daemon:
        for place in PLACES:
            if place == "nvme":
                daemon.kill()
                daemon.start()
            with opened(model, plan, daemon, say) as ways:
                for number, ids in enumerate(prompts):
                    if place == "dram":
                        for prefixes in ways.values():
                            store(prefixes, ids, again=not number)
                    for form, prefixes in _in_turn(ways, number):
                        ask(place, form, prefixes, ids)
                bounced += sum(each.bounced_nbytes for each in ways.values())
    if plan.exact and answers["raw"] != answers.get("l3", answers["raw"]):
        raise InvalidRequest("an answer from L3 records differs from that from raw ones")
    return {**_ratios(seconds), "record_seconds": seconds, "record_bounced_nbytes": bounced}


def _ratios(seconds: Mapping[str, Mapping[str, list[float]]]) -> dict[str, float | None]:
    medians = {
        (place, form): statistics.median(values)
        for place, forms in seconds.items()
        for form, values in forms.items()
    }
    ratios: dict[str, float | None] = dict.fromkeys(FIELDS)
    for (place, form), median_s in medians.items():
        if form != "raw":
            ratios[f"ttft_32k_{place}_{form}_vs_raw"] = median_s / medians[place, "raw"]
    return ratios


def _in_turn(ways: Mapping[str, Prefixes], number: int) -> Iterator[tuple[str, Prefixes]]:
    """Yield all, each round beginning with another one."""
    order = list(ways.items())
    first = number % len(order)
    yield from order[first:] + order[:first]


@contextmanager
def opened(model: Any, plan: ResumePlan, daemon: Daemon, say: Say) -> Iterator[dict[str, Prefixes]]:
    """Open the model's prefixes, a form each, on an arena that is there and that the device
    reaches; those that cannot be had here are left out."""
    from kvstore_transformers import Prefixes

    with Client(daemon.target) as client:
        await_arena(client, plan.dram_bytes)
    with ExitStack() as stack:
        ways: dict[str, Prefixes] = {}
        for form, options in FORMS.items():
            try:
                prefixes = Prefixes(
                    model,
                    daemon.target,
                    block_tokens=plan.block_tokens,
                    weights_id=WEIGHTS_ID,
                    load_deadline_s=LOAD_DEADLINE_S,
                    **options,
                )
            except ConfigError as error:
                say(f"{form} records are not measured: {error}")
                continue
            ways[form] = stack.enter_context(prefixes)
            prefixes.load(prompt_of(model, plan, -1)[:, : plan.block_tokens + 1])  # connects
        for form, prefixes in ways.items():
            if not prefixes.wait_reached(REACHED_S):
                say(f"{form}: the device does not reach all of the arena, so copies are slower")
        yield ways


def store(prefixes: Prefixes, ids: Any, *, again: bool) -> None:
    """Compute and store a prompt, until it is durable. again: ask once more, to warm up."""
    for _ in range(1 + again):
        prefixes.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
        if not prefixes.flush(WAIT_S):
            raise Unavailable("what was saved is not durable after two minutes")
