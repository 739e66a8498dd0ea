"""Coded records of pages on a GPU: the bytes of a processor, however late the device is.

vLLM is not needed. The kernels for the device run on the processor here; "cuda" takes a GPU.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvstore import Client, ConfigError, Group, KeyChain, Namespace, checksum, root_key  # noqa: E402
from kvstore.testing.daemon import Daemon  # noqa: E402
from kvstore.testing.wait import until  # noqa: E402
from kvstore_kernels import native  # noqa: E402
from kvstore_kernels.codec.coder import Coder, Memory  # noqa: E402
from kvstore_kernels.codec.copies import CodedCopies, Fine, Scratch  # noqa: E402
from kvstore_kernels.codec.record import Form, Header  # noqa: E402
from kvstore_kernels.host import HostPages  # noqa: E402
from kvstore_vllm.coded_device import CodedDeviceMemory, open_device_memory  # noqa: E402
from kvstore_vllm.metadata import SaveOrder, SaveSpan, StepMetadata  # noqa: E402
from kvstore_vllm.opening import open_pages  # noqa: E402
from kvstore_vllm.packings import Latent, Packing  # noqa: E402
from kvstore_vllm.pages import DeviceMemory  # noqa: E402
from kvstore_vllm.settings import Settings  # noqa: E402
from kvstore_vllm.shards import Shards  # noqa: E402
from kvstore_vllm.side_by_side import places_side_by_side, shape_side_by_side  # noqa: E402
from kvstore_vllm.worker import WorkerSide  # noqa: E402
from tests.connectors.vllm.device_layers import (  # noqa: E402
    BLOCKS,
    CHANNELS,
    LAYOUTS,
    TOKENS,
    SharedLateDevice,
    blocks_of,
    device_layers,
    late_pages,
    on_host,
)
from tests.connectors.vllm.latent_layers import RANK, ROTARY, ROW, in_layout  # noqa: E402
from tests.connectors.vllm.test_worker_on_device import SAVED, TARGETS, order_for  # noqa: E402
from tests.kernels.late_device import LateDevice  # noqa: E402

needs_library = pytest.mark.skipif(bool(native.reason()), reason=native.reason())


def unused(*_: object) -> None:
    raise AssertionError("a GPU's back end is not asked")


LATENT = Packing("FLASHMLA", latent=Latent(RANK, ROTARY, unused))


def device_latents(layout: str, layers: int, device: str) -> list[torch.Tensor]:
    """Return layers of latent attention, as `device_layers` does."""
    generator = torch.Generator().manual_seed(layers)
    shape = (BLOCKS, 1, TOKENS, ROW)
    made = [torch.randn(shape, generator=generator).bfloat16() for _ in range(layers)]
    return in_layout(layout, [layer.to(device) for layer in made])


def on_a_processor(pages: CodedDeviceMemory, layers, blocks, exact) -> list[tuple[bytes, bytes]]:
    """Return the records of blocks as an engine on a processor makes them."""
    (shape,) = pages._shapes
    plain = [layer.contiguous().view(BLOCKS, layer.shape[1], -1, 2 * CHANNELS) for layer in layers]
    coder = Coder(shape, Memory.of(plain), HostPages(plain), checksum)
    copies = CodedCopies(coder, checksum, Scratch(), lossy=bool(pages.lossy))
    return [(bytes(each.base), bytes(each.fine or b"")) for each in copies.encode(blocks, exact)]


def late(device: LateDevice, work) -> None:
    """Have the engine do some work, but much before it."""
    for _ in range(20):
        device.engine.run(lambda: None)
    device.engine.run(work)


@needs_library
@pytest.mark.parametrize("fidelity", ["exact", "ep"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_are_those_of_a_processor_and_come_back(layout, fidelity, codec_library) -> None:
    layers = blocks_of(device_layers(layout, 3))
    before = [layer.clone() for layer in layers]
    for layer in layers:
        layer.zero_()
    device = LateDevice(sum(map(ord, layout + fidelity)))
    pages = late_pages([layers], codec_library, device, fidelity=fidelity)
    blocks, targets = [4, 0, 3], [1, 11, 8]
    exact = [False, True, False] if pages.lossy else ()
    right = on_a_processor(pages, before, blocks, exact)

    # The engine computes the blocks late, and has them back when they are encoded.
    pages.encode(0, blocks, pages.mark())  # what is made once waits for the engine, too
    late(device, lambda: [a.copy_(b) for a, b in zip(layers, before, strict=True)])
    made = pages.encode(0, blocks, pages.mark(), exact)
    for layer in layers:
        layer[blocks] = 7
    parts = [(each.base, memoryview(bytearray(each.base.nbytes))) for each in made]
    more = [each.fine and (each.fine, memoryview(bytearray(each.fine.nbytes))) for each in made]
    sums = pages.store(0, [*parts, *filter(None, more)])
    stored = [view for _, view in parts], [part[1] if part else b"" for part in more]
    assert [(bytes(base), bytes(fine)) for base, fine in zip(*stored, strict=True)] == right
    assert sums == [checksum(view) for view in (*stored[0], *filter(None, stored[1]))]

    at = torch.tensor(targets)
    late(device, lambda: [layer.index_fill_(0, at, 9) for layer in layers])
    fines = [Fine(view, checksum(view)) if view else None for view in stored[1]]
    if pages.lossy:
        found = pages.refine(0, targets, stored[0], fines, pages.mark())
        assert [each.refined for each in found] == [True, None, True]
        assert [each.base for each in found] == sums[:3]
    else:
        assert {Header.parse(base).form for base in stored[0]} == {Form.L3}
        assert list(pages.write(0, targets, stored[0], pages.mark())) == sums
    pages.close()
    assert device.idle
    for layer, was in zip(layers, before, strict=True):
        error = (layer[targets].float() - was[blocks].float()).abs().flatten(1).amax(1)
        assert error[1] == 0
        assert (error < 0.1).all() if pages.lossy else (error == 0).all()
        others = [b for b in range(BLOCKS) if b not in blocks + targets]
        assert torch.equal(layer[others], was[others])


def test_a_record_does_not_depend_on_where_an_engine_has_its_blocks() -> None:
    packings = [Packing("FLASHINFER")] * 2
    shapes = {
        layout: shape_side_by_side(blocks_of(device_layers(layout, 2)), packings)
        for layout in LAYOUTS
    }
    assert len({shape.digest for shape in shapes.values()}) == 1
    for layout in LAYOUTS:
        layers = blocks_of(device_layers(layout, 2))
        for layer, (keys, values) in zip(
            layers, places_side_by_side(layers, packings), strict=True
        ):
            # As FLASH_ATTN finds them: (B, N, H, D) each.
            block = layer[0].reshape(layer.shape[1], -1, 2 * CHANNELS).transpose(0, 1)
            memory = layer.as_strided((layer.untyped_storage().nbytes() // 2,), (1,), 0)
            for place, view in zip((keys, values), block.split(CHANNELS, dim=-1), strict=True):
                axes = (place.tokens, place.heads, place.channels)
                at = [torch.tensor([axis.at(i) for i in range(axis.count)]) for axis in axes]
                where = at[0][:, None, None] + at[1][None, :, None] + at[2]
                assert torch.equal(memory[layer.storage_offset() + place.first + where], view)


@pytest.fixture(params=["late", "unregistered", pytest.param("cuda", marks=pytest.mark.gpu)])
def opened(request):
    """Return what opens the pages of a layout for a client, and whether it reaches the arena."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        pytest.importorskip("cupy")
    else:
        library = request.getfixturevalue("codec_library")

    def open_(layout: str, client: Client):
        kind = "cuda" if request.param == "cuda" else "cpu"
        groups = [device_layers(layout, count, device=kind) for count in (3, 2)]
        groups.append(device_latents(layout, 2, device=kind))
        packings = [[Packing("FLASH_ATTN")] * 3, [Packing("FLASH_ATTN")] * 2, [LATENT] * 2]
        if kind == "cuda":
            pages = open_pages(groups, BLOCKS, client.extents, record="l3", packings=packings)
            return groups, pages
        device = SharedLateDevice(len(layout), registers=request.param == "late")
        groups_by_block = [blocks_of(layers) for layers in groups]
        how = {"packings": packings}
        return groups, late_pages(groups_by_block, library, device, client.extents, **how)

    return request.param, open_


