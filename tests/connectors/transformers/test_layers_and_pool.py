"""Restores that begin before all is there, copies by the ring, and blocks kept in the GPU's memory.

All of it runs in host memory too: the ring with a device that is the host, the pool in its tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore import Client, ConfigError, InvalidRequest  # noqa: E402
from kvstore.model.block import Part, Span  # noqa: E402
from kvstore.model.keys import KeyChain, root_key  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_kernels import registration  # noqa: E402
from kvstore_transformers import Prefixes, loading, prefixes  # noqa: E402
from kvstore_transformers.copying import DeviceCopier, HostCopier  # noqa: E402
from tests.connectors.transformers.test_connector import (  # noqa: E402
    make_model,
    plain,
    prompt,
    stored,
)

LAYER_BLOCK = 128  # tokens: 64 KiB of the llama's KV per layer, where a slice may end


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("dram.capacity=128MiB", "dram.extent=64MiB") as daemon:
        yield daemon.start()


@pytest.fixture(
    params=[
        "llama",
        "gemma3",
        *(pytest.param(f"{m} cuda", marks=pytest.mark.gpu) for m in ("llama", "gemma3")),
    ]
)
def model(request):
    name, _, device = request.param.partition(" ")
    if device and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return make_model(name).to(device or "cpu")


@pytest.fixture
def thin_slices(monkeypatch):
    monkeypatch.setattr(loading, "SLICE_NBYTES_MIN", 1)


class Prompted:
    """A streamer that counts what it was given before the first token."""

    def __init__(self) -> None:
        self.prompts = 0
        self.tokens: list[int] = []

    def put(self, value) -> None:
        if value.dim() > 1 or len(value) > 1:
            self.prompts += 1
        else:
            self.tokens += value.tolist()

    def end(self) -> None: ...


# ---- layer by layer ------------------------------------------------------------------------------


class Gated(HostCopier):
    """Lets slices through one by one."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)

    def write(self, filled, after):
        for leaves in super().write(filled, after):
            self.gate.acquire()
            yield leaves


def noting(forward, reached: list[int], at: int):
    """Return a forward that notes its layer; a model with hooks is refused."""

    def noted(*args, **kwargs):
        output = forward(*args, **kwargs)
        reached.append(at)
        return output

    return noted


def test_a_layers_forward_waits_for_that_layer_alone(daemon, monkeypatch, thin_slices):
    model, ids = make_model("llama"), prompt(3 * LAYER_BLOCK + 5)
    gated = Gated()
    monkeypatch.setattr(prefixes, "copier_for", lambda *args: gated)
    expected = plain(model, ids)
    with Prefixes(model, daemon.target, block_tokens=LAYER_BLOCK, record="raw") as opened:
        stored(opened, ids)
        assert opened.flush()
        reached: list[int] = []
        for at, layer in enumerate(model.model.layers):
            monkeypatch.setattr(layer.mlp, "forward", noting(layer.mlp.forward, reached, at))
        answers = []
        asking = threading.Thread(target=lambda: answers.append(stored(opened, ids)))
        asking.start()
        for layer in range(4):
            assert reached == list(range(layer))
            gated.gate.release()
            until(lambda layer=layer: reached[: layer + 1] == list(range(layer + 1)), 10)
        asking.join(10)
        assert torch.equal(answers[0], expected)
        assert opened.loads_failed == 0


@pytest.mark.parametrize("record", ["first layer", "last layer"])
def test_a_load_found_corrupt_during_the_forward_is_computed_anew(
    daemon, model, thin_slices, record
):
    ids = prompt(3 * LAYER_BLOCK + 5)
    expected = plain(model, ids)
    with Prefixes(model, daemon.target, block_tokens=LAYER_BLOCK) as opened:
        stored(opened, ids)
        assert opened.flush()
        with Client(daemon.target) as intruder:
            _damage(intruder, opened._namespace, ids, -10 if record == "last layer" else 10)
        streamer = Prompted()
        assert torch.equal(stored(opened, ids, streamer=streamer), expected)
        assert opened.loads_failed == 1
        assert streamer.prompts == 1
        assert streamer.tokens == expected[0, ids.shape[1] :].tolist()
        assert opened.flush()
        with Client(daemon.target) as looking:
            assert looking.admin.stats()["totals"]["reported_blocks"]["dropped"] >= 1
        assert torch.equal(stored(opened, ids), expected)
        assert opened.loads_failed == 1, "the wrong copy has left; the file has a right one"


def _damage(client, namespace, ids, at):
    """Flip a bit of the last block's record in the largest group, at a byte of it."""
    client.register(namespace)
    keys = KeyChain(root_key(namespace.id), namespace.block_tokens).update(ids[0].tolist())
    sizes = [group.record_nbytes for group in namespace.groups]
    spans = [Span(Part(sizes.index(max(sizes)), 0), len(keys) - 1, len(keys))]
    grant = client.acquire(namespace.id, keys, spans=spans)
    (slot,) = grant.slots
    client.view(slot)[at] ^= 1
    client.release(grant.lease_id)


