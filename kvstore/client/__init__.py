"""The client: `AsyncClient` for event loops, `Client` for engine threads."""

from kvstore.client.admin import Admin
from kvstore.client.async_client import AsyncClient
from kvstore.client.blocking import Client
from kvstore.client.hints import Hints

__all__ = ["Admin", "AsyncClient", "Client", "Hints"]
