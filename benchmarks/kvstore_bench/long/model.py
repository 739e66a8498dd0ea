"""A tiny random model with a long context: what it computes is attention, and little else.

Two layers with one head of keys make 512 bytes of KV a token, so 131,072 tokens are 64 MiB, and
time and memory of a prompt that long fit a machine with two cores.
"""

from __future__ import annotations

from pathlib import Path

TOKENS_MAX = 131_072
KV_NBYTES_A_TOKEN = 512  # in bfloat16
VOCAB = 1000
FIRST_TOKEN = 4  # the ones before it mean something to engines
SEED = 7


def make_model(folder: Path) -> None:
    """Write a checkpoint that vLLM loads without a network, the same one each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        num_hidden_layers=2,
        max_position_embeddings=TOKENS_MAX,
        rope_theta=500_000.0,
        # At the usual 0.02 every answer is one token repeated. At this one, answers depend on the
        # whole prompt, so a wrong block of KV shows.
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
