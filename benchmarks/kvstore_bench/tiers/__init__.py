"""The slower tiers: files, objects, recovery, scrubbing, and a tier that is suddenly slow."""
