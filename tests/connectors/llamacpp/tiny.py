"""Tiny GGUF models of seeded weights: full attention, a sliding window, a recurrent one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

WORDS = 96
WIDTH = 64
HEADS, KV_HEADS, HEAD = 4, 2, 32
FEED_FORWARD = 128
LAYERS = 6
WINDOW = 64
SPECIAL, BYTES = 3, 256
VOCABULARY = SPECIAL + BYTES + WORDS


def make_model(path: Path, kind: str, *, seed: int = 7) -> Path:
    """Write a model of `kind`: llama, gemma3 (a window of 64 tokens in 5 of 6 layers), mamba."""
    import gguf

    writer = gguf.GGUFWriter(path, kind)
    writer.add_name(f"tiny {kind}")
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD if kind != "mamba" else 0)
    writer.add_head_count(HEADS if kind != "mamba" else 0)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_vocabulary(writer, gguf)
    weights = _Weights(writer, np.random.default_rng(seed))
    weights("token_embd.weight", VOCABULARY, WIDTH)
    weights("output.weight", VOCABULARY, WIDTH)
    weights.ones("output_norm.weight", WIDTH)
    if kind == "mamba":
        _add_mamba(writer, weights)
    else:
        _add_attention(writer, weights, gemma=kind == "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Weights:
    """Adds tensors: seeded, or ones."""

    def __init__(self, writer: Any, random: np.random.Generator) -> None:
        self._writer = writer
        self._random = random

    def __call__(self, name: str, *shape: int, scale: float = 0.2) -> None:
        self.add(name, scale * self._random.standard_normal(shape))

    def ones(self, name: str, *shape: int) -> None:
        self.add(name, np.ones(shape))

    def add(self, name: str, values: np.ndarray) -> None:
        self._writer.add_tensor(name, values.astype(np.float32))


def _add_vocabulary(writer: Any, gguf: Any) -> None:
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    tokens = [b"<unk>", b"<s>", b"</s>"]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    tokens += [b"<0x%02X>" % byte for byte in range(BYTES)]
    types += [kinds.BYTE] * BYTES
    tokens += [b"\xe2\x96\x81w%d" % number for number in range(WORDS)]
    types += [kinds.NORMAL] * WORDS
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_attention(writer: Any, weights: _Weights, *, gemma: bool) -> None:
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    if gemma:
        writer.add_sliding_window(WINDOW)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            weights.ones(f"{block}.{norm}.weight", WIDTH)
        if gemma:
            for norm in ("post_attention_norm", "post_ffw_norm"):
                weights.ones(f"{block}.{norm}.weight", WIDTH)
            for norm in ("attn_q_norm", "attn_k_norm"):
                weights.ones(f"{block}.{norm}.weight", HEAD)
        weights(f"{block}.attn_q.weight", HEADS * HEAD, WIDTH)
        weights(f"{block}.attn_k.weight", KV_HEADS * HEAD, WIDTH)
        weights(f"{block}.attn_v.weight", KV_HEADS * HEAD, WIDTH)
        weights(f"{block}.attn_output.weight", WIDTH, HEADS * HEAD)
        weights(f"{block}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        weights(f"{block}.ffn_up.weight", FEED_FORWARD, WIDTH)
        weights(f"{block}.ffn_down.weight", WIDTH, FEED_FORWARD)


def _add_mamba(writer: Any, weights: _Weights) -> None:
    inner, state, rank, kernel = 2 * WIDTH, 16, 4, 4
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        weights.ones(f"{block}.attn_norm.weight", WIDTH)
        weights(f"{block}.ssm_in.weight", 2 * inner, WIDTH)
        weights(f"{block}.ssm_conv1d.weight", inner, kernel)
        weights(f"{block}.ssm_conv1d.bias", inner)
        weights(f"{block}.ssm_x.weight", rank + 2 * state, inner)
        weights(f"{block}.ssm_dt.weight", inner, rank)
        weights(f"{block}.ssm_dt.bias", inner)
        weights.add(f"{block}.ssm_a", -np.tile(np.arange(1.0, state + 1), (inner, 1)))
        weights.ones(f"{block}.ssm_d", inner)
        weights(f"{block}.ssm_out.weight", WIDTH, inner)
