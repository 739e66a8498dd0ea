"""Coded records of a model on a GPU: the bytes of a processor, however late the device is.

The kernels for the device run on the processor here; "cuda" takes a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore import Client, ConfigError, checksum  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_kernels import native  # noqa: E402
from kvstore_kernels.codec import device_trial  # noqa: E402
from kvstore_kernels.codec.copies import Fine  # noqa: E402
from kvstore_kernels.codec.device_coder import DeviceCoder  # noqa: E402
from kvstore_kernels.codec.record import Form, Header  # noqa: E402
from kvstore_kernels.coded_lane import ENCODED_NBYTES_MAX  # noqa: E402
from kvstore_transformers import Prefixes, prefixes  # noqa: E402
from kvstore_transformers.cache import empty_pages  # noqa: E402
from kvstore_transformers.coded_device import DeviceCodedCopier, DeviceCoding  # noqa: E402
from kvstore_transformers.coded_host import HostCoding  # noqa: E402
from kvstore_transformers.copying import HostCopier  # noqa: E402
from kvstore_transformers.namespace import LayerGroup, Layout, find_layout  # noqa: E402
from kvstore_transformers.opening import open_coding  # noqa: E402
from tests.connectors.transformers.test_coded import ids, make, used  # noqa: E402
from tests.connectors.transformers.test_lossy import (  # noqa: E402
    BLOCK,
    BLOCKS,
    FINE_ERROR,
    TOKENS,
    computed,
    damage_fine,
    errors,
    keys_of,
)
from tests.connectors.vllm.device_layers import SharedLateDevice, on_host  # noqa: E402
from tests.kernels.late_device import LateDevice  # noqa: E402

needs_library = pytest.mark.skipif(bool(native.reason()), reason=native.reason())
HEADS, LAYERS = 2, 3
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("file.path=") as daemon:
        yield daemon.start()


def layout_of(
    dtype: torch.dtype, keys: int = 64, values: int = 64, device: torch.device = CPU
) -> Layout:
    """Return three layers with so many channels of each kind."""
    both = [(torch.zeros(1, HEADS, 1, each, dtype=dtype),) * LAYERS for each in (keys, values)]
    return Layout((LayerGroup(0, tuple(range(LAYERS)), *both),), device, dtype)


def grown(layout: Layout, blocks: int, seed: int) -> tuple[list, list]:
    """Return a cache's tensors, and pages in them that begin in the middle of one."""
    generator = torch.Generator().manual_seed(seed)
    (group,), tokens = layout.groups, 5 + blocks * BLOCK + 7
    tensors = [
        torch.randn((1, HEADS, tokens, part.shape[3]), generator=generator).to(layout.dtype)
        for both in zip(group.keys, group.values, strict=True)
        for part in both
    ]
    pages = [
        part[0, :, 5 : 5 + blocks * BLOCK].unflatten(1, (blocks, BLOCK)).transpose(0, 1)
        for part in tensors
    ]
    return tensors, pages


def late(device: LateDevice, work) -> None:
    """Have the model do some work, but much before it."""
    for _ in range(20):
        device.engine.run(lambda: None)
    device.engine.run(work)


