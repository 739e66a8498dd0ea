"""kvstore for Hugging Face transformers: `generate` that starts from the longest stored prefix."""

from kvstore_transformers.cache import PrefixCache
from kvstore_transformers.prefixes import Prefixes

__all__ = ["PrefixCache", "Prefixes"]
