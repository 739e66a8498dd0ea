"""LoRA adapters in real engines: what one of them computed is never another one's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvstore.testing.wait import until

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LAYERS, HIDDEN, RANK = 4, 128, 8
WIDTHS = {"q_proj": 128, "k_proj": 64, "v_proj": 64}  # of the tiny llama
KNOWN_WITHIN_S = 30.0


def write_adapter(folder: Path, seed: int) -> None:
    """Write an adapter that changes keys and values, as PEFT writes it."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, width in WIDTHS.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = 0.3 * torch.randn(RANK, HIDDEN, generator=draw)
            tensors[f"{module}.lora_A.weight"] = down
            tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(width, RANK, generator=draw)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": 16, "target_modules": list(WIDTHS), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def answer_with(engine, turn: list[int], adapter: tuple[str, int, str]) -> list[int]:
    """Answer when the adapter takes part: until its files are hashed, its requests pass by."""
    answers = []

    def took_part() -> bool:
        engine("reset_prefix_cache")
        passed = engine.counter("bypassed_unknown_adapter")
        answers.append(engine.generate(turn, adapter=adapter))
        return engine.counter("bypassed_unknown_adapter") == passed

    until(took_part, KNOWN_WITHIN_S)
    assert all(answer == answers[0] for answer in answers)
    engine("reset_prefix_cache")
    return answers[0]


def test_adapters_under_one_path_share_nothing_and_the_same_one_hits(
    start_engine, daemon, prompt, tmp_path
):
    path, elsewhere = tmp_path / "adapter", tmp_path / "elsewhere"
    write_adapter(path, seed=1)
    write_adapter(elsewhere, seed=2)
    turn = prompt(705)
    options = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    here, there = ("own", 1, str(path)), ("other", 2, str(elsewhere))

    plain = start_engine("llama", None, **options)
    base = plain.generate(turn)
    first, second = (plain.generate(turn, adapter=each) for each in (here, there))
    assert len({tuple(answer) for answer in (base, first, second)}) == 3
    plain.close()

    options["environment"] = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache/vllm")),
    }
    engine = start_engine("llama", daemon, **options)
    assert answer_with(engine, turn, here) == first
    assert engine.counter("loads") == 0
    assert engine.generate(turn) == base, "a request without an adapter"
    assert engine.counter("loads") == 0
    engine("reset_prefix_cache")
    assert engine.generate(turn, adapter=here) == first
    assert engine.counter("loads") == 1
    engine.close()

    # The second adapter takes the path, name and number of the first one, which moves away.
    aside = path.rename(tmp_path / "aside")
    elsewhere.rename(path)
    aside.rename(elsewhere)
    engine = start_engine("llama", daemon, **options)
    assert answer_with(engine, turn, here) == second
    assert engine.counter("loads") == 0, "the blocks of the first adapter are not its own"
    assert answer_with(engine, turn, there) == first
    assert engine.counter("loads") == 1, "the same bytes are the same adapter"
    assert engine.generate(turn, adapter=here) == second
    assert engine.generate(turn) == base
    assert engine.counter("loads") == 3
    assert engine.counter("loads_failed") == 0
