"""The command `kvstore`: run a daemon, look into one, measure one."""

from kvstore.cli.main import main

__all__ = ["main"]
