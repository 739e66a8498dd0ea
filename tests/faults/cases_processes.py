"""Faults of engines: processes that stop, die, or hold on to what they lease."""

from __future__ import annotations

import secrets
import threading
import time

from kvstore import Client
from kvstore.testing.samples import sample_keys, sample_namespace
from kvstore.testing.wait import until
from tests.faults.scene import EngineProcess, Scene

LEASE_S = 1.0
SHORT_LEASE = f"limits.lease_s={LEASE_S}"
BIG_NBYTES = 1 << 20  # 64 of them fill the arena
QUEUE = 500


def one_session_for_all_workers(scene: Scene) -> None:
    """Workers join by token; a lease ends with the last of its readers, not before."""
    token = secrets.token_hex(16)
    engine = [scene.engine(token) for _ in range(3)]
    stranger = scene.engine()
    scheduler, *workers = engine
    scheduler.ask("save", prefix="shared", blocks=8)
    scene.expect(scene.stats()["sessions"] == 2, "the processes of one engine share a session")
    lease = scheduler.ask("acquire", prefix="shared", blocks=8, readers=2)["lease"]
    scene.expect(not stranger.ask("release", lease=lease)["held"], "a stranger released a lease")
    for worker, left in zip(workers, (1, 0), strict=True):
        scene.expect(worker.ask("release", lease=lease)["held"], "a worker's release")
        scene.expect(scene.held()["leases"] == left, "a lease ends with its last reader")
    stranger.kill()
    until(lambda: scene.stats()["sessions"] == 1, 5.0)
    scene.expect(scheduler.ask("load", prefix="shared", blocks=8)["hit"] == 8, "a neighbour died")


def reader_stopped_past_its_lease(scene: Scene) -> None:
    """Its slots are in limbo, so what it reads late is still what was put; it does not count."""
    reader, other = scene.engine(), scene.engine()
    reader.ask("save", prefix="read", blocks=16)
    lease = reader.ask("acquire", prefix="read", blocks=16)["lease"]
    reader.stop()
    until(lambda: scene.held()["limbo_bytes"], 5 * LEASE_S)
    _churn(scene, other)
    reader.go_on()
    scene.expect(reader.ask("read", lease=lease)["wrong"] == 0, "a slot in limbo was reused")
    scene.expect(not reader.ask("release", lease=lease)["held"], "a late release was held")
    scene.expect_freed()
    scene.expect("hit" in reader.ask("load", prefix="read", blocks=16), "it cannot go on")


def writer_stopped_past_its_lease(scene: Scene) -> None:
    """What it writes late goes to slots that nobody else has; its commit is refused."""
    writer, other = scene.engine(), scene.engine()
    lease = writer.ask("reserve", prefix="late", blocks=16)["lease"]
    writer.stop()
    until(lambda: scene.held()["limbo_bytes"], 5 * LEASE_S)
    saved = _churn(scene, other)
    writer.go_on()
    writer.ask("write", lease=lease)
    scene.expect(writer.ask("commit", lease=lease).get("error"), "a late commit was taken")
    for prefix in saved:
        scene.wrong += other.ask("load", prefix=prefix, blocks=16)["wrong"]
    writer.ask("release", lease=lease)
    scene.expect_freed()
    scene.expect(writer.ask("load", prefix="late", blocks=16)["hit"] == 0, "it was published")


def scheduler_killed(scene: Scene) -> None:
    """Leases, reservations and limbo of its session are freed although a worker lives."""
    _kill_a_process(scene, victim=0)


def worker_killed(scene: Scene) -> None:
    """The same when a worker dies and the scheduler lives; the rest goes on in a new session."""
    _kill_a_process(scene, victim=1)


