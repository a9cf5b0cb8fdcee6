"""PegaFlow inside vLLM: ``"kv_connector_module_path": "pegaflow.connector"``.

The name that configurations use; the connector is in ``pegaflow.vllm``.
"""

import logging

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from pegaflow.vllm import PegaKVConnector

__all__ = ["PegaKVConnector"]

# A configuration names the module as well. But vLLM's MultiConnector looks its connectors up by
# name alone when it shows their metrics, and an unknown name ends the API server.
try:
    KVConnectorFactory.register_connector("PegaKVConnector", __name__, "PegaKVConnector")
except ValueError as error:
    logging.getLogger("vllm.pegaflow").warning(
        "pegaflow: %s Another package has this name too: do not use MultiConnector with both "
        "installed",
        error,
    )
