"""Runs a program that may not use io_uring, as in a container of Docker or containerd.

usage: without_io_uring.py PROGRAM [ARGUMENT...]
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_IO_URING_SETUP = 425
#: Load the number of the system call; compare; return an error, or allow.
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ERROR, _ALLOW = 0x00050000, 0x7FFF0000


def forbid_io_uring() -> None:
    """Applies to this process and to what it executes.

    Raises:
        OSError: the kernel has no seccomp filters.
    """
    instructions = b"".join(
        struct.pack("=HBBI", *each)
        for each in (
            (_LOAD, 0, 0, 0),
            (_IF_EQUAL, 0, 1, _IO_URING_SETUP),
            (_RETURN, 0, 0, _ERROR | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        )
    )
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER, program)):
        if prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid_io_uring()
    os.execvp(sys.argv[1], sys.argv[1:])
