"""Tenants of one daemon: what a quiet one notices of noisy ones, and what idle ones cost."""
