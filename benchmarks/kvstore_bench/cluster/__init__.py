"""Daemons that share what they hold: how fast one reads from another, and what lending costs."""
