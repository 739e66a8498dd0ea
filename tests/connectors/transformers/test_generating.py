"""Which calls of `generate` may begin on top of a stored prefix."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import GenerationConfig  # noqa: E402

from kvstore_transformers.generating import follows_from_tokens  # noqa: E402

IDS = torch.tensor([[5, 6, 2, 7]])


def follows(options: dict[str, Any], **of_model: Any) -> bool:
    return follows_from_tokens(GenerationConfig(**of_model), IDS, options)


@pytest.mark.parametrize(
    "options",
    [
        {"dola_layers": [2, 4]},
        {"dola_layers": "high"},
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"prefill_chunk_size": 32},
        {"use_cache": False},
        {"position_ids": IDS},
    ],
)
def test_what_does_not_follow_from_tokens_is_computed_alone(options: dict[str, Any]) -> None:
    assert not follows(options)
    if "position_ids" not in options:
        assert not follows({"generation_config": GenerationConfig(**options)})
        assert not follows({}, **options)


@pytest.mark.parametrize("options", [{}, {"output_logits": True}, {"output_scores": True}])
def test_what_says_something_of_new_tokens_alone_changes_nothing(options: dict[str, Any]) -> None:
    assert follows({"return_dict_in_generate": True, **options})


def test_a_token_that_ends_answers_is_no_padding() -> None:
    """As for transformers, which masks nothing then."""
    both = {"pad_token_id": 2, "eos_token_id": [1, 2]}
    assert follows({}, **both)
    assert follows(both)
    assert follows({"generation_config": GenerationConfig(**both)})
    assert follows({"pad_token_id": 2}, eos_token_id=2)
    assert follows({"generation_config": GenerationConfig(pad_token_id=2)}, eos_token_id=2)
    assert follows({"eos_token_id": torch.tensor([2])}, pad_token_id=2)


def test_another_token_is_padding_whoever_names_it() -> None:
    assert not follows({}, pad_token_id=2, eos_token_id=1)
    assert not follows({"pad_token_id": 2}, pad_token_id=9, eos_token_id=9)
    assert not follows({"generation_config": GenerationConfig(eos_token_id=1)}, pad_token_id=2)
    # What ends answers is what the nearest source says.
    assert not follows({"eos_token_id": 1}, pad_token_id=2, eos_token_id=2)
    assert not follows({"eos_token_id": None}, pad_token_id=2, eos_token_id=2)
    assert follows({"attention_mask": torch.ones_like(IDS)}, pad_token_id=2)
