"""One of two tensor-parallel workers, as far as their KV cache is opened.

`one_rank RANK ADDRESS KNOWN` prints what its pages are, and logs to stderr. ADDRESS: where the two
meet, as torch takes it. KNOWN: "known", or "unknown" for a worker that cannot tell where values lie
in its blocks.
"""

from __future__ import annotations

import logging
import os
import sys

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

from kvstore_vllm.agreement import all_workers
from kvstore_vllm.opening import open_pages
from kvstore_vllm.packings import Packing
from tests.connectors.vllm.cpu_layers import BLOCKS, engine_layers, import_vllm


def main(rank: int, address: str, known: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    os.environ["VLLM_DIST_IDENT"] = str(rank)  # one each, so that they share no memory
    import_vllm()
    layers, packings = engine_layers(torch.bfloat16, 16, 64)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, address, rank, backend="gloo")
        initialize_model_parallel(2)
    pages = open_pages(
        [layers],
        BLOCKS,
        record="auto",
        packings=[packings] if known == "known" else [[Packing()] * len(layers)],
        agree=all_workers,
    )
    print(f"pages={type(pages).__name__} form={pages.form!r}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
