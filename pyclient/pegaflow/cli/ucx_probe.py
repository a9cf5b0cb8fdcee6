"""Loads UCX as the server does and prints one JSON object about it.

A program of its own, because loading UCX changes the process: it opens cards and the CUDA driver,
starts threads, and a broken build may end it. Uses the standard library only.

usage: python ucx_probe.py [FILE]
"""

from __future__ import annotations

import contextlib
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
_LOADER = ctypes.CDLL(None)
_LOADER.dlopen.restype = ctypes.c_void_p
_LOADER.dlerror.restype = ctypes.c_char_p


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
        _function(library, "ucp_get_version")(*map(ctypes.byref, numbers))
        found: dict[str, Any] = {
            "version": [number.value for number in numbers],
            "file": str(_file(name)),
        }
        if tuple(found["version"][:2]) >= _API:
            found |= _memory_types(library)
    except OSError as error:
        # Only the kernel's errors have such a text, which is without the name that was given.
        return {"error": f"{name}: {error.strerror}" if error.strerror else str(error)}
    return found


def _load(name: str) -> ctypes.CDLL:
    if not name:
        return _open("libucp.so.0", os.RTLD_NOW)
    file = Path(os.path.realpath(name, strict=True))
    # The loader opens whatever has the name, and a FIFO is opened only when it has a writer.
    if not file.is_file():
        raise OSError(f"{name} is not a regular file")
    for part in _PARTS:  # Those beside the file, although it may have another search path.
        if not (file.parent / part).is_file():
            continue  # The system's, or the next line reports what is missing.
        with contextlib.suppress(OSError):  # The next line reports it.
            _open(str(file.parent / part), os.RTLD_LAZY)
    return _open(str(file), os.RTLD_NOW)


def _open(file: str, mode: int) -> ctypes.CDLL:
    """Raises OSError with the loader's text. That of ctypes lacks it if it is not UTF-8."""
    handle = _LOADER.dlopen(os.fsencode(file), ctypes.c_int(mode))
    if not handle:
        raise OSError(os.fsdecode(_LOADER.dlerror() or b"unknown error"))
    return ctypes.CDLL(file, handle=handle)


def _function(library: ctypes.CDLL, name: str) -> Any:
    """Raises OSError if there is none."""
    try:
        return getattr(library, name)
    except (AttributeError, UnicodeDecodeError):  # The latter for a path that is not UTF-8.
        raise OSError(f"{library._name}: undefined symbol: {name}") from None


def _file(name: str) -> Path:
    if name:
        return Path(name).resolve()
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    files = re.findall(r"\s(/\S*libucp\S*\.so\S*)$", maps, re.MULTILINE)
    return Path(files[0]) if files else Path("libucp.so.0")


def _memory_types(library: ctypes.CDLL) -> dict[str, Any]:
    """``memory_types``: the mask of UCX, or ``not_started``: the reason why there is none."""
    text = _function(library, "ucs_status_string")
    text.restype = ctypes.c_char_p
    params = _Params(_PARAM_FIELD_FEATURES, _FEATURE_RMA)
    context = ctypes.c_void_p()
    status = _function(library, "ucp_init_version")(
        *_API, ctypes.byref(params), ctypes.c_void_p(), ctypes.byref(context)
    )
    if status == 0:
        attributes = _Attributes(field_mask=_ATTR_FIELD_MEMORY_TYPES)
        query = _function(library, "ucp_context_query")
        status = query(context, ctypes.byref(attributes))
        if status == 0:
            return {"memory_types": attributes.memory_types}
    return {"not_started": text(status).decode()}


if __name__ == "__main__":
    # A library may print when it is loaded, which is no part of the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    for variable, value in _MANNERS.items():
        os.environ.setdefault(variable, value)
    found = json.dumps(probe(sys.argv[1] if len(sys.argv) > 1 else ""))
    os.write(answer, found.encode())
    # Without UCX's own end, which may wait for cards.
    os._exit(0)
