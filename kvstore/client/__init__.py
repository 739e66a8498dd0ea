"""The client: `AsyncClient` for event loops, `Client` for engine threads."""

from kvstore.client.async_client import AsyncClient
from kvstore.client.blocking import Client

__all__ = ["AsyncClient", "Client"]
