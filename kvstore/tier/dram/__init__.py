"""The dram tier: slots in shared memory that clients read and write in place."""

from kvstore.tier.dram.arena import Arena
from kvstore.tier.dram.extent_memory import makes_huge_pages
from kvstore.tier.dram.extents import ExtentHandle

__all__ = ["Arena", "ExtentHandle", "makes_huge_pages"]
