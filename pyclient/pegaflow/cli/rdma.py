"""The conditions for RDMA on this machine: cards, UCX, limits. Only reads files of the kernel."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pegaflow.cli.finding import ADVICE, OK, PROBLEM, Finding
from pegaflow.cli.machine import format_bytes

MEMLOCK_FIX = (
    "LimitMEMLOCK=infinity in the server's unit, --ulimit memlock=-1 for a container, or "
    "`ulimit -l unlimited` before it starts"
)
#: Versions with an assertion that ends the process when a peer dies during the greeting.
_FRAGILE_BEFORE = (1, 14)
_OLDEST = (1, 13)
#: In UCX's mask of memory types; bit 0 is host memory.
_CUDA_MEMORY = 1 << 1
#: Opening many cards takes a second or two.
_PROBE_TIMEOUT_S = 20
_CHOICE = "--ucx-library of the server, or PEGA_UCX_LIBRARY, names the file libucp.so.0 to use"


@dataclasses.dataclass(frozen=True)
class Port:
    """One port of an RDMA card, as the kernel shows it."""

    device: str
    number: int
    state: str  #: "ACTIVE", "DOWN", "INIT", "ARMED"
    link_layer: str  #: "InfiniBand" or "Ethernet"
    rate: str  #: "400 Gb/sec (4X NDR)"; empty if the kernel does not report it
    numa_node: int | None
    interface: str  #: The network interface of a RoCE port; empty if there is none.

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


def ports(sys: Path = Path("/sys")) -> list[Port]:
    """All ports, by device and number."""
    found = []
    for folder in sorted(sys.glob("class/infiniband/*/ports/*")):
        if not folder.name.isdigit():
            continue
        device = folder.parent.parent
        node = _line(device / "device/numa_node")
        state = _line(folder / "state")
        interfaces = sorted(each.name for each in (device / "device/net").glob("*"))
        found.append(
            Port(
                device=device.name,
                number=int(folder.name),
                state=state.rpartition(" ")[2] or "unknown",
                link_layer=_line(folder / "link_layer"),
                rate=_line(folder / "rate"),
                numa_node=int(node) if node.isdigit() else None,
                interface=_line(folder / "gid_attrs/ndevs/0") or next(iter(interfaces), ""),
            )
        )
    return found


def check_ports(found: Sequence[Port], nodes: dict[str, Any] | None) -> Iterator[Finding]:
    """``nodes`` is that part of a running server's /health; None if there is no server, or if it
    has no other nodes.
    """
    if not found:
        yield Finding("rdma", OK, "no RDMA card; nodes read from each other over sockets")
        return
    used = set((nodes or {}).get("cards", []))
    refused = {
        name: why
        for name, _, why in (
            each.partition(": ") for each in (nodes or {}).get("refused_cards", [])
        )
    }
    for port in found:
        detail = f"{port.name}, {port.link_layer}"
        if port.interface:
            detail += f" ({port.interface})"
        if port.rate:
            detail += f", {port.rate}"
        if port.numa_node is not None:
            detail += f", NUMA node {port.numa_node}"
        if port.state != "ACTIVE":
            yield Finding(
                "rdma card", ADVICE, f"{detail}: its link is {port.state}", _link_fix(port)
            )
        elif port.name in used:
            yield Finding("rdma card", OK, f"{detail}: up, and the server uses it")
        elif port.name in refused:
            yield Finding(
                "rdma card",
                ADVICE,
                f"{detail}: up; the server does not use it, {refused[port.name]}",
                "--nics and --deny-nics of the server, which looks for cards when it starts",
            )
        else:
            yield Finding("rdma card", OK, f"{detail}: up")
    if nodes is not None and not used and any(port.state == "ACTIVE" for port in found):
        yield Finding(
            "rdma",
            ADVICE,
            f"the server uses no card: {nodes.get('no_rdma', 'reason unknown')}",
            "fix the other lines, then restart the server; --require-rdma makes it an error",
        )


def _link_fix(port: Port) -> str:
    if port.link_layer == "InfiniBand":
        if port.state in ("INIT", "ARMED"):
            return "the port waits for a subnet manager: `systemctl start opensm` on one node"
        return "the cable, the port of the switch, or `ibportstate`"
    interface = port.interface or "the card's interface"
    return f"`ip link set {interface} up`, the cable, or the port of the switch"


def check_devices(
    found: Sequence[Port], sys: Path = Path("/sys"), dev: Path = Path("/dev")
) -> Iterator[Finding]:
    """The device files of the cards."""
    missing, closed = [], []
    for device in dict.fromkeys(port.device for port in found):
        for entry in sys.glob("class/infiniband_verbs/uverbs*/ibdev"):
            if _line(entry) != device:
                continue
            path = dev / "infiniband" / entry.parent.name
            if not path.exists():
                missing.append(path)
            elif not os.access(path, os.R_OK | os.W_OK):
                closed.append(path)
    if missing:
        yield Finding(
            "rdma device",
            PROBLEM,
            f"{_joined(missing)} is missing, as in a container without that device",
            "--device=/dev/infiniband for a container; `modprobe ib_uverbs` elsewhere",
        )
    if closed:
        yield Finding(
            "rdma device",
            ADVICE,
            f"this user may not open {_joined(closed)}; the server's user may differ",
            f"the group of the file: `usermod -aG {closed[0].group()} USER`",
        )


def check_locked_memory(
    found: Sequence[Port], pool_bytes: int, server_pid: int, proc: Path = Path("/proc")
) -> Finding:
    """RLIMIT_MEMLOCK of the server, or of this process without one: registering the pool counts
    against it, once per card.
    """
    try:
        text = (proc / str(server_pid or "self") / "limits").read_text()
    except OSError as error:
        return Finding("locked memory", OK, f"the limit cannot be read ({error.strerror})")
    match = re.search(r"^Max locked memory\s+(\S+)\s+(\S+)", text, re.MULTILINE)
    soft = match[1] if match else "unlimited"
    whose = "the server's limit" if server_pid else "this process's limit"
    if soft == "unlimited":
        return Finding("locked memory", OK, f"{whose}: none")
    detail = f"{whose}: {format_bytes(int(soft))}"
    cards = sum(port.state == "ACTIVE" for port in found)
    if cards == 0:
        return Finding("locked memory", OK, f"{detail}; only an RDMA card would need more")
    needed = pool_bytes * cards
    if pool_bytes and int(soft) >= needed:
        return Finding("locked memory", OK, f"{detail}, enough for the pool on {cards} cards")
    detail += f"; each of {cards} RDMA cards registers the whole pool"
    if needed:
        detail += f", {format_bytes(needed)} in all (root needs no limit)"
    return Finding("locked memory", ADVICE, detail, MEMLOCK_FIX)


@dataclasses.dataclass(frozen=True)
class Ucx:
    """A UCX library, and what it can do on this machine."""

    version: tuple[int, int, int]
    path: Path
    has_verbs: bool  #: Its module for cards is beside it.
    memory_types: int | None = None  #: UCX's mask; None: UCX does not start here.
    has_cuda: bool = False  #: Its module for CUDA memory is beside it.
    not_started: str = ""  #: Why UCX does not start.

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def memory(self) -> str:
        if self.memory_types is None:
            return f"CUDA memory unknown: UCX does not start ({self.not_started})"
        if self.memory_types & _CUDA_MEMORY:
            return "with CUDA memory"
        if self.has_cuda:
            return "with a module for CUDA memory, which finds no GPU"
        return "without CUDA memory"


def ucx_name(option: str | None, nodes: dict[str, Any] | None) -> str:
    """The library to examine: that of the option, of the running server, or of the environment;
    empty, also as the option: the one that the system finds.
    """
    if option is not None:
        return option
    served = (nodes or {}).get("ucx", {}).get("library", "")
    if served and not Path(served).exists():
        served = ""  # The server runs in a container.
    return served or os.environ.get("PEGA_UCX_LIBRARY", "")


def find_ucx(name: str = "") -> Ucx | str | None:
    """Loads the library as the server does, in a child process. ``name`` is its file; empty: the
    one that the system finds. A text: the reason why the named one cannot be loaded; None: no
    library is installed.
    """
    command = [sys.executable, "-P", str(Path(__file__).with_name("ucx_probe.py")), name]
    library = name or "the installed UCX"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"{library} did not start within {_PROBE_TIMEOUT_S} s"
    if not done.stdout:
        return f"{library} ends the process that loads it: {_end_of(done.returncode)}"
    found = json.loads(done.stdout)
    if "error" in found:
        return found["error"] if name else None
    path = Path(found["file"])
    return Ucx(
        version=tuple(found["version"]),
        path=path,
        has_verbs=has_verbs(path),
        memory_types=found.get("memory_types"),
        has_cuda=_has_module(path, "libuct_cuda"),
        not_started=found.get("not_started", ""),
    )


def _end_of(status: int) -> str:
    """The end of a process, from the return code of subprocess."""
    if status >= 0:
        return f"exit status {status}"
    return f"{signal.strsignal(-status)} (signal {-status})"


def has_verbs(library: Path) -> bool:
    return _has_module(library, "libuct_ib")


def _has_module(library: Path, name: str) -> bool:
    # A wheel that contains UCX adds a hash to each name.
    return any((library.parent / "ucx").glob(f"{name}*.so*"))


def check_ucx(ucx: Ucx | str | None, found: Sequence[Port]) -> Finding | None:
    """No finding for a machine that has neither UCX nor cards."""
    wanted = any(port.state == "ACTIVE" for port in found)
    bad = ADVICE if wanted else OK
    if ucx is None:
        if not found:
            return None
        return Finding("ucx", bad, "UCX is not installed", f"apt-get install libucx0; {_CHOICE}")
    if isinstance(ucx, str):
        return Finding("ucx", PROBLEM if wanted else ADVICE, f"unusable: {ucx}", _CHOICE)
    detail = f"{ucx.text}, {ucx.path}"
    if ucx.version[:2] < _OLDEST:
        return Finding("ucx", bad, f"{detail}: too old", f"UCX 1.14 or newer; {_CHOICE}")
    if not ucx.has_verbs:
        return Finding(
            "ucx",
            bad,
            f"{detail}: built without RDMA, as the wheels of PyPI are; {ucx.memory}",
            f"the distribution's libucx0, or the vendor's; {_CHOICE}",
        )
    if wanted and ucx.version[:2] < _FRAGILE_BEFORE:
        return Finding(
            "ucx",
            ADVICE,
            f"{detail}, with RDMA, {ucx.memory}; Debian's build may end the server when a peer "
            "dies during the greeting",
            f"UCX 1.14 or newer, the same on all nodes; {_CHOICE}",
        )
    return Finding("ucx", OK, f"{detail}, with RDMA, {ucx.memory}")


def check_peers(nodes: dict[str, Any] | None) -> Iterator[Finding]:
    """The lane to each other node."""
    for peer in (nodes or {}).get("peers", []):
        name, state = peer["peer"], peer["state"]
        if state == "self":
            continue
        if state != "ready":
            yield Finding(
                "peer",
                PROBLEM if state == "refused" else ADVICE,
                f"{name}: {state}, {peer.get('reason', 'no reason')}",
                "fix the reason on the side that it names"
                if state == "refused"
                else "is its server running, and its --peer-listen reachable from here?",
            )
        elif peer.get("lane_reason"):
            yield Finding(
                "peer",
                ADVICE,
                f"{name}: lane {peer['lane']}, RDMA does not work: {peer['lane_reason']}",
                "the cards' network between the two: docs/rdma.md",
            )
        else:
            yield Finding("peer", OK, f"{name}: lane {peer.get('lane', 'tcp')}")


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _joined(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))
