"""The local path: put, get and match of one daemon."""
