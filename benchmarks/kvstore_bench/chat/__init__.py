"""Multi-turn chat against any OpenAI-compatible endpoint: requests, clocks, drivers."""
