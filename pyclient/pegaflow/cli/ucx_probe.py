"""Loads UCX as the server does and prints one JSON object about it.

A program of its own, because loading UCX changes the process: it opens cards and the CUDA driver,
starts threads, and a broken build may end it. Uses the standard library only.

usage: python ucx_probe.py [FILE]
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

#: As in transport/ucx/ucp_api.cpp.
_PARTS = ("libucm.so.0", "libucs.so.0", "libuct.so.0")
_MANNERS = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
# From ucp.h; none of them has changed since 1.13.
_API = (1, 13)
_PARAM_FIELD_FEATURES = 1 << 0
_FEATURE_RMA = 1 << 1
_ATTR_FIELD_MEMORY_TYPES = 1 << 2


class _Params(ctypes.Structure):
    """The begin of ``ucp_params_t``, and room for more."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("features", ctypes.c_uint64),
        ("more", ctypes.c_char * 256),
    )


class _Attributes(ctypes.Structure):
    """The begin of ``ucp_context_attr_t``, and room for more."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("request_size", ctypes.c_size_t),
        ("thread_mode", ctypes.c_int),
        ("memory_types", ctypes.c_uint64),
        ("more", ctypes.c_char * 256),
    )


def probe(name: str) -> dict[str, Any]:
    """``error``; or ``version``, ``file``, and ``memory_types`` or ``not_started``."""
    try:
        library = _load(name)
        numbers = [ctypes.c_uint() for _ in range(3)]
        library.ucp_get_version(*map(ctypes.byref, numbers))
    except FileNotFoundError as error:
        return {"error": f"{name}: {error.strerror}"}
    except (OSError, AttributeError) as error:  # No library, or one without the functions.
        return {"error": str(error)}
    found: dict[str, Any] = {
        "version": [number.value for number in numbers],
        "file": str(_file(name)),
    }
    if tuple(found["version"][:2]) >= _API:
        found |= _memory_types(library)
    return found


def _load(name: str) -> ctypes.CDLL:
    if not name:
        return ctypes.CDLL("libucp.so.0")
    file = Path(name).resolve(strict=True)
    for part in _PARTS:  # Those beside the file, although it may have another search path.
        try:
            ctypes.CDLL(str(file.parent / part), mode=os.RTLD_LAZY)
        except OSError:
            continue  # The system's, or the next line reports what is missing.
    return ctypes.CDLL(str(file))


def _file(name: str) -> Path:
    if name:
        return Path(name).resolve()
    maps = Path("/proc/self/maps").read_text()
    files = re.findall(r"\s(/\S*libucp\S*\.so\S*)$", maps, re.MULTILINE)
    return Path(files[0]) if files else Path("libucp.so.0")


def _memory_types(library: ctypes.CDLL) -> dict[str, Any]:
    """``memory_types``: the mask of UCX, or ``not_started``: the reason why there is none."""
    library.ucs_status_string.restype = ctypes.c_char_p
    params = _Params(_PARAM_FIELD_FEATURES, _FEATURE_RMA)
    context = ctypes.c_void_p()
    status = library.ucp_init_version(
        *_API, ctypes.byref(params), ctypes.c_void_p(), ctypes.byref(context)
    )
    if status == 0:
        attributes = _Attributes(field_mask=_ATTR_FIELD_MEMORY_TYPES)
        status = library.ucp_context_query(context, ctypes.byref(attributes))
        if status == 0:
            return {"memory_types": attributes.memory_types}
    return {"not_started": library.ucs_status_string(status).decode()}


if __name__ == "__main__":
    for variable, value in _MANNERS.items():
        os.environ.setdefault(variable, value)
    print(json.dumps(probe(sys.argv[1] if len(sys.argv) > 1 else "")), flush=True)
    # Without UCX's own end, which may wait for cards.
    os._exit(0)
