"""The way between HBM and the memory of the daemon."""

GPU_STAGES = ("kernels", "coding", "copies", "prefix", "files", "resumed", "records")
"""What `kvstore bench gpu` measures, in this order."""
