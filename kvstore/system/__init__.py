"""The machine: memory, threads, descriptors, NUMA nodes, logs. It knows nothing of blocks."""
