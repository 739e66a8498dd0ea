"""The nouns: blocks, keys, checksums, hints, outcomes, errors. No I/O and no decisions."""
