"""The tiers hold bytes. They know nothing of policy, requests or engines."""

from kvstore.tier.base import Tier

__all__ = ["Tier"]
