"""The socket of the node's server: its path, and whether a server listens on it."""

from __future__ import annotations

import dataclasses
import grp
import os
import pwd
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

from pegaflow import _native
from pegaflow.cli.finding import OK, PROBLEM, Finding

DEFAULT_ADDR = "127.0.0.1:50055"
_CONNECT_TIMEOUT_S = 1.0


class BadAddress(ValueError):
    """The address has no valid form; the text lists the valid ones."""


@dataclasses.dataclass(frozen=True)
class Listener:
    """The process that listens on the socket."""

    pid: int  #: 0 if its PID namespace is invisible here.
    uid: int


def addr_from(environ: Mapping[str, str]) -> str:
    """The address that the connector of an engine with this environment would use."""
    if endpoint := environ.get("PEGAFLOW_ENGINE_ENDPOINT"):
        return endpoint
    host = environ.get("PEGAFLOW_HOST", "127.0.0.1")
    return host if host.startswith("unix:") else f"{host}:{environ.get('PEGAFLOW_PORT', '50055')}"


def socket_path(addr: str) -> Path:
    """The socket of ``--addr``, as the server and the connector interpret it.

    Raises:
        BadAddress: neither ``HOST:PORT`` nor ``unix:/absolute/path``.
    """
    if addr.startswith("unix:"):
        path = Path(addr.removeprefix("unix:"))
        if not path.is_absolute():
            raise BadAddress(f"{addr}: a socket needs an absolute path, as unix:/run/x.sock")
        return path
    _, colon, port = addr.split("://", 1)[-1].rstrip("/").rpartition(":")
    if not colon or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise BadAddress(f"{addr} is neither HOST:PORT, as {DEFAULT_ADDR}, nor unix:/path/x.sock")
    return Path(_native.default_socket_path(int(port)))


def check_socket(path: Path, addr: str) -> tuple[Finding, Listener | None]:
    """One finding about the socket, and the process that listens, if there is one."""
    start = f"start one: pegaflow-server --addr {addr}"

    def problem(detail: str, fix: str) -> tuple[Finding, None]:
        return Finding("socket", PROBLEM, detail, fix), None

    try:
        status = os.stat(path)
    except FileNotFoundError:
        if not path.parent.is_dir():
            start += (
                f" (it creates {path.parent}; or set PEGAFLOW_RUNTIME_DIR for server and engines)"
            )
        return problem(f"{path} is missing: no server runs at {addr}", start)
    except PermissionError:
        return problem(
            f"user {_user(os.geteuid())} may not enter {path.parent}",
            f"join its group: usermod -aG {_group(path.parent.stat().st_gid)} "
            f"{_user(os.geteuid())}, then log in again",
        )
    except OSError as error:
        return problem(f"{path}: {error.strerror}", start)
    if not stat.S_ISSOCK(status.st_mode):
        return problem(f"{path} is not a socket", f"move it away, then {start}")
    owner = f"{stat.filemode(status.st_mode)} {_user(status.st_uid)}:{_group(status.st_gid)}"
    if not os.access(path, os.R_OK | os.W_OK):
        return problem(
            f"user {_user(os.geteuid())} may not use {path} ({owner})",
            f"join its group (usermod -aG {_group(status.st_gid)} {_user(os.geteuid())}) and start "
            f"the server with --socket-group and --allow-uid {os.geteuid()}",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return problem(
                f"{path} was left behind by a server that is gone", f"{start}; it replaces the file"
            )
        except (TimeoutError, BlockingIOError):  # its queue of connections is full
            return problem(
                f"{path}: a server listens but accepts no connection",
                "is it stopped? `ps -o pid,stat,cmd -C pegaflow-server` shows T; kill -CONT PID",
            )
        except OSError as error:
            return problem(f"{path}: {error.strerror}", start)
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    who = f"pid {pid} ({_command(pid)})" if pid else "a process of another PID namespace"
    detail = f"{path} ({owner}): {who} of user {_user(uid)} listens"
    return Finding("socket", OK, detail), Listener(pid, uid)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "its name cannot be read"  # it has just ended, or /proc hides it


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)  # a user of the host that this container does not know


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