def compute(pages: CodedDeviceMemory, work) -> None:
    """Have the engine do some work: late, or in its stream."""
    device = pages._device
    if isinstance(device, LateDevice):
        late(device, work)
    else:
        work()


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC", LAYOUTS[-1]])
def test_blocks_come_back_through_a_daemon_into_other_blocks(layout, opened) -> None:
    kind, open_ = opened
    with Daemon(file=False) as daemon, Client(daemon.start().target) as client:
        client.connect()
        groups, pages = open_(layout, client)
        assert isinstance(pages, CodedDeviceMemory)
        registration = pages.registration
        until(lambda: registration.registered_nbytes or registration.failure, 20)
        before = [[layer.clone() for layer in blocks_of(group)] for group in groups]
        namespace = Namespace(
            block_tokens=16,
            groups=tuple(
                Group(str(i), nbytes, varies=True) for i, nbytes in enumerate(pages.record_nbytes)
            ),
            identity=(("record", pages.form), ("test", layout)),
        )
        pages.encoded_nbytes_max = 3 * sum(pages.raw_nbytes)  # an order is two
        keys = tuple(KeyChain(root_key(namespace.id), 16).update(range(16 * len(SAVED))))
        settings = Settings(daemon.target)
        side = WorkerSide(settings, client, pages, namespace, shards=Shards(0), writes=True)
        spans = tuple(SaveSpan(group, 0, SAVED) for group in range(len(groups)))
        layers = [layer for group in groups for layer in blocks_of(group)]
        values = [layer.clone() for layer in layers]
        for layer in layers:
            layer.zero_()
        for group in range(len(groups)):
            pages.encode(group, SAVED, pages.mark())  # what is made once waits for the engine, too
        compute(pages, lambda: [a.copy_(b) for a, b in zip(layers, values, strict=True)])
        side.begin_step(StepMetadata(saves=[SaveOrder(keys, 0, None, spans)]))
        assert side.saver.drain(20)
        at = torch.tensor(TARGETS, device=layers[0].device)
        compute(pages, lambda: [layer.index_fill_(0, at, 9) for layer in layers])
        side.begin_step(StepMetadata(handed_out=list(TARGETS)))
        side.start_loads(StepMetadata(loads=[order_for(client, namespace, keys)]))
        until(lambda: side.results(computed=False)[0] == {"request"}, 20)
        side.results(computed=False)  # counts what was copied since the last look
        side.close()
    counts = side.counters.totals
    assert counts["saved_blocks"] == counts["loaded_blocks"] == len(SAVED) * len(groups)
    assert counts["saved_raw_bytes"] == len(SAVED) * sum(pages.raw_nbytes)
    assert counts["loaded_bytes"] == counts["saved_bytes"] < 0.8 * counts["saved_raw_bytes"]
    if kind != "cuda":
        bounced = counts["saved_bytes"] + counts["loaded_bytes"] if kind == "unregistered" else 0
        assert counts["bounced_bytes"] == bounced
    for group, saved in zip(groups, before, strict=True):
        for layer, expected in zip(blocks_of(group), saved, strict=True):
            expected[list(TARGETS)] = expected[list(SAVED)]
            assert torch.equal(layer, expected)


