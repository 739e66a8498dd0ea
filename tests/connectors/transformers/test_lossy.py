"""Lossy blocks: a base part that is enough, a fine part that may be missing but is never wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore import Client, ConfigError, InvalidRequest, checksum  # noqa: E402
from kvstore.model.block import BlockKey  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_kernels import native  # noqa: E402
from kvstore_transformers import Prefixes  # noqa: E402
from kvstore_transformers.compat import in_forward  # noqa: E402
from tests.connectors.transformers.test_coded import DTYPES, ids, make  # noqa: E402
from tests.connectors.transformers.test_connector import (  # noqa: E402
    make_model,
    plain,
    prompt,
    stored,
)

TOKENS, BLOCK = 300, 16
BLOCKS = 18  # of the prompt, its last token left out
KEPT = BLOCKS * BLOCK
# An even error of one of 256 (32, 16) steps over the range of 16 to 64 values, which is some five
# times their deviation: 5 / 256 / sqrt(12) = 0.006, and 0.05 and 0.09 of the base's 5 and 4 planes.
FINE_ERROR, BASE_ERROR = 0.01, 0.12


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("file.path=") as daemon:
        yield daemon.start()


def opened(model, daemon: Daemon, **options) -> Prefixes:
    prefixes = Prefixes(
        model, daemon.target, **{"block_tokens": BLOCK, "fidelity": "ep", **options}
    )
    assert prefixes.wait_ready(30)
    return prefixes


def saved(prefixes: Prefixes) -> bool:
    return prefixes._saver.drain(30)  # not all daemons here have files to flush to


def computed(prefixes: Prefixes, asked: torch.Tensor, **options):
    """Compute a prompt and store it; return its KV as it was computed."""
    cache = prefixes.load(asked, **options)
    with torch.inference_mode():
        rest = asked[:, cache.restored_tokens :]
        prefixes.model(input_ids=rest, **in_forward(prefixes.model, cache), use_cache=True)
    prefixes.save(cache, asked)
    assert saved(prefixes)
    return cache


def kv(cache) -> list[torch.Tensor]:
    """The KV of full attention, (heads, blocks, tokens, head size)."""
    return [
        part[0, :, :KEPT].unflatten(1, (BLOCKS, BLOCK))
        for layer in cache.layers
        if not layer.is_sliding
        for part in (layer.keys, layer.values)
    ]


def errors(was, now) -> list[float]:
    """The error of each block, in deviations of what it was: the worst of its layers."""
    return [
        max(
            float((before - after).float().norm() / before.float().norm())
            for before, after in zip(
                (part[:, block] for part in kv(was)),
                (part[:, block] for part in kv(now)),
                strict=True,
            )
        )
        for block in range(BLOCKS)
    ]


def reported(client: Client) -> dict[str, int]:
    """What became of the blocks that were reported as corrupt; empty before the first one."""
    return client.admin.stats()["totals"].get("reported_blocks", {})


def keys_of(prefixes: Prefixes, asked: torch.Tensor) -> list[BlockKey]:
    return prefixes._keys(asked[0].tolist())[:BLOCKS]


def damage_fine(client: Client, prefixes: Prefixes, asked: torch.Tensor, block: int) -> None:
    """Change a byte of a block's fine part, in the daemon's memory."""
    client.register(prefixes._namespace)
    grant = client.acquire(prefixes._namespace_id, keys_of(prefixes, asked))
    at = sum(span.end - span.begin for span in grant.spans[:1]) + block
    assert prefixes._namespace.groups[grant.spans[1].part.group].refines == 0
    client.view(grant.slots[at])[100] ^= 1
    client.release(grant.lease_id)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "windowed"])
def test_the_first_block_is_exact_and_the_others_are_near(daemon, dtype, windowed) -> None:
    asked = ids(TOKENS)
    with opened(make(dtype, windowed=windowed), daemon) as prefixes:
        was = computed(prefixes, asked)
        now = prefixes.load(asked)
        assert now.restored_blocks == BLOCKS
        first, *others = errors(was, now)
        assert first == 0
        assert all(torch.equal(a[:, 0], b[:, 0]) for a, b in zip(kv(was), kv(now), strict=True))
        assert all(0 < each < FINE_ERROR for each in others)
        assert prefixes.loads_failed == prefixes.fine_parts.missing == 0
        assert prefixes.fine_parts.used >= BLOCKS - 1
        # L3 does not make float16 smaller; of a window group the first block is not saved.
        assert prefixes.saved_uncoded_blocks == (dtype is torch.float16)
        before = prefixes.saved_blocks
        computed(prefixes, torch.cat([asked, ids(64, seed=1)], 1))
        new = 2 * (364 // BLOCK - BLOCKS) * len(prefixes._layout.groups)
        assert prefixes.saved_blocks == before + new, "what was loaded is not saved again"


@pytest.mark.parametrize("kept", ["base", "fine"])
def test_after_a_restart_there_is_what_the_file_tier_kept(kept) -> None:
    model, asked = make(torch.bfloat16), ids(TOKENS)
    with Daemon(f"file.fidelity={kept}") as daemon:
        daemon.start()
        with opened(model, daemon) as prefixes:
            was = computed(prefixes, asked)
            assert prefixes.flush()
        daemon.kill()
        daemon.start()
        with opened(model, daemon) as prefixes:
            now = prefixes.load(asked)
            assert now.restored_blocks == BLOCKS
            first, *others = errors(was, now)
            assert first == 0
            if kept == "fine":
                assert max(others) < FINE_ERROR
                assert prefixes.fine_parts.used == BLOCKS - 1
            else:
                assert min(others) > FINE_ERROR
                assert max(others) < BASE_ERROR
                assert prefixes.fine_parts.missing == BLOCKS - 1
            insisted = prefixes.load(asked, fidelity="fine").restored_blocks
            assert insisted == (BLOCKS if kept == "fine" else 1)
            assert prefixes.loads_failed == 0


def test_the_same_answers_and_fewer_bytes() -> None:
    """A model of which every token counts, whole blocks of its answer included."""
    for name in ("llama", "gemma3"):
        model, asked = make_model(name), prompt(400)
        expected = plain(model, asked)
        sizes = {}
        for fidelity in ("exact", "ep"):
            with (
                Daemon("file.path=") as daemon,
                opened(model, daemon.start(), fidelity=fidelity, block_tokens=32) as prefixes,
                Client(daemon.target) as client,
            ):
                assert torch.equal(stored(prefixes, asked), expected)
                assert saved(prefixes)
                assert torch.equal(stored(prefixes, asked), expected)
                assert prefixes.load(asked).restored_blocks == 399 // 32
                sizes[fidelity] = sum(item.nbytes for item in client.admin.scan())
        assert sizes["exact"] / sizes["ep"] > 2  # float32: 16 planes of 64 less than L3 leaves


def test_a_wrong_fine_part_is_left_out_and_dropped(daemon) -> None:
    model, asked = make(torch.bfloat16), ids(TOKENS)
    with opened(model, daemon) as prefixes, Client(daemon.target) as client:
        was = computed(prefixes, asked)
        damage_fine(client, prefixes, asked, 5)
        now = prefixes.load(asked)
        assert now.restored_blocks == BLOCKS
        found = errors(was, now)
        assert FINE_ERROR < found.pop(5) < BASE_ERROR
        assert max(found) < FINE_ERROR
        counts = prefixes.fine_parts
        assert (counts.wrong, counts.used, prefixes.loads_failed) == (1, BLOCKS - 2, 0)
        # The daemon looks for itself, drops the fine part and keeps the base.
        until(lambda: reported(client).get("dropped") == 1)
        assert prefixes.load(asked).restored_blocks == BLOCKS
        assert (counts.wrong, counts.missing) == (1, 1)
        assert prefixes.load(asked, fidelity="fine").restored_blocks == 5


def test_a_wrong_base_fails_the_load_whatever_its_fine_part_says(daemon) -> None:
    model, asked = make(torch.bfloat16), ids(TOKENS)
    with opened(model, daemon) as prefixes, Client(daemon.target) as client:
        computed(prefixes, asked)
        client.register(prefixes._namespace)
        grant = client.acquire(prefixes._namespace_id, keys_of(prefixes, asked))
        client.view(grant.slots[5])[100] ^= 1
        client.release(grant.lease_id)
        assert prefixes.load(asked).restored_blocks == 0
        assert prefixes.loads_failed == 1
        assert prefixes.load(asked).restored_blocks == 5


def test_who_insists_computes_anew_what_has_a_wrong_fine_part(daemon) -> None:
    model, asked = make(torch.bfloat16), ids(TOKENS)
    with opened(model, daemon) as prefixes, Client(daemon.target) as client:
        was = computed(prefixes, asked)
        answer = model.generate(asked, max_new_tokens=4, do_sample=False)
        damage_fine(client, prefixes, asked, 5)
        again = prefixes.generate(asked, fidelity="fine", max_new_tokens=4, do_sample=False)
        assert torch.equal(again, answer)
        assert prefixes.loads_failed == 1
        assert saved(prefixes)
        now = prefixes.load(asked, fidelity="fine")
        assert now.restored_blocks == BLOCKS, "the base was replaced with a pair"
        assert max(errors(was, now)) < FINE_ERROR


def test_who_insists_replaces_bases_that_lost_their_fine_parts() -> None:
    model, asked = make(torch.bfloat16), ids(TOKENS)
    with Daemon() as daemon:  # file.fidelity=base
        daemon.start()
        with opened(model, daemon) as prefixes:
            was = computed(prefixes, asked)
            assert prefixes.flush()
        daemon.kill()
        daemon.start()
        with opened(model, daemon) as prefixes:
            computed(prefixes, asked)
            assert prefixes.load(asked, fidelity="fine").restored_blocks == 1
            assert prefixes.saved_blocks == 0, "bases are enough for who does not insist"
            computed(prefixes, asked, fidelity="fine")
            now = prefixes.load(asked, fidelity="fine")
            assert now.restored_blocks == BLOCKS
            assert max(errors(was, now)) < 2 * FINE_ERROR  # the first block came from the store
            assert prefixes.loads_failed == 0


@pytest.mark.parametrize("insists", [False, True])
def test_planes_of_two_encodings_are_never_mixed(daemon, insists: bool) -> None:
    """A writer that is wrong: every checksum is right, the fine parts are of other blocks."""
    model, asked = make(torch.bfloat16), ids(TOKENS)
    with opened(model, daemon) as prefixes, Client(daemon.target) as client:
        was = computed(prefixes, asked)
        keys, namespace_id = keys_of(prefixes, asked), client.register(prefixes._namespace)
        grant = client.acquire(namespace_id, keys)
        records = [bytes(client.view(slot)) if slot else b"" for slot in grant.slots]
        client.release(grant.lease_id)
        client.admin.delete(namespace_id, keys)
        bases, fines = records[:BLOCKS], records[BLOCKS + 1 :]
        records = [*bases, b"", *fines[1:], fines[0]]  # each has the next one's
        sizes = [len(each) or len(fines[0]) for each in records]
        grant = client.reserve(
            namespace_id, keys, first_block=0, parent=None, spans=grant.spans, sizes=sizes
        )
        assert [slot is None for slot in grant.slots] == [not each for each in records]
        for slot, each in zip(grant.slots, records, strict=True):
            if slot is not None:
                client.view(slot)[:] = each
        client.commit(grant.lease_id, [checksum(each) if each else 0 for each in records])
        if insists:
            assert prefixes.load(asked, fidelity="fine").restored_blocks == 0
            assert prefixes.loads_failed == 1
            return
        now = prefixes.load(asked)
        assert now.restored_blocks == BLOCKS
        assert prefixes.loads_failed == 0
        first, *others = errors(was, now)
        assert first == 0
        assert min(others) > FINE_ERROR
        assert max(others) < BASE_ERROR
        assert (prefixes.fine_parts.used, prefixes.fine_parts.wrong) == (0, BLOCKS - 1)
        # The daemon drops them: what is left for who insists is the first block, which is exact.
        until(lambda: client.match(namespace_id, keys, refined=True).hit_blocks == 1)
        assert prefixes.load(asked, fidelity="fine").restored_blocks == 1
        assert prefixes.loads_failed == 0


def test_what_cannot_be_lossy_is_exact_and_fine_enough_for_who_insists(daemon) -> None:
    model, asked = make(torch.bfloat16), ids(TOKENS)
    with opened(model, daemon) as prefixes:
        cache = prefixes.load(asked)
        with torch.inference_mode():
            model(input_ids=asked, **in_forward(model, cache), use_cache=True)
            cache.layers[1].values[0, 0, 3 * BLOCK + 2, 5] = float("inf")
            cache.layers[0].keys[0, 1, 4 * BLOCK, 0] = 1e6
        prefixes.save(cache, asked)
        assert saved(prefixes)
        now = prefixes.load(asked, fidelity="fine")
        assert now.restored_blocks == BLOCKS
        for was, after in zip(kv(cache), kv(now), strict=True):
            for block in (0, 3, 4):
                assert torch.equal(was[:, block], after[:, block])
        assert prefixes.fine_parts.used == BLOCKS - 3
        assert prefixes.fine_parts.missing == 0


def test_an_exact_reader_is_never_served_lossy_blocks_nor_the_other_way(daemon) -> None:
    model, asked = make(torch.bfloat16), ids(TOKENS)
    with opened(model, daemon) as lossy, opened(model, daemon, fidelity="exact") as exact:
        assert lossy._namespace.fidelity == "ep"
        computed(lossy, asked)
        assert exact.load(asked).restored_blocks == 0
        was = computed(exact, asked)
        now = exact.load(asked, fidelity="fine")
        assert now.restored_blocks == BLOCKS
        assert errors(was, now) == [0] * BLOCKS
        assert exact.fine_parts.used == exact.fine_parts.missing == 0
    with opened(model, daemon) as other:
        assert other.load(asked).restored_blocks == BLOCKS
    only_exact = ids(TOKENS, seed=5)
    with opened(model, daemon, fidelity="exact") as exact, opened(model, daemon) as lossy:
        computed(exact, only_exact)
        assert lossy.load(only_exact).restored_blocks == 0


def test_blocks_in_the_pool_are_hits_but_for_who_insists(daemon) -> None:
    model, asked = make(torch.bfloat16), ids(TOKENS)
    with opened(model, daemon, hbm_bytes=8 << 20) as prefixes:
        computed(prefixes, asked)
        assert prefixes.hbm_blocks == BLOCKS
        assert prefixes.load(asked, fidelity="fine").restored_blocks == BLOCKS
        assert prefixes.fine_parts.used == BLOCKS - 1, "the pool does not know what it has"
        daemon.kill()
        assert prefixes.load(asked).restored_blocks == BLOCKS
        assert prefixes.load(asked, fidelity="fine").restored_blocks == 0


@pytest.mark.parametrize("longer", [0, 64])
def test_what_was_loaded_is_not_saved_again_from_the_pool(daemon, longer: int) -> None:
    """Not though the daemon has evicted it: it would be stored as if it had been computed."""
    model, asked = make(torch.bfloat16), ids(TOKENS)
    more = torch.cat([asked, ids(longer, seed=1)], 1)
    with opened(model, daemon) as prefixes:
        computed(prefixes, asked)
    with (
        opened(model, daemon, hbm_bytes=8 << 20) as prefixes,
        Client(daemon.target) as client,
    ):
        computed(prefixes, asked)
        assert prefixes.hbm_blocks == BLOCKS
        assert prefixes.saved_blocks == 0
        keys = keys_of(prefixes, asked)
        assert client.admin.delete(prefixes._namespace_id, keys) == BLOCKS
        assert computed(prefixes, more).restored_blocks == BLOCKS
        new = more.shape[1] // BLOCK - BLOCKS
        assert prefixes.saved_blocks == 2 * new
        assert client.match(prefixes._namespace_id, keys).hit_blocks == 0


def test_what_was_computed_is_saved_again_from_the_pool(daemon) -> None:
    model, asked = make(torch.bfloat16), ids(TOKENS)
    with (
        opened(model, daemon, hbm_bytes=8 << 20) as prefixes,
        Client(daemon.target) as client,
    ):
        was = computed(prefixes, asked)
        keys = keys_of(prefixes, asked)
        assert client.admin.delete(prefixes._namespace_id, keys) == BLOCKS
        assert computed(prefixes, asked).restored_blocks == BLOCKS
        now = prefixes.load(asked, fidelity="fine")
        assert now.restored_blocks == BLOCKS
        assert max(errors(was, now)) < FINE_ERROR


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fidelity": "fp8"}, "exact and ep are known"),
        ({"record": "raw"}, "leave out record='raw'"),
        ({"direct_storage": "always"}, "direct_storage='always'"),
        ({"block_tokens": 12}, "a multiple of 8 is needed; use fidelity='exact'"),
    ],
)
def test_options_that_do_not_go_with_ep_are_refused(daemon, options, told) -> None:
    with pytest.raises(ConfigError, match=told):
        opened(make(torch.bfloat16), daemon, **options)


def test_ep_is_refused_where_it_is_not_possible(daemon, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"neither bfloat16.*use fidelity='exact'"):
        opened(make(torch.float64), daemon)
    monkeypatch.setattr(native, "_loaded", lambda: (None, "there is no library"))
    with pytest.raises(ConfigError, match=r"there is no library.*use fidelity='exact'"):
        opened(make(torch.bfloat16), daemon)


def test_a_prompt_asks_for_base_or_fine(daemon) -> None:
    with (
        opened(make(torch.bfloat16), daemon) as prefixes,
        pytest.raises(InvalidRequest, match="base and fine are known"),
    ):
        prefixes.load(ids(TOKENS), fidelity="exact")  # type: ignore[arg-type]
