"""Pure decisions: what to keep, write, promote and evict. No I/O and no clock of its own."""
