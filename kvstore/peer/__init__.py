"""Other daemons as sources of blocks: the link between two of them."""
