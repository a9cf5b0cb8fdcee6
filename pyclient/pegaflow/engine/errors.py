"""The names of the native module's errors."""

from __future__ import annotations

import re


def error_code(error: Exception) -> str:
    """The name of an error's kind in metrics and reports: peer_lost for PeerLost."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