@needs_library
@pytest.mark.parametrize(
    ("dtype", "lossy"),
    [(BF16, False), (FP32, False), (BF16, True), (FP32, True), (FP16, True)],
    ids=["bf16 l3", "fp32 l3", "bf16 ep", "fp32 ep", "fp16 ep"],
)
@pytest.mark.parametrize("channels", [(64, 64), (80, 48)], ids=str)
def test_records_are_those_of_a_processor_and_come_back(
    dtype, lossy, channels, codec_library
) -> None:
    layout, device = layout_of(dtype, *channels), SharedLateDevice(channels[0])
    host = HostCoding(layout, BLOCK, lossy=lossy)
    coding = DeviceCoding(layout, BLOCK, lossy=lossy, opened=on_host(codec_library), device=device)
    assert coding.form == host.form
    blocks, exact = [4, 0, 3], [False, True, False] if lossy else ()
    tensors, pages = grown(layout, 5, seed=1)
    plain = host.copier(dict)
    right = [
        (bytes(each.base), bytes(each.fine or b""))
        for each in plain.encode(plain.open(0, pages), blocks, exact, None)
    ]
    before = [page.clone() for page in pages]
    values = [part.clone() for part in tensors]
    for part in tensors:
        part.zero_()

    copier = coding.copier(dict)
    opened = copier.open(0, pages)
    copier.encode(opened, blocks, (), copier.mark())  # what is made once waits for the model, too
    late(device, lambda: [a.copy_(b) for a, b in zip(tensors, values, strict=True)])
    made = copier.encode(opened, blocks, exact, copier.mark())
    for part in tensors:
        part.fill_(7)  # what is encoded needs no pages any more
    parts = [part for each in made for part in (each.base, each.fine) if part is not None]
    stored = [(part, memoryview(bytearray(part.nbytes))) for part in parts]
    sums = copier.store(opened, stored)
    assert [bytes(view) for _, view in stored] == [part for pair in right for part in pair if part]
    assert sums == [checksum(view) for _, view in stored]

    views = iter(view for _, view in stored)
    pairs = [(next(views), next(views) if each.fine else None) for each in made]
    records, fines = zip(*pairs, strict=True)
    target = empty_pages(layout.groups[0], 4, BLOCK)
    late(device, lambda: [page.fill_(9) for page in target])  # where the memory was used before
    given = [Fine(fine, checksum(fine)) if fine else None for fine in fines]
    found = copier.refine(copier.open(0, target), [2, 0, 3], records, given, copier.mark())
    copier.close()
    assert [each.base for each in found] == [checksum(record) for record in records]
    if lossy:
        assert [each.refined for each in found] == [True, None, True]
    else:
        assert {Header.parse(record).form for record in records} == {Form.L3}
    for page, was in zip(target, before, strict=True):
        error = (page[[2, 0, 3]].float() - was[blocks].float()).abs().flatten(1).amax(1)
        assert error[1] == 0
        assert (error < 0.1).all() if lossy else (error == 0).all()
        assert (page[1] == 9).all()
    assert device.idle


