"""Two hosts with a daemon and a real vLLM engine each, and what harms the way between them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore import Client
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import Unavailable
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.outcome import Outcome
from kvstore.testing.daemon import Daemon
from kvstore.testing.ports import free_ports
from kvstore.testing.relay import Relay, relay_to
from kvstore_bench.cluster.network import Host, Network, network
from kvstore_bench.cluster.vllm_plan import BLOCK_TOKENS, Prompts, VllmPlan
from kvstore_bench.demo.asker import Alone
from kvstore_bench.demo.engine import (
    CHUNK_TOKENS,
    Engine,
    EngineSpec,
    start_engine,
    with_kvstore,
)
from kvstore_bench.demo.machine import describe
from kvstore_bench.demo.model import kv_shape_of

FLEET = "bench"
PEER_PORT = 7702
ENGINE_PORT = 8000
ARENA = ("dram.capacity=1GiB", "dram.extent=128MiB", "file.capacity=8GiB")
LOOK_S = 0.05
SOON_S = 60.0  # for what takes a second if nothing is wrong
WARM_UP_TOKENS = 512


class HostDaemon(Daemon):
    """A daemon on one of the hosts."""

    def __init__(self, host: Host, *overrides: str, file: bool = True) -> None:
        super().__init__(*overrides, file=file)
        self._enter = host.enter

    def command(self, *arguments: str) -> list[str]:
        return [*self._enter, *super().command(*arguments)]


@dataclass(slots=True)
class Side:
    """One host, and what runs there. peer_port: where its daemon answers others."""

    host: Host
    daemon: HostDaemon
    peer_port: int
    engine: Engine

    def start(self, other: str, address: str = "") -> None:
        """Start the daemon. other: where the other one answers. address: what it says of itself."""
        own = f"{self.host.address}:{self.peer_port}"
        self.daemon.start(
            f"cluster.static={json.dumps([other])}",
            f"cluster.listen={own}",
            f"cluster.address={address or own}",
        )

    def namespace(self) -> NamespaceId:
        """Return what its engine stores under. Raises Unavailable if it has not said so."""
        with Client(self.daemon.target, arena=False) as client:
            for use in client.admin.namespaces():
                if use.namespace is not None:
                    return use.namespace_id
        raise Unavailable(f"{self.engine.spec.name} stores nothing: {self.engine.child.log}")

    def hit_blocks(self, prompt: Sequence[int]) -> int:
        """Return how many blocks of a prompt its daemon has itself."""
        namespace_id = self.namespace()
        with Client(self.daemon.target, arena=False) as client:
            return client.match(namespace_id, keys_of(namespace_id, prompt)).hit_blocks

    def outcome(self) -> Outcome:
        """Return how the last request of its engine was answered."""
        with Client(self.daemon.target, arena=False) as client:
            return client.admin.outcomes(limit=1)[0]

    def forget(self) -> None:
        """Drop what its engine and its daemon have: the other host keeps its own."""
        self.engine.forget_prefixes()
        with Client(self.daemon.target, arena=False) as client:
            client.admin.clear(this_daemon_only=True)

    def flush(self) -> None:
        """Wait until what it has is in its files."""
        with Client(self.daemon.target, arena=False, timeout_s=SOON_S) as client:
            if not client.admin.flush(SOON_S):
                raise Unavailable(f"not written within {SOON_S:.0f} s")


class TwoHosts:
    """`there` computes prompts first, `here` asks for them."""

    def __init__(self, plan: VllmPlan, net: Network, there: Side, here: Side, relay: Relay) -> None:
        self.plan = plan
        self.net = net
        self.there, self.here = there, here
        self.relay = relay
        self.prompts = Prompts(plan)
        self.alone = Alone(spins=not there.engine.spec.machine.gpu)
        self.relayed = False

    def begin(self, *, relayed: bool) -> None:
        """Start both daemons, anew if they run. relayed: by the relay, instead of directly."""
        self.relayed = relayed
        for side in (self.there, self.here):
            if side.daemon.alive:
                side.daemon.stop()
        self.begin_there()
        self.begin_here()

    def begin_there(self) -> None:
        """Start the daemon that lends; what it has is in its files."""
        here = f"{self.here.host.address}:{self.here.peer_port}"
        self.there.start(here, self._address_there)

    def begin_here(self) -> None:
        """Start the daemon that borrows: it has nothing, and knows nothing of the other's pace."""
        if self.here.daemon.alive:
            self.here.daemon.stop()
        self.here.start(self._address_there)
        self.meet()

    @property
    def _address_there(self) -> str:
        if self.relayed:
            return f"{self.net.here}:{self.relay.port}"
        return f"{self.there.host.address}:{self.there.peer_port}"

    def meet(self) -> None:
        """Wait until the borrowing daemon has a link to the other one."""

        def met() -> bool:
            with Client(self.here.daemon.target, arena=False) as client:
                members = client.admin.stats()["fleet"]["members"]
            return any(each["state"] == "up" for each in members)

        wait_until(met, "the daemons did not meet")

    def connect(self, side: Side) -> None:
        """Wait until an engine uses its daemon: it hashes its weights first, and dials again.

        The daemon may know the namespace from before: what counts is that a new prompt is stored.
        """
        asked: list[list[int]] = []

        def connected() -> bool:
            asked.append(self.prompts.next(WARM_UP_TOKENS))
            self.alone.ask(side.engine, asked[-1], 2)
            try:
                return any(side.hit_blocks(prompt) for prompt in asked)
            except Unavailable:
                return False

        wait_until(connected, f"{side.engine.spec.name} did not store anything")

    def compute(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Let the lending host have a prompt; return its answer."""
        reply = self.alone.ask(self.there.engine, prompt, self.plan.answer_tokens)
        self.await_saved(prompt)
        return reply.tokens

    def await_saved(self, prompt: Sequence[int]) -> None:
        """Wait until the lending daemon has all full blocks of a prompt."""
        wait_until(
            lambda: self.there.hit_blocks(prompt) >= self.plan.loadable_blocks,
            "the lending daemon did not get all blocks",
        )


def keys_of(namespace_id: NamespaceId, prompt: Sequence[int]) -> list[BlockKey]:
    """Return the keys of a prompt, as the connector makes them."""
    return KeyChain(root_key(namespace_id), BLOCK_TOKENS).update(list(prompt))


def wait_until(true: Callable[[], bool], otherwise: str) -> None:
    """Raises Unavailable after SOON_S."""
    deadline = time.monotonic() + SOON_S
    while not true():
        if time.monotonic() > deadline:
            raise Unavailable(f"{otherwise} within {SOON_S:.0f} s")
        time.sleep(LOOK_S)


@contextmanager
def two_hosts(plan: VllmPlan, logs: Path) -> Iterator[TwoHosts]:
    """Yield two hosts whose daemons have met and whose engines use them. logs: of the engines."""
    with ExitStack() as stack:
        net = stack.enter_context(network(2))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-cluster-")))
        isolated = not net.why_not
        ports = [PEER_PORT] * 2 if isolated else free_ports(2)
        daemons = [
            stack.enter_context(
                HostDaemon(
                    host,
                    *ARENA,
                    f"cluster.fleet={FLEET}",
                    "cluster.membership=static",
                    "cluster.insecure=true",
                    file=lends,
                )
            )
            for host, lends in zip(net.hosts, (True, False), strict=True)
        ]
        engines = [
            _engine(plan, name, host, daemon, scratch=scratch, logs=logs)
            for name, host, daemon in zip(("prefill", "decode"), net.hosts, daemons, strict=True)
        ]
        for each in engines:
            stack.callback(each.child.stop)
        there, here = (Side(*each) for each in zip(net.hosts, daemons, ports, engines, strict=True))
        relay = stack.enter_context(relay_to(ports[0], host=net.hosts[0].address, here=net.here))
        hosts = TwoHosts(plan, net, there, here, relay)
        hosts.begin(relayed=False)
        for each in engines:
            each.wait_healthy()
        for side in (there, here):
            hosts.connect(side)
        yield hosts


def _engine(
    plan: VllmPlan, name: str, host: Host, daemon: Daemon, *, scratch: Path, logs: Path
) -> Engine:
    machine = describe()
    kv = kv_shape_of(plan.model)
    chunk = plan.chunk_tokens if name == "prefill" else CHUNK_TOKENS
    spec = EngineSpec(
        name=name,
        model=plan.model,
        machine=machine,
        dtype="float32" if not machine.gpu else machine.dtype,  # the same answers, bit for bit
        threads=len(host.cpus),
        tokens_max=plan.tokens_max,
        blocks=kv.blocks_for(plan.tokens_max, block_tokens=BLOCK_TOKENS, chunk_tokens=chunk),
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=max(chunk, BLOCK_TOKENS),
        host=host.address,
        enter=host.enter,
    )
    port = ENGINE_PORT if host.isolated else free_ports(1)[0]
    spec = with_kvstore(spec, name, daemon.target, engine_address=f"{host.address}:{port}")
    return start_engine(spec, scratch=scratch, log=logs / f"{name}.log", port=port)
