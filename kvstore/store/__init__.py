"""One node's store: what the daemon's calls do with the planner, the tiers and the moves."""
