"""Records from another process over TCP: this store beside Mooncake Store and NIXL."""