def test_memory_for_records_is_no_more_than_is_said(codec_library) -> None:
    layers = blocks_of(device_layers("LBHNC", 2))
    for fidelity, times in (("exact", 1.02), ("ep", 1.25)):
        pages = late_pages([layers], codec_library, LateDevice(0), fidelity=fidelity)
        pages.encode(0, range(BLOCKS), pages.mark())
        (memory,) = pages._out._memory.values()
        assert len(memory.staged) <= times * BLOCKS * pages.raw_nbytes[0]
        assert sum(len(piece.staged) for piece in pages._back._pieces) <= 48 << 20
        pages.close()


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"opened": lambda *_, **__: None}, "do not work on this device"),
        ({"opened": broken}, "RuntimeError.*no compiler"),
        ({"backends": ["FLASHMLA", "FLASH_ATTN"]}, "back ends .'FLASHMLA'. put"),
        ({"backends": ["", ""]}, "back ends"),
        ({"dtype": torch.float8_e4m3fn}, "not bfloat16"),
        ({"tokens": 12}, "a multiple of 8"),
    ],
    ids=["kernels fail", "kernels raise", "no latents", "unknown back end", "float8", "12 tokens"],
)
def test_where_coding_is_impossible_records_are_raw(change, why, codec_library, caplog) -> None:
    form = {key: change[key] for key in ("dtype", "tokens") if key in change}
    layers = blocks_of(device_layers("LBHNC", 2, **form))
    packings = [[Packing(name) for name in change.get("backends", ["FLASH_ATTN"] * 2)]]
    how = {"opened": change.get("opened", on_host(codec_library)), "device": LateDevice(0)}
    pages = open_device_memory([layers], packings, dict, "auto", **how)
    assert type(pages) is DeviceMemory
    assert "record=raw" in caplog.text
    pages.close()
    with pytest.raises(ConfigError, match=f'"record": "l3" is not possible here: .*{why}'):
        open_device_memory([layers], packings, dict, "l3", **how)
    with pytest.raises(ConfigError, match=f'"fidelity": "ep" is not possible here: .*{why}'):
        open_device_memory([layers], packings, dict, "auto", "ep", **how)


