"""`kvstore bench codec` on made-up KV: its figures follow from what it codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvstore.model.errors import InvalidRequest
from kvstore_bench.codec.codec import CodecPlan, run
from kvstore_bench.codec.kv import Kv, computed, dump, open_kv, read_dump
from kvstore_bench.codec.peers import peers
from kvstore_bench.codec.texts import TEXTS
from kvstore_kernels.codec.coder import Coder
from kvstore_kernels.codec.record import DType
from kvstore_kernels.codec.reference import of_float
from tests.cli.run import kvstore

PLAN = CodecPlan(tokens=64, rounds=1, peers_rounds=1)


def made_up(tokens: int = 70, layers: int = 2) -> dict[str, Kv]:
    rng = np.random.default_rng(4)
    parts = []
    for _ in range(2 * layers):
        scale = np.exp2(rng.normal(0, 1.5, 64))
        x = rng.normal(0, 1, (2, tokens, 64)) * scale
        parts.append(of_float(x.astype(np.float32), DType.BF16).astype(np.uint16))
    return {"one": Kv(parts), "two": Kv(parts)}


def test_the_figures_of_a_run() -> None:
    found = run(made_up(), PLAN, lambda _: None)
    assert found["blocks"] == 2 * 70 // 16
    assert 1.2 < found["l3"]["ratio"] < 1.5
    assert found["l3"]["stored_raw"] == 0
    assert found["ep88"]["ratio"] == pytest.approx(1.73, abs=0.05)
    assert found["ep54"]["ratio"] == pytest.approx(2.91, abs=0.05)
    assert 1 <= found["record_size_spread"] < 1.1
    for each in (found["l3"], found["ep"], *found["native"].values(), *found["peers"].values()):
        assert each["encode_gb_s" if "encode_gb_s" in each else "l3_encode_gb_s"] > 0
    assert found["reference"]["l3_encode_gb_s"] < found["l3"]["encode_gb_s"]


def test_every_round_encodes_what_was_given_and_not_what_a_lossy_decode_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: dict[tuple[Coder, str], set[bytes]] = {}

    def watched(name, encode):
        def wrapper(coder, *given):
            made = encode(coder, *given)
            encoded.setdefault((coder, name), set()).add(b"".join(each.base for each in made))
            return made

        return wrapper

    for name in ("encode_exact", "encode_lossy"):
        monkeypatch.setattr(Coder, name, watched(name, getattr(Coder, name)))
    run(made_up(), PLAN, lambda _: None)
    assert {len(each) for each in encoded.values()} == {1}


def test_every_peer_returns_what_it_was_given() -> None:
    records = [bytes(np.arange(i, i + 8192, dtype=np.uint16)) for i in range(40)]
    for peer in peers(records).values():
        assert bytes(peer.decode(bytes(peer.encode(records[3])))) == records[3]
    assert {"lz4", "zstd", "zstd_dictionary", "zstd_split"} <= peers(records).keys()


def test_a_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    kv = made_up()
    dump(kv, tmp_path / "kv.npz")
    again = read_dump(tmp_path / "kv.npz")
    assert list(again) == list(kv)
    for was, now in zip(kv["one"].parts, again["one"].parts, strict=True):
        assert np.array_equal(was, now)


@pytest.mark.parametrize("content", [b"", b"PK\3\4 no archive", None])
def test_what_is_no_dump_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "kv.npz"
    if content is None:
        np.savez(file, **{"one/000": np.zeros((2, 3), np.float32)})
    else:
        file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"kv\.npz"):
        read_dump(file)


def test_without_kv_it_says_what_to_give() -> None:
    with pytest.raises(InvalidRequest, match="--model PATH computes it"):
        open_kv(None, None, 64, lambda _: None)


def test_texts_are_long_enough_for_any_prompt() -> None:
    assert all(len(text()) > 100_000 for text in TEXTS.values())


def test_a_model_computes_all_of_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.connectors.vllm.tiny_models import make_tokenizer

    shape = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 1000}
    config = transformers.Gemma3TextConfig(
        **shape, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    found = computed(tmp_path, 96, lambda _: None)
    assert list(found) == list(TEXTS)
    assert [part.shape for part in found["code"].parts] == [(1, 96, 64)] * 4


def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    dump(made_up(), tmp_path / "kv.npz")
    arguments = ("--dump", tmp_path / "kv.npz", "--rounds", "2", "--plot", tmp_path / "codec.png")
    done = kvstore("bench", "codec", *map(str, arguments), "--json")
    assert json.loads(done.stdout)["l3"]["ratio"] > 1.2
    assert (tmp_path / "codec.png").stat().st_size > 10_000
    assert "times smaller" in kvstore("bench", "codec", *map(str, arguments)).stdout
