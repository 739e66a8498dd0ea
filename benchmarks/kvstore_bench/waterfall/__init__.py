"""Where the time to the first token of a resumed turn goes: `python -m kvstore_bench.waterfall`."""