def test_float16_is_coded_only_if_it_may_be_lossy(codec_library, caplog) -> None:
    layers = blocks_of(device_layers("LBHNC", 1, dtype=torch.float16))
    how = {"opened": on_host(codec_library), "device": LateDevice(0)}
    pages = open_device_memory([layers], [[Packing("TRITON_ATTN")]], dict, "auto", **how)
    assert type(pages) is DeviceMemory
    assert "float16" in caplog.text
    pages.close()
    pages = late_pages([layers], codec_library, LateDevice(0), fidelity="ep")
    assert pages.form.startswith("ep/1 ")
    pages.close()


def test_raw_is_raw(codec_library, caplog) -> None:
    layers = blocks_of(device_layers("LBHNC", 1))
    pages = open_device_memory([layers], [[Packing("FLASH_ATTN")]], dict, "raw", opened=broken)
    assert type(pages) is DeviceMemory
    assert not caplog.text
    pages.close()
    with pytest.raises(ConfigError, match='"record" is "raw"'):
        open_device_memory([layers], [[Packing("FLASH_ATTN")]], dict, "raw", "ep")


@pytest.mark.parametrize(
    ("record", "fidelity", "opened_as"),
    [("auto", "exact", "raw"), ("l3", "exact", "l3"), ("auto", "ep", "auto")],
)
def test_on_a_gpu_blocks_are_coded_for_who_asks(record, fidelity, opened_as, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        "kvstore_vllm.opening.open_device_memory", lambda *given, **_: asked.append(given[3:])
    )
    layer = torch.empty((BLOCKS, 2, 16, 2 * CHANNELS), device="meta")
    open_pages([[layer]], BLOCKS, record=record, fidelity=fidelity)
    assert asked == [(opened_as, fidelity)]
