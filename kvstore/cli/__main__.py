"""`python -m kvstore.cli` is `kvstore`."""

from kvstore.cli.main import main

main(prog_name="kvstore")
