"""Bytes between tiers, asynchronously: write-behind, promotion, object transfers, scrubbing."""
