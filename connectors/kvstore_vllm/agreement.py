"""What all workers of an engine decide together, because their blocks have to be of one kind."""

from __future__ import annotations

import torch
from vllm.distributed import parallel_state

_GROUPS = ("get_tp_group", "get_pcp_group", "get_pp_group")
"""Each worker is in one group of each kind, and all kinds together lead from one to every other.
Unlike vLLM's world, they leave out other engines of a data-parallel deployment."""


def told_by_stages(told: bytes) -> list[bytes]:
    """Return what the workers of each pipeline stage tell, in their order: one of each stage.

    Every one has to tell something, and waits for the others.
    """
    group = parallel_state.get_pp_group()
    if group.world_size == 1:
        return [told]
    mine = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.world_size)]
    torch.distributed.all_gather(sizes, torch.tensor([len(told)]), group=group.cpu_group)
    most = max(int(size.item()) for size in sizes)
    found = [torch.zeros(most, dtype=torch.uint8) for _ in sizes]
    padded = torch.nn.functional.pad(mine, (0, most - len(mine)))
    torch.distributed.all_gather(found, padded, group=group.cpu_group)
    return [
        each[: int(size.item())].numpy().tobytes() for each, size in zip(found, sizes, strict=True)
    ]


def all_workers(told: bool) -> bool:
    """Say whether every worker of this engine has told True.

    Every one has to ask, and waits for the others.
    """
    for name in _GROUPS:
        get_group = getattr(parallel_state, name, None)  # not every version knows all kinds
        group = get_group() if get_group is not None else None
        if group is None or group.world_size == 1:
            continue
        least = torch.tensor([int(told)])
        torch.distributed.all_reduce(
            least, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group
        )
        told = bool(least.item())
    return told
