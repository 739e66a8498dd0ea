"""Reads of a peer's memory without its processor: UCX or NIXL, beside the TCP link."""
