"""The way between HBM and the memory of the daemon."""
