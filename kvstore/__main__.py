"""`python -m kvstore` is `kvstore`."""

from kvstore.cli.main import main

main(prog_name="kvstore")
