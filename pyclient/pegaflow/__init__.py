"""PegaFlow: the KV cache of inference engines, kept outside of them.

Importing this package starts no thread and opens no socket. vLLM finds its connector in
`pegaflow.connector`; `pegaflow._native` is the C++ client that it uses.
"""

from pegaflow._native import __version__

__all__ = ["__version__"]
