"""Opens what announces blocks, where its library is installed."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from kvstore.metrics import Metrics
from kvstore.model.errors import ConfigError
from kvstore.settings import Settings
from kvstore.store.store import Store

if TYPE_CHECKING:
    from kvstore.events.service import Events


def open_events(settings: Settings, store: Store, metrics: Metrics) -> Events:
    """Announce the blocks of a store from now on. Raises ConfigError."""
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError("events.publish needs pyzmq: pip install 'kvstore-tiers[events]'")
    from kvstore.events.service import Events

    events = Events(settings, store, metrics)
    events.start()
    return events
