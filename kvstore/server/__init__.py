"""The daemon's outside: gRPC on a unix socket and loopback, the arena socket, /metrics."""

from kvstore.server.server import Server

__all__ = ["Server"]
