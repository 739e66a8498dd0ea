"""Open the bucket that the settings name. The library is loaded here, and only if needed."""

from __future__ import annotations

from kvstore.model.errors import ConfigError
from kvstore.settings import ObjectSettings
from kvstore.tier.object.requests import Bucket


def connect(settings: ObjectSettings) -> Bucket:
    """Return the bucket that `object.url` names. Sends no request yet.

    Raises ConfigError without the library, or for an address that cannot be one.
    """
    try:
        from kvstore.tier.object.bucket import open_bucket
    except ImportError as error:
        raise ConfigError(
            "object.url is set, and obstore is not installed: pip install 'kvstore-tiers[object]'"
        ) from error
    return open_bucket(settings)
