"""`kvstore bench store --tls`: calls and streams over TLS beside the same over plaintext TCP.

Two daemons in one run: one that speaks TLS and asks for a token, one that is open. Rounds alternate
between them.
"""

from __future__ import annotations

import datetime
import ipaddress
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import Client, Group, Namespace
from kvstore.model.errors import Unavailable
from kvstore.model.tenant import DEFAULT_TENANT, Role
from kvstore.system.token_file import changing, make_token
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.store import EXTENT_NBYTES, Say, StorePlan, Timing, chain

CALLS = 20  # of a round: one alone takes half a millisecond
UNARY_ROUNDS = 10  # for each round of streams
MATCH_KEYS = 16
WARM_S = 60.0


def run_tls(plan: StorePlan, say: Say) -> dict[str, Any]:
    """Measure. Raises Unavailable if records come back wrong."""
    with ExitStack() as stack:
        say("two daemons: one over TLS with a token, one over plaintext TCP")
        clients = {
            "plain": stack.enter_context(_plain(plan)),
            "tls": stack.enter_context(_tls(plan)),
        }
        for client in clients.values():
            _fill(client, plan)
        say(f"{plan.rounds * UNARY_ROUNDS} rounds of {CALLS} calls")
        unary = _timed(plan.rounds * UNARY_ROUNDS, clients, lambda client: _calls(client, plan))
        say(f"{plan.rounds} rounds of {plan.records} x {plan.record_nbytes >> 10} KiB")
        stream = _timed(plan.rounds, clients, lambda client: _read(client, plan))
    nbytes = plan.records * plan.record_nbytes
    return {
        "tls": {
            "unary_p50_vs_plain": unary["tls"].p50 / unary["plain"].p50,
            "stream_vs_plain": stream["plain"].p50 / stream["tls"].p50,
            "unary_p50_ms": 1e3 * unary["tls"].p50 / CALLS,
            "stream_gb_per_s": nbytes / stream["tls"].p50 / 1e9,
        },
        "plan": asdict(plan),
        "seconds": {
            f"{kind}_{side}": asdict(timing)
            for kind, timings in (("unary", unary), ("stream", stream))
            for side, timing in timings.items()
        },
    }


@contextmanager
def _plain(plan: StorePlan) -> Iterator[Client]:
    with Daemon(*_settings(plan), file=False, tcp=True) as daemon:
        with Client(daemon.start().address, timeout_s=WARM_S) as client:
            yield client
        daemon.stop()


@contextmanager
def _tls(plan: StorePlan) -> Iterator[Client]:
    with tempfile.TemporaryDirectory(prefix="kv-tls-") as place:
        directory = Path(place)
        make_pair(directory)
        token, entry = make_token(DEFAULT_TENANT, Role.WRITER)
        with changing(directory / "tokens") as entries:
            entries.append(entry)
        (directory / "token").write_text(token)
        settings = (
            *_settings(plan),
            "server.listen=127.0.0.1:0",
            f"tls.cert={directory}/cert.pem",
            f"tls.key={directory}/key.pem",
            f"security.tokens={directory}/tokens",
        )
        shown: dict[str, Any] = {
            "token_file": directory / "token",
            "tls_ca": directory / "cert.pem",
        }
        with Daemon(*settings, file=False) as daemon:
            with Client(daemon.start().address, timeout_s=WARM_S, **shown) as client:
                yield client
            daemon.stop()


def _settings(plan: StorePlan) -> tuple[str, str]:
    return f"dram.capacity={plan.arena_nbytes}", f"dram.extent={EXTENT_NBYTES}"


def _namespace(plan: StorePlan) -> Namespace:
    group = Group("all", plan.record_nbytes)
    return Namespace(block_tokens=16, groups=(group,), identity=(("bench", "tls"),))


def _fill(client: Client, plan: StorePlan) -> None:
    namespace = _namespace(plan)
    client.register(namespace)
    draw = np.random.default_rng(0)
    records = [draw.bytes(plan.record_nbytes) for _ in range(plan.records)]
    keys = chain(namespace.id, plan.records)
    done = client.put(namespace.id, keys, records, wait_s=WARM_S)
    if done.refused or client.get(namespace.id, keys) != records:
        raise Unavailable("the records did not come back as they were put")


def _calls(client: Client, plan: StorePlan) -> None:
    namespace = _namespace(plan)
    keys = chain(namespace.id, min(MATCH_KEYS, plan.records))

    async def ask(remote: Any) -> None:
        for _ in range(CALLS):
            await remote.match(namespace.id, keys)

    client.submit(ask).result()


def _read(client: Client, plan: StorePlan) -> None:
    namespace = _namespace(plan)
    if None in client.get(namespace.id, chain(namespace.id, plan.records)):
        raise Unavailable("a record that was just stored is missing")


def _timed(
    rounds: int, clients: dict[str, Client], work: Callable[[Client], None]
) -> dict[str, Timing]:
    """Time the sides in turns, after one untimed round."""
    seconds: dict[str, list[float]] = {side: [] for side in clients}
    for number in range(-1, rounds):
        sides = list(clients.items())
        for side, client in sides[::-1] if number % 2 else sides:
            started = time.perf_counter()
            work(client)
            if number >= 0:
                seconds[side].append(time.perf_counter() - started)
    return {side: Timing.of(each) for side, each in seconds.items()}


def make_pair(directory: Path, *names: str) -> None:
    """Write cert.pem, which signs itself, and key.pem, for 127.0.0.1, `names` and an hour."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvstore bench")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    all_names = [address, *(x509.DNSName(each) for each in names)]
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(all_names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (directory / "cert.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    path = directory / "key.pem"
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
