"""Makes `FerryConnector` known to vLLM in every one of its processes (entry point group `vllm.general_plugins`)."""

CONNECTOR_NAME = "FerryConnector"
CONNECTOR_MODULE = "kv_engine_adapter.vllm.connector"


def register() -> None:
    """Register the connector by name; calling it again, as vLLM does in some processes, changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
