"""PegaFlow inside vLLM: ``"kv_connector_module_path": "pegaflow.connector"``.

The name that configurations use; the connector is in ``pegaflow.vllm``.
"""

import logging

from pegaflow.vllm import PegaKVConnector

__all__ = ["PegaKVConnector"]

# A configuration names the module as well. But vLLM's MultiConnector looks its connectors up by
# name alone when it shows their metrics, and an unknown name ends the API server.
try:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.register_connector("PegaKVConnector", __name__, "PegaKVConnector")
except (ImportError, AttributeError, ValueError) as error:
    logging.getLogger("vllm.pegaflow").warning(
        "pegaflow: the connector is not registered by its name, so do not use it in a "
        "MultiConnector: %s",
        error,
    )