def test_a_load_that_never_ends_is_given_up(daemon, monkeypatch):
    model, ids = make_model("llama"), prompt(100)
    gated = Gated()
    monkeypatch.setattr(prefixes, "copier_for", lambda *args: gated)
    monkeypatch.setattr(loading, "WAIT_S", 0.2)
    expected = plain(model, ids)
    with Prefixes(model, daemon.target, record="raw") as opened:
        stored(opened, ids)
        assert opened.flush()
        assert torch.equal(stored(opened, ids), expected)
        assert opened.loads_failed == 1
        gated.gate.release()  # or closing would wait for it


# ---- the ring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reached", [True, False])
def test_tokens_are_equal_through_the_ring(daemon, monkeypatch, reached):
    monkeypatch.setattr(registration, "LOOK_S", 0.01)
    for name in ("llama", "gemma3"):
        model, ids = make_model(name), prompt(300)

        def by_ring(device, record_nbytes, extents):
            return DeviceCopier(device, record_nbytes, extents if reached else dict)

        monkeypatch.setattr(prefixes, "copier_for", by_ring)
        expected = plain(model, ids)
        with Prefixes(model, daemon.target, record="raw") as opened:
            opened.load(ids)  # connects
            lanes = opened._copier._lanes
            until(lambda lanes=lanes: not reached or lanes.registration.registered_nbytes, 10)
            assert torch.equal(stored(opened, ids), expected)
            assert opened.flush()
            assert opened.load(ids).restored_blocks == 299 // 32
            assert torch.equal(stored(opened, ids), expected)
            assert opened.loads_failed == 0
            if not reached:
                assert opened.bounced_nbytes > 0
            threads = {thread.name for thread in threading.enumerate()}
            assert "kvstore-register" in threads
        until(lambda: "kvstore-register" not in {t.name for t in threading.enumerate()}, 5)


# ---- the pool ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "hz"])
def test_blocks_in_gpu_memory_are_hits_without_a_daemon(daemon, model, policy):
    ids = prompt(300)
    expected = plain(model, ids)
    with Prefixes(model, daemon.target, hbm_bytes=8 << 20, hbm_policy=policy) as opened:
        stored(opened, ids)
        assert opened.flush()
        assert opened.hbm_blocks == 299 // 32
        daemon.kill()
        assert opened.load(ids).restored_blocks == 299 // 32
        assert torch.equal(stored(opened, ids), expected)
        longer = torch.cat([expected, prompt(40, seed=1)], 1)
        assert opened.load(longer).restored_blocks >= 299 // 32
        assert torch.equal(stored(opened, longer), plain(model, longer))
        assert opened.loads_failed == 0


def test_the_longer_prefix_wins_and_comes_into_gpu_memory(daemon):
    model = make_model("llama")
    short, ids = prompt(100), prompt(300)[:, :300]
    ids = torch.cat([short, ids], 1)
    with Prefixes(model, daemon.target) as plain_one:
        stored(plain_one, ids)
        assert plain_one.flush()
    with Prefixes(model, daemon.target, hbm_bytes=8 << 20) as opened:
        stored(opened, short)
        assert opened.flush()
        assert opened.hbm_blocks == 3
        cache = opened.load(ids)
        assert cache.restored_blocks == cache.stored_blocks == 399 // 32
        assert torch.equal(stored(opened, ids), plain(model, ids))
        assert opened.flush()
        assert opened.hbm_blocks >= 399 // 32
        assert opened.load(ids).stored_blocks == 0, "the daemon was not even asked"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_small_pool_keeps_what_was_used_last_and_never_more_than_fits(daemon, name):
    model = make_model(name)
    with Prefixes(model, daemon.target) as opened:
        block = sum(group.record_nbytes for group in opened._namespace.groups)
    with Prefixes(model, daemon.target, hbm_bytes=12 * block) as opened:
        daemon.kill()  # so that only the pool can hit
        for seed in range(4):
            stored(opened, prompt(200, seed=seed))
            until(lambda: not opened._saver._pending, 10)
            assert 0 < opened._pool._free.used <= 12 * block
        hits = [opened.load(prompt(200, seed=seed)).restored_blocks for seed in range(4)]
        assert hits[3] == 6
        assert hits[0] == 0
        assert torch.equal(stored(opened, prompt(200, seed=3)), plain(model, prompt(200, seed=3)))
        assert torch.equal(stored(opened, prompt(200, seed=0)), plain(model, prompt(200, seed=0)))
        big = prompt(900, seed=9)
        assert torch.equal(stored(opened, big), plain(model, big))
        until(lambda: not opened._saver._pending, 10)
        assert torch.equal(stored(opened, big), plain(model, big))


def test_rotten_gpu_memory_is_a_miss(daemon):
    model, ids = make_model("llama"), prompt(300)
    expected = plain(model, ids)
    with Prefixes(model, daemon.target, hbm_bytes=8 << 20) as opened:
        stored(opened, ids)
        assert opened.flush()
        opened._pool._memory[500] ^= 1
        assert torch.equal(stored(opened, ids), expected)
        assert opened.loads_failed == 1
        assert opened.flush()
        assert opened.load(ids).restored_blocks == 299 // 32


def test_pools_that_cannot_be_are_refused(daemon):
    model = make_model("llama")
    with pytest.raises(ConfigError, match="no eviction policy"):
        Prefixes(model, daemon.target, hbm_bytes=1 << 20, hbm_policy="newest")
    with pytest.raises(InvalidRequest, match="lower it"):
        Prefixes(model, daemon.target, hbm_bytes=1 << 60)
