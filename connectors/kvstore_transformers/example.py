"""Ask a model twice; the second answer starts from stored KV, after a restart of everything too.

    kvstore serve --set dram.capacity=4GiB --set file.path=/nvme/kvstore --set file.capacity=50GiB
    python -m kvstore_transformers.example MODEL --prompt README.md

MODEL is a path or a name that transformers loads.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.client.target import default_target
from kvstore_transformers import Prefixes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", type=Path, required=True, help="a text file")
    parser.add_argument("--target", default=default_target())
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model).to(arguments.device).eval()
    ids = tokenizer(arguments.prompt.read_text(), return_tensors="pt").input_ids.to(model.device)

    with Prefixes(model, arguments.target) as prefixes:
        prefixes.wait_ready(600)  # the weights are being hashed
        for _ in range(2):
            stored = prefixes.load(ids).restored_tokens
            started = time.perf_counter()
            output = prefixes.generate(ids, max_new_tokens=20, do_sample=False)
            seconds = time.perf_counter() - started
            print(f"{stored} of {ids.shape[1]} tokens from kvstore, {seconds:.2f} s:")
            print(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
            prefixes.flush()


if __name__ == "__main__":
    main()
