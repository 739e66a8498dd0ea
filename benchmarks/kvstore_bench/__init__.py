"""Benchmarks: multi-turn chat against any OpenAI-compatible endpoint (`kvstore bench chat`).

Read `runner.py` first: one run, and the function other programs call.
"""
