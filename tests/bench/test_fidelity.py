"""`kvstore bench fidelity`: what its rungs and rivals lose, and what a real model says of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvstore_bench.fidelity.rivals import FP4, RIVALS, fp8, gaussian_levels, int8, nvfp4
from kvstore_bench.fidelity.rungs import rungs
from kvstore_kernels.codec.record import DType
from kvstore_kernels.codec.reference import of_float, to_float
from tests.cli.run import kvstore

GEMMA = Path(__file__).parents[2] / "build/models/gemma-3-270m"


def made_up(seed: int = 5, heads: int = 2, tokens: int = 70, channels: int = 64):
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (heads, tokens, channels)) * np.exp2(rng.normal(0, 1, channels))
    return x.astype(np.float32)


# ---- rivals --------------------------------------------------------------------------------------


def test_fp8_has_three_bits_of_mantissa_and_is_what_torch_makes_of_it():
    torch = pytest.importorskip("torch")
    x = made_up()
    scale = np.float32(np.abs(x).max() / 448)
    expected = torch.from_numpy(x / scale).to(torch.float8_e4m3fn).float().numpy() * scale
    assert np.array_equal(fp8(x), expected)


def test_int8_is_off_by_half_a_step_at_most():
    x = made_up()
    step = np.abs(x).max(-1, keepdims=True) / 127
    assert (np.abs(int8(x) - x) <= step * 0.51 + 1e-3 * np.abs(x)).all()


def test_nvfp4_returns_its_own_values_and_no_others():
    x = made_up()
    again = nvfp4(x)
    assert np.allclose(nvfp4(again), again, rtol=1e-5)
    groups = again.reshape(-1, 16)
    for group in groups[:50]:
        assert len(np.unique(np.abs(group))) <= len(FP4)


def test_the_levels_for_a_normal_value_are_those_of_max():
    levels = gaussian_levels()  # Max, 1960: the table for N = 16
    assert levels[8:] == pytest.approx(
        [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], abs=4e-3
    )
    assert levels == pytest.approx(-levels[::-1], abs=1e-3)


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_loses_something_and_keeps_the_shape(name):
    x = made_up()
    found = RIVALS[name].lose(x)
    assert found.shape == x.shape
    assert found.dtype == np.float32
    error = np.linalg.norm(found - x) / np.linalg.norm(x)
    assert 0 < error < 0.2


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_takes_zeros(name):
    x = np.zeros((1, 16, 64), np.float32)
    assert np.abs(RIVALS[name].lose(x)).max() < 1e-6


# ---- rungs ---------------------------------------------------------------------------------------


def test_every_rung_keeps_the_first_block_and_what_it_was_given():
    parts = [of_float(made_up(seed), DType.BF16).astype(np.uint16) for seed in range(4)]
    before = [part.copy() for part in parts]
    errors = {}
    for name, store in rungs():
        stored = store(parts, 16)
        assert all(np.array_equal(a, b) for a, b in zip(parts, before, strict=True)), name
        assert [each.shape for each in stored.parts] == [each.shape for each in parts]
        errors[name] = 0.0
        for was, now in zip(parts, stored.parts, strict=True):
            assert np.array_equal(was[:, :16], now[:, :16]) or name in RIVALS, name
            lost = to_float(now, DType.BF16) - to_float(was, DType.BF16)
            errors[name] += float(np.square(lost).sum())
    assert errors["l3"] == 0
    assert 0 < errors["ep88"] < errors["ep65"] < errors["ep54"] < errors["ep43"]
    assert list(errors) == ["l3", "ep88", "ep65", "ep54", "ep43", *RIVALS, "fp8_first_exact"]
    assert 0 < errors["fp8_first_exact"] < errors["fp8"]


def test_one_head_is_not_written_into():
    """KV of one head lies as its blocks do: a rung must not work in the caller's memory."""
    parts = [of_float(made_up(seed, heads=1), DType.BF16).astype(np.uint16) for seed in range(2)]
    before = [part.copy() for part in parts]
    for _, store in rungs():
        store(parts, 16)
        assert all(np.array_equal(a, b) for a, b in zip(parts, before, strict=True))


def test_a_large_channel_of_keys_costs_the_others_nothing_in_ep():
    """As in models whose keys have biases. What scales a whole token loses the other channels."""
    values = made_up(1)
    large = made_up()
    large[..., 3] += 200
    errors = {}
    for keys in (made_up(), large):
        parts = [of_float(part, DType.BF16).astype(np.uint16) for part in (keys, values)]
        others = np.arange(keys.shape[-1]) != 3
        for name, store in rungs():
            was, now = (to_float(each[0], DType.BF16) for each in (parts, store(parts, 16).parts))
            lost = np.square(now - was)[..., others].mean()
            errors.setdefault(name, []).append(float(lost))
    for name in ("l3", "ep88", "ep65", "ep54", "ep43"):
        assert errors[name][0] == errors[name][1], name
    for name in ("int8_token", "nvfp4", "turboquant4"):
        assert errors[name][1] > 4 * errors[name][0], (name, errors[name])


# ---- a real model --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(not GEMMA.exists(), reason="make setup-demo unpacks Gemma 3 270M")
def test_a_real_model_hardly_notices(tmp_path):
    picture = tmp_path / "fidelity.png"
    sizes = ("--tokens", "384", "--follow", "48")
    options = ("--model", str(GEMMA), *sizes, "--json", "--plot", str(picture))
    found = json.loads(kvstore("bench", "fidelity", *options).stdout)
    assert found["l3"]["kl"] == 0
    assert found["l3"]["bytes_equal"]
    assert found["ep88"]["kl"] <= 1e-4
    assert found["ep65"]["kl"] <= 1.5e-3
    assert found["ep54"]["kl"] <= 4e-3
    assert found["ep54"]["kl"] < found["nvfp4"]["kl"]
    assert found["ep54"]["ratio"] > 2.95
    assert found["exact"]["top1"] == 1
    assert picture.stat().st_size > 10_000


def test_it_says_which_model_it_wants():
    refused = kvstore("bench", "fidelity", "--json")
    assert refused.exit_code == 2
    assert "--model" in refused.output