def process_killed_while_another_is_stopped(scene: Scene) -> None:
    """As long as the stopped one lives its slots stay in limbo; they are freed when it is gone."""
    token = secrets.token_hex(16)
    first, second = scene.engine(token), scene.engine(token)
    first.ask("save", prefix="held", blocks=16)
    second.ask("reserve", prefix="held too", blocks=16)
    second.stop()
    first.kill()
    until(lambda: scene.held()["limbo_bytes"], 5.0)
    time.sleep(2 * LEASE_S)
    scene.expect(scene.held()["limbo_bytes"], "slots of a stopped process were freed")
    second.kill()
    scene.expect_freed()


def leases_under_half_the_arena(scene: Scene) -> None:
    """With 500 requests queueing for leases, those granted never cover more than half of it."""
    saver = scene.engine(record_nbytes=BIG_NBYTES, kind="fixed")
    count = 60 if scene.quick else QUEUE
    for number in range(30):
        saver.ask("save", prefix=f"queue {number}", blocks=4, durable=True)
    capacity = scene.stats()["dram"]["capacity_bytes"]
    most = [0]
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(scene, over, most))
    watcher.start()
    namespace = sample_namespace("faults", BIG_NBYTES)
    with Client(scene.daemon.target, timeout_s=30.0) as client:
        client.register(namespace)
        asked = [
            client.submit(
                lambda remote, number=number: remote.acquire(  # type: ignore[misc]
                    namespace.id, sample_keys(f"queue {number % 30}", 4), wait_s=5.0
                )
            )
            for number in range(count)
        ]
        grants = [each.result(60) for each in asked]
        most[0] = max(most[0], scene.held()["leased_bytes"])
        granted = [grant for grant in grants if any(grant.slots)]
        for grant in granted:
            client.release(grant.lease_id)
        for grant in grants:
            if not any(grant.slots) and grant.lease_id:
                client.release(grant.lease_id)
    over.set()
    watcher.join()
    scene.details |= {"granted": len(granted), "most_leased": most[0], "capacity": capacity}
    scene.expect(granted, "nobody got a lease")
    scene.expect(len(granted) < count, "everybody got a lease, so the bound was never met")
    scene.expect(most[0] <= capacity // 2, f"{most[0]} of {capacity} bytes were leased")
    scene.expect_freed()


def _kill_a_process(scene: Scene, victim: int) -> None:
    token = secrets.token_hex(16)
    engine = [scene.engine(token) for _ in range(2)]
    engine[0].ask("save", prefix="held", blocks=16)
    reserved = []
    for number, process in enumerate(engine):
        expires = process.ask("reserve", prefix=f"expires {number}", blocks=8)["lease"]
        until(lambda: scene.held()["limbo_bytes"], 5 * LEASE_S)
        process.ask("acquire", prefix="held", blocks=16, readers=2)
        reserved.append(
            (expires, process.ask("reserve", prefix=f"new {number}", blocks=8)["lease"])
        )
    survivor = engine[1 - victim]
    engine[victim].kill()
    # It was writing, and may until it has ended: nothing of that is published.
    for lease in reserved[1 - victim]:
        survivor.ask("write", lease=lease)
        scene.expect("error" in survivor.ask("commit", lease=lease), "a commit in no session")
    scene.expect_freed()
    until(lambda: survivor.ask("load", prefix="held", blocks=16).get("hit") == 16, 5.0)


def _churn(scene: Scene, engine: EngineProcess) -> list[str]:
    """Save several times what the arena holds, so that every slot that may be reused is."""
    prefixes = [f"churn {number}" for number in range(220)]
    for prefix in prefixes:
        scene.expect("error" not in engine.ask("save", prefix=prefix, blocks=16), "a save failed")
    evicted = scene.stats()["dram"]["evicted_blocks"]
    scene.expect(evicted, "the arena was never full")
    return prefixes[-20:]


def _watch(scene: Scene, over: threading.Event, most: list[int]) -> None:
    with Client(scene.daemon.target, arena=False, timeout_s=10.0) as client:
        while not over.is_set():
            most[0] = max(most[0], client.admin.stats()["dram"]["leased_bytes"])
            time.sleep(0.01)
