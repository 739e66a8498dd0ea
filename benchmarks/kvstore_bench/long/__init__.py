"""Prompts of 128k tokens on a real vLLM: `python -m kvstore_bench.long`, `make long`."""
