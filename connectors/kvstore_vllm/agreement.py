"""What all workers of an engine decide together, because their blocks have to be of one kind."""

from __future__ import annotations

import torch
from vllm.distributed import parallel_state

_GROUPS = ("get_tp_group", "get_pcp_group", "get_pp_group")
"""Each worker is in one group of each kind, and all kinds together lead from one to every other.
Unlike vLLM's world, they leave out other engines of a data-parallel deployment."""


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
