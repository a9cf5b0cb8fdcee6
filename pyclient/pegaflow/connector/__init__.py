"""PegaFlow inside vLLM: ``"kv_connector_module_path": "pegaflow.connector"``.

The name that configurations use; the connector is in ``pegaflow.vllm``.
"""

from pegaflow.vllm import PegaKVConnector

__all__ = ["PegaKVConnector"]
