"""Whether a path is fit for the SSD tier. Leaves nothing behind: a probe has no name."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from pegaflow.cli import rdma
from pegaflow.cli.disks import io_uring_disabled
from pegaflow.cli.finding import ADVICE, OK, PROBLEM, Finding
from pegaflow.cli.machine import format_bytes, meminfo

#: The file that the server uses in a directory.
FILE_IN_DIRECTORY = "pegaflow.ssd"
#: The server's I/O has this alignment.
_ALIGNMENT = 4096

_MEMORY = ("tmpfs", "ramfs")
_LAYERS = ("overlay", "aufs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "lustre", "9p", "virtiofs")

_IO_URING_SETUP = 425  #: The same number on all architectures.
_IO_URING_PARAMS_BYTES = 120


@dataclasses.dataclass(frozen=True)
class Mount:
    device: str  #: "254:0"
    kind: str  #: "ext4", "xfs", "overlay", ...
    point: str


def check_path(
    path: str, proc: Path = Path("/proc"), sys: Path = Path("/sys")
) -> Iterator[Finding]:
    """Findings for one element of --ssd-cache-path: a file, or a directory for one."""
    named = Path(path)
    file = named / FILE_IN_DIRECTORY if named.is_dir() else named
    folder = file.parent
    if not folder.is_dir():
        yield Finding(
            "ssd path",
            PROBLEM,
            f"{path}: {folder} does not exist",
            f"install -d -m 700 -o USER {folder}, where USER is the server's user",
        )
        return
    size = 0
    if file.exists():
        problem = _existing(file)
        if problem is not None:
            yield problem
            return
        size = file.stat().st_size
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            "ssd path",
            ADVICE,
            f"{folder}: this user may not create a file; the server's user may differ",
            f"chown USER {folder}, where USER is the server's user",
        )
    yield _file_system(file, size, mount_of(folder, proc), sys)
    yield _direct(file, folder)


def _existing(file: Path) -> Finding | None:
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        return Finding(
            "ssd path",
            PROBLEM,
            f"{file} is neither a regular file nor a directory",
            "name a file, or a directory, on a file system",
        )
    if status.st_mode & 0o077:
        return Finding(
            "ssd path",
            PROBLEM,
            f"{file}: other users may access it (mode {status.st_mode & 0o777:04o}), so the server "
            "refuses it",
            f"chmod 600 {file}",
        )
    return None


def mount_of(folder: Path, proc: Path = Path("/proc")) -> Mount:
    """The mount that has a directory: the last one at the longest matching place."""
    found = Mount("", "unknown", "/")
    real = Path(os.path.realpath(folder))
    for line in (proc / "self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        # Spaces are written as \040.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if real.is_relative_to(point) and len(point) >= len(found.point):
            found = Mount(fields[2], right.split()[0], point)
    return found


def _file_system(file: Path, size: int, mount: Mount, sys: Path) -> Finding:
    room = os.statvfs(file.parent)
    free = room.f_bavail * room.f_frsize
    detail = f"{file}: {mount.kind} at {mount.point}, {format_bytes(free)} free"
    if size:
        detail += f", the file has {format_bytes(size)}"
    if is_encrypted(mount.device, sys):
        detail += ", encrypted by dm-crypt"
    if mount.kind in _MEMORY:
        return Finding(
            "ssd path",
            PROBLEM,
            f"{detail}: this is memory and not a disk",
            "name a directory on a local disk, or choose a larger --pool-size",
        )
    if mount.kind in _LAYERS:
        return Finding(
            "ssd path",
            ADVICE,
            f"{detail}: the container's own layer, which ends with the container",
            "mount a volume or a directory of the host: docker run -v /nvme0/pegaflow:DIRECTORY",
        )
    if mount.kind in _NETWORK or mount.kind.startswith("fuse"):
        return Finding(
            "ssd path",
            ADVICE,
            f"{detail}: not a local disk, so other machines can delay every read",
            "name a directory on a local disk with ext4 or XFS",
        )
    return Finding("ssd path", OK, detail)


def is_encrypted(device: str, sys: Path = Path("/sys")) -> bool:
    """Whether a device is, or lies on, one of dm-crypt."""
    folder = sys / "dev/block" / device
    try:
        if (folder / "dm/uuid").read_text().startswith("CRYPT-"):
            return True
    except OSError:
        pass  # not a device of the device mapper
    return any(is_encrypted(_line(each / "dev"), sys) for each in folder.glob("slaves/*"))


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _direct(file: Path, folder: Path) -> Finding:
    """Transfers one page with O_DIRECT: from the file, or to one without a name."""
    page = mmap.mmap(-1, _ALIGNMENT)
    try:
        if file.exists():
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        else:
            flags = os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
            descriptor = os.open(folder, flags, 0o600)
        try:
            if file.exists():
                os.preadv(descriptor, [page], 0)
            else:
                os.pwritev(descriptor, [page], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return Finding(
                "ssd direct",
                ADVICE,
                f"{folder}: the file system refuses O_DIRECT with pages of {_ALIGNMENT} bytes, so "
                "the server uses the page cache",
                "use ext4 or XFS on a disk with blocks of 4 KiB or less",
            )
        return Finding("ssd direct", OK, f"{folder}: O_DIRECT was not tried ({error.strerror})")
    return Finding("ssd direct", OK, f"{folder}: O_DIRECT works with pages of {_ALIGNMENT} bytes")


def check_io_uring(proc: Path = Path("/proc")) -> Finding:
    """Whether this process may create a ring; a server in another container may differ."""
    setup = ctypes.CDLL(None, use_errno=True).syscall
    ring = setup(_IO_URING_SETUP, 1, ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES))
    if ring >= 0:
        os.close(ring)
        return Finding("ssd io", OK, "io_uring is allowed")
    error = ctypes.get_errno()
    detail = f"io_uring_setup: {os.strerror(error)}; the server uses threads instead"
    disabled = io_uring_disabled(proc)
    if error == errno.ENOSYS:
        fix = "a kernel since 5.11 with io_uring, and a seccomp profile that allows it"
    elif disabled:
        fix = f"sysctl -w kernel.io_uring_disabled=0 (it is {disabled})"
    else:
        fix = (
            "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp "
            "profile: docker run --security-opt seccomp=FILE"
        )
    return Finding("ssd io", ADVICE, detail, fix)


def check_registration(proc: Path = Path("/proc")) -> Finding:
    """Whether a pool on huge pages can be registered with io_uring by a process like this one."""
    if not meminfo(proc).get("HugePages_Total"):
        return Finding("ssd memlock", OK, "no huge pages are reserved, so nothing is registered")
    limit = re.search(
        r"^Max locked memory\s+(\S+)", (proc / "self/limits").read_text(), re.MULTILINE
    )
    if _has_ipc_lock(proc) or limit is None or limit[1] == "unlimited":
        return Finding("ssd memlock", OK, "a pool on huge pages can be registered with io_uring")
    return Finding(
        "ssd memlock",
        ADVICE,
        f"memlock is {format_bytes(int(limit[1]))}: a larger pool on huge pages is not registered "
        "with io_uring, which costs CPU time",
        rdma.MEMLOCK_FIX,
    )


def _has_ipc_lock(proc: Path) -> bool:
    effective = re.search(r"^CapEff:\s+(\w+)", (proc / "self/status").read_text(), re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> 14 & 1)
