"""Copies between an engine's paged KV and contiguous records, each beside its plain reference."""
