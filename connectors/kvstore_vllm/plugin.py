"""Make the connector and the tier known to vLLM by short names, in every process vLLM starts."""

from __future__ import annotations

NAME = "KVStoreConnector"
TIER = "kvstore"


def register() -> None:
    """Register both, once: vLLM calls its plugins repeatedly in one process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvstore_vllm.connector", NAME)
    try:
        # Before 0.31 tiers are built with other arguments; there is no short name then.
        from vllm.v1.kv_offload.tiering import backpressure as _  # noqa: F401
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:
        return
    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, "kvstore_vllm.tier", "KVStoreTier")
