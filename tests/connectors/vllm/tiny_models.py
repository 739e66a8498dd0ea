"""Make seeded random checkpoints that vLLM loads without a network, one per attention structure.

    python tiny_models.py OUT

writes OUT/llama (full attention only), OUT/gemma3 (hybrid: five sliding-window layers for one of
full attention), OUT/granite (hybrid: Mamba2 and full attention), OUT/deepseek (latent attention)
and OUT/drafter (a llama that often, not always, says what the other one does).

The usual initial range (0.02) collapses to one repeated token; 0.15 makes greedy output depend on
the whole prompt, so that a wrong block of KV shows in the text.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB = 1000
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        **SHAPE, num_hidden_layers=4, num_key_value_heads=2, tie_word_embeddings=False
    )
    return LlamaForCausalLM(config)


def make_gemma3() -> Gemma3ForCausalLM:
    layers = 6
    config = Gemma3TextConfig(
        **SHAPE,
        num_hidden_layers=layers,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=128,
        layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"],
    )
    return Gemma3ForCausalLM(config)


def make_granite() -> GraniteMoeHybridForCausalLM:
    """Three Mamba2 layers, and one of full attention between them."""
    config = GraniteMoeHybridConfig(
        **SHAPE,
        num_hidden_layers=4,
        num_key_value_heads=2,
        attention_multiplier=32**-0.5,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
    )
    return GraniteMoeHybridForCausalLM(config)


def make_deepseek() -> DeepseekV2ForCausalLM:
    """Dense layers whose KV has the sizes that vLLM's kernels for latent attention take.

    Each layer listens to one half of its heads, and of its other features, in turns. So a sum over
    two workers is one of theirs and zero: without rounding, whatever the degree.
    """
    layers = 4
    config = DeepseekV2Config(
        **SHAPE,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
    )
    model = DeepseekV2ForCausalLM(config)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.chunk(2, dim=1)[number % 2].zero_()
    return model


def make_drafter() -> LlamaForCausalLM:
    drafter = make_llama()
    with torch.no_grad():
        for weights in drafter.parameters():
            weights.add_(0.05 * weights.std() * torch.randn_like(weights))
    return drafter


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer of the words t4 ... t999."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words |= {f"t{token}": token for token in range(4, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    )


def main() -> None:
    out = Path(sys.argv[1])
    for name, make in {
        "llama": make_llama,
        "gemma3": make_gemma3,
        "granite": make_granite,
        "deepseek": make_deepseek,
        "drafter": make_drafter,
    }.items():
        torch.manual_seed(7)
        make().to(torch.bfloat16).save_pretrained(out / name)
        make_tokenizer().save_pretrained(out / name)


if __name__ == "__main__":
    main()
