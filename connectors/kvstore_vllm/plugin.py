"""Make the connector known to vLLM by its short name, in every process vLLM starts."""

from __future__ import annotations

NAME = "KVStoreConnector"


def register() -> None:
    """Register the connector, once: vLLM calls its plugins repeatedly in one process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvstore_vllm.connector", NAME)
