"""Tiers: they hold bytes, and know nothing of policy, requests or engines."""

from kvstore.tier.base import Tier

__all__ = ["Tier"]