@pytest.fixture(params=["late", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_device(request, monkeypatch):
    """Return what opens the prefixes of a model whose records are coded on a device."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        pytest.importorskip("cupy")
    else:
        library = request.getfixturevalue("codec_library")
    before = prefixes.open_coding

    def open_(model, daemon: Daemon, **options) -> Prefixes:
        if request.param == "cuda":
            model.to("cuda")
        else:
            device = SharedLateDevice(1, registers=request.param == "late")
            coding = partial(DeviceCoding, opened=on_host(library), device=device)
            monkeypatch.setattr(prefixes, "open_coding", partial(open_coding, opened=coding))
        given = {"block_tokens": BLOCK, "record": "l3", **options}
        opened = Prefixes(model, daemon.target, **given)
        monkeypatch.setattr(prefixes, "open_coding", before)
        assert opened.wait_ready(30)
        assert type(opened._copier) is DeviceCodedCopier
        opened.load(ids(BLOCK + 1, seed=9).to(model.device))  # connects
        assert opened.wait_reached(20) == (request.param != "unregistered")
        return opened

    return request.param, open_


@needs_library
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "windowed"])
@pytest.mark.parametrize("fidelity", ["exact", "ep"])
def test_blocks_come_back_through_a_daemon(daemon, on_device, windowed, fidelity) -> None:
    (kind, open_), model = on_device, make(BF16, windowed=windowed)
    with open_(model, daemon, fidelity=fidelity) as opened, Client(daemon.target) as client:
        asked = ids(TOKENS).to(model.device)
        was = computed(opened, asked)
        assert opened.saved_blocks > 0
        now = opened.load(asked)
        assert now.restored_blocks == BLOCKS
        first, *others = errors(was, now)
        assert first == 0
        assert max(others) < (FINE_ERROR if fidelity == "ep" else 1e-9)
        assert opened.loads_failed == opened.saved_uncoded_blocks == 0
        if fidelity == "ep":
            assert opened.fine_parts.used >= BLOCKS - 1
            assert opened.fine_parts.missing == opened.fine_parts.wrong == 0
        stored = used(client)
        raw = opened.saved_blocks * max(shape.raw_nbytes for shape in opened._coding.shapes)
        assert stored < 0.8 * raw
        if kind != "cuda":
            assert opened.bounced_nbytes == 0
        longer = torch.cat([asked, ids(64, seed=1).to(model.device)], 1)
        before = opened.saved_blocks
        computed(opened, longer)
        assert opened.saved_blocks > before
        assert opened.load(longer).restored_blocks == 363 // BLOCK


@needs_library
@pytest.mark.parametrize("on_device", ["unregistered"], indirect=True)
def test_what_the_device_does_not_reach_goes_through_a_buffer(daemon, on_device) -> None:
    (_, open_), model = on_device, make(BF16, windowed=True)
    with open_(model, daemon, fidelity="ep") as opened, Client(daemon.target) as client:
        was = computed(opened, ids(TOKENS))
        assert opened.bounced_nbytes >= used(client) > 0
        found = errors(was, opened.load(ids(TOKENS)))
        assert found[0] == 0
        assert max(found) < FINE_ERROR
        assert opened.fine_parts.missing == opened.fine_parts.wrong == 0


@needs_library
def test_a_load_that_fails_half_way_leaves_nothing_in_the_cache(
    daemon, on_device, monkeypatch
) -> None:
    """The first group has come then, and the model may have used it."""
    (_, open_), model = on_device, make(BF16, windowed=True)
    with open_(model, daemon) as opened:
        asked = ids(TOKENS).to(model.device)
        answer = opened.generate(asked, max_new_tokens=4, do_sample=False)
        assert opened._saver.drain(30)
        decode, calls = DeviceCoder.decode, []

        def once(coder, *args):
            calls.append(coder)
            if len(calls) % 2 == 0:
                raise RuntimeError("the device has no memory left")
            return decode(coder, *args)

        monkeypatch.setattr(DeviceCoder, "decode", once)
        assert opened.load(asked).restored_blocks == 0
        assert torch.equal(answer, opened.generate(asked, max_new_tokens=4, do_sample=False))
        assert opened.loads_failed == 2
        monkeypatch.undo()
        registration = opened._copier._lanes.registration
        assert not any(region.users for region in registration._regions)
        assert opened.load(asked).restored_blocks == BLOCKS


@needs_library
@pytest.mark.parametrize("fidelity", ["exact", "ep"])
def test_a_model_on_a_gpu_and_one_on_a_cpu_share_what_is_the_same(
    daemon, on_device, fidelity
) -> None:
    """Their records have one shape, so one namespace."""
    _, open_ = on_device
    first, second = ids(TOKENS), ids(TOKENS, seed=3)
    options = {"block_tokens": BLOCK, "record": "l3", "fidelity": fidelity}
    with (
        open_(make(BF16), daemon, fidelity=fidelity) as there,
        Prefixes(make(BF16), daemon.target, **options) as here,
    ):
        assert here.wait_ready(30)
        assert there._namespace_id == here._namespace_id
        for writer, reader, asked in ((there, here, first), (here, there, second)):
            was = computed(writer, asked.to(writer.model.device))
            now = reader.load(asked.to(reader.model.device))
            assert now.restored_blocks == BLOCKS
            for layer in was.layers:
                layer.keys, layer.values = layer.keys.cpu(), layer.values.cpu()
            for layer in now.layers:
                layer.keys, layer.values = layer.keys.cpu(), layer.values.cpu()
            found = errors(was, now)
            assert found[0] == 0
            assert max(found) < (FINE_ERROR if fidelity == "ep" else 1e-9)


@needs_library
def test_a_changed_record_fails_its_load_and_is_dropped(daemon, on_device) -> None:
    _, open_ = on_device
    model = make(BF16)
    with open_(model, daemon) as opened, Client(daemon.target) as client:
        asked = ids(TOKENS).to(model.device)
        answer = opened.generate(asked, max_new_tokens=4, do_sample=False)
        assert opened._saver.drain(30)
        client.register(opened._namespace)
        grant = client.acquire(opened._namespace_id, keys_of(opened, asked))
        client.view(grant.slots[5])[70] ^= 1
        client.release(grant.lease_id)
        again = opened.generate(asked, max_new_tokens=4, do_sample=False)
        assert torch.equal(answer, again)
        assert opened.loads_failed == 1
        assert opened._saver.drain(30)
        until(lambda: opened.load(asked).restored_blocks == BLOCKS)  # saved again


@needs_library
def test_a_wrong_fine_part_is_left_out(daemon, on_device) -> None:
    _, open_ = on_device
    model = make(BF16)
    with (
        open_(model, daemon, fidelity="ep", record="auto") as opened,
        Client(daemon.target) as client,
    ):
        asked = ids(TOKENS).to(model.device)
        was = computed(opened, asked)
        damage_fine(client, opened, asked, 5)
        now = opened.load(asked)
        assert now.restored_blocks == BLOCKS
        found = errors(was, now)
        assert found.pop(5) > FINE_ERROR
        assert max(found) < FINE_ERROR
        assert (opened.fine_parts.wrong, opened.loads_failed) == (1, 0)
        until(lambda: opened.load(asked, fidelity="fine").restored_blocks == 5)


@needs_library
def test_what_coding_makes_no_smaller_is_stored_raw_and_counted(daemon, on_device) -> None:
    """Three blocks of random bits, in the middle of a prompt."""
    _, open_ = on_device
    model = make(BF16)
    with open_(model, daemon) as opened:
        asked = ids(TOKENS).to(model.device)
        was = computed(opened, asked)
        assert opened.saved_uncoded_blocks == 0
        other = ids(TOKENS, seed=2).to(model.device)
        cache = computed_with_noise(opened, other)
        assert opened.saved_uncoded_blocks == 3
        now = opened.load(other)
        assert now.restored_blocks == BLOCKS
        for before, after in zip(cache.layers, now.layers, strict=True):
            bits = before.keys[:, :, : BLOCKS * BLOCK].view(torch.int16)
            assert torch.equal(bits, after.keys.view(torch.int16))
        assert errors(was, opened.load(asked)) == [0] * BLOCKS


def computed_with_noise(opened: Prefixes, asked: torch.Tensor):
    """Compute a prompt, put noise into three of its blocks, and store it."""
    from kvstore_transformers.compat import in_forward

    cache = opened.load(asked)
    with torch.inference_mode():
        opened.model(input_ids=asked, **in_forward(opened.model, cache), use_cache=True)
        for layer in cache.layers:
            for part in (layer.keys, layer.values):
                noisy = part[:, :, 2 * BLOCK : 5 * BLOCK]
                bits = torch.randint(-(1 << 15), 1 << 15, noisy.shape)
                noisy.copy_(bits.to(torch.int16).view(BF16))
    opened.save(cache, asked)
    assert opened._saver.drain(30)
    return cache


@needs_library
def test_the_pool_keeps_blocks_as_the_model_has_them(daemon, on_device) -> None:
    _, open_ = on_device
    model = make(BF16)
    with open_(model, daemon, hbm_bytes=8 << 20) as opened:
        asked = ids(TOKENS).to(model.device)
        was = computed(opened, asked)
        assert opened.hbm_blocks == BLOCKS
        daemon.kill()
        now = opened.load(asked)
        assert now.restored_blocks == BLOCKS
        assert errors(was, now) == [0] * BLOCKS


def test_no_more_is_encoded_at_once_than_is_said(daemon, codec_library, monkeypatch) -> None:
    coding = partial(DeviceCoding, opened=on_host(codec_library), device=SharedLateDevice(2))
    monkeypatch.setattr(prefixes, "open_coding", partial(open_coding, opened=coding))
    model, asked = make(BF16), ids(TOKENS)
    for fidelity, times in (("exact", 1.02), ("ep", 1.25)):
        options = {"block_tokens": BLOCK, "record": "l3", "fidelity": fidelity}
        with Prefixes(model, daemon.target, **options) as opened:
            assert opened.wait_ready(30)
            assert opened._saver._piece_nbytes == ENCODED_NBYTES_MAX
            most = 5 * opened._coding.shapes[0].raw_nbytes + 1000
            opened._saver._piece_nbytes = most
            was = computed(opened, asked)
            (memory,) = opened._copier._lanes.out._memory.values()
            assert len(memory.staged) <= times * most
            assert sum(len(each.staged) for each in opened._copier._lanes.back._pieces) <= 48 << 20
            now = opened.load(asked)
            assert now.restored_blocks == BLOCKS
            assert errors(was, now)[0] == 0


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"opened": lambda *_, **__: None}, "do not work on this device: see codec=off above"),
        ({"opened": broken}, "cannot be used: RuntimeError.*no compiler"),
        ({"dtype": torch.float64}, "neither bfloat16, float16 nor float32"),
        ({"tokens": 12}, "a multiple of 8"),
    ],
    ids=["kernels fail", "kernels raise", "float64", "12 tokens"],
)
def test_where_coding_is_impossible_blocks_are_raw(
    change, why, codec_library, caplog, monkeypatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(device_trial, "AUTO_ON_A_GPU", "auto")
    layout = layout_of(change.get("dtype", BF16), device=torch.device("cuda"))
    tokens = change.get("tokens", BLOCK)
    opened = partial(
        DeviceCoding, opened=change.get("opened", on_host(codec_library)), device=LateDevice(0)
    )
    assert open_coding(layout, tokens, "auto", opened=opened) is None
    assert caplog.text.count("record=raw") == 1
    with pytest.raises(ConfigError, match=f"record='l3' is not possible here: .*{why}"):
        open_coding(layout, tokens, "l3", opened=opened)
    with pytest.raises(ConfigError, match=f"fidelity='ep' is not possible here: .*{why}"):
        open_coding(layout, tokens, "auto", "ep", opened=opened)


def test_float16_on_a_gpu_is_coded_only_if_it_may_be_lossy(codec_library) -> None:
    layout = layout_of(FP16, device=torch.device("cuda"))
    opened = partial(DeviceCoding, opened=on_host(codec_library), device=LateDevice(0))
    with pytest.raises(ConfigError, match="float16 is not coded exactly"):
        open_coding(layout, BLOCK, "l3", opened=opened)
    coding = open_coding(layout, BLOCK, "auto", "ep", opened=opened)
    assert coding is not None
    assert coding.form.startswith("ep/1 ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_cannot_be_used_is_told_by_name() -> None:
    on_gpu = replace(find_layout(make(BF16)), device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"record='l3'.*kernels cannot be used.*use 'auto'"):
        open_coding(on_gpu, BLOCK, "l3")
    with pytest.raises(ConfigError, match=r"kernels cannot be used.*use fidelity='exact'"):
        open_coding(on_gpu, BLOCK, "auto", "ep")


def test_on_a_gpu_blocks_are_coded_for_who_asks(codec_library, caplog) -> None:
    caplog.set_level("INFO")
    layout = layout_of(BF16, device=torch.device("cuda"))
    opened = partial(DeviceCoding, opened=on_host(codec_library), device=LateDevice(0))
    assert open_coding(layout, BLOCK, "raw", opened=broken) is None
    assert not caplog.text
    assert open_coding(layout, BLOCK, "auto", opened=broken) is None
    assert caplog.text.count("record=raw") == 1
    coding = open_coding(layout, BLOCK, "l3", opened=opened)
    assert isinstance(coding, DeviceCoding)
    assert not coding.lossy


def test_with_direct_storage_always_records_stay_raw(daemon, monkeypatch) -> None:
    monkeypatch.setattr(prefixes, "open_coding", partial(open_coding, opened=broken))
    with Prefixes(make(BF16), daemon.target, direct_storage="always") as opened:
        assert opened._coding is None
        assert opened.direct_storage == "host"
        assert type(opened._copier) is HostCopier
    with pytest.raises(ConfigError, match="record='l3' is not read straight from files"):
        Prefixes(make(BF16), daemon.target, direct_storage="always", record="l3")
