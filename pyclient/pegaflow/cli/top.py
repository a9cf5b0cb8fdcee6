"""Shows the activity of a server: hit rate and its ceiling, pool, disks, traffic, calls, misses.

Reads /metrics every --interval and shows rates since the reading before it; the first view, and
that of --once, shows what was counted since the server started. On a terminal the view refreshes in
place until Ctrl-C (or q); in a file or a pipe one view follows the other. Exits with 1 if the
server does not respond at the start, or has no metrics yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from pegaflow.cli import disks, server_view
from pegaflow.cli.machine import format_bytes

#: Calls whose latency matters to an engine.
_METHODS = ("lookup", "claim", "open", "reserve", "publish")
_CLEAR_BELOW, _HOME, _CLEAR_RIGHT = "\x1b[J", "\x1b[H", "\x1b[K"
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--http-addr",
        default=server_view.DEFAULT_HTTP,
        help="the server's --http-addr (default: %(default)s)",
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="time between two views, 0.1 to 3600 (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="show one view and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON object per view")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600")
    return value


def run(options: argparse.Namespace) -> int:
    in_place = sys.stdout.isatty() and not options.json and not options.once
    server = server_view.ServerHttp(options.http_addr)
    try:
        samples, programs = _read(server), _programs(server)
        with _screen(sys.stdout) if in_place else contextlib.nullcontext():
            _loop(server, View(samples, programs=programs), options, in_place)
    except server_view.Unreachable as error:
        print(
            f"pegaflow top: {error}\n"
            "  is the server running? its --http-addr is in its log as `http address=`; "
            "run `pegaflow doctor`",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        pass  # the usual way to end it
    except BrokenPipeError:
        # As in `pegaflow top | head`: the rest must not be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _loop(
    server: server_view.ServerHttp,
    view: View,
    options: argparse.Namespace,
    in_place: bool,
) -> None:
    read_at, problem = time.monotonic(), ""
    while True:
        _show(view, options, in_place, problem)
        if options.once or _wait(options.interval, in_place):
            return
        try:
            samples, now = _read(server), time.monotonic()
            view = View(samples, view.samples, now - read_at, _programs(server))
            read_at, problem = now, ""
        except server_view.Unreachable as error:
            problem = str(error)  # it may be restarting: the last view stays, with a note


def _read(server: server_view.ServerHttp) -> server_view.Samples:
    """One reading.

    Raises:
        Unreachable: no response, or no metrics: it prepares the pool, or is not a PegaFlow server.
    """
    status, page = server.get("/metrics")
    if status != 200:
        raise server_view.Unreachable(
            f"http://{server.address}/metrics: status {status}: {page.strip()[:200]}"
        )
    samples = server_view.Samples(page)
    if not samples.get("pegaflow_build_info"):
        raise server_view.Unreachable(
            f"http://{server.address}/metrics does not belong to a PegaFlow server"
        )
    return samples


def _programs(server: server_view.ServerHttp) -> dict[str, int]:
    """The instances by engine and version; empty if the server does not list them."""
    try:
        status, shown = server.get_json("/instances")
    except server_view.Unreachable:
        return {}  # /metrics was there: the view has all but this
    return server_view.programs(shown.get("instances", ())) if status == 200 else {}


class View:
    """The contents of a view: numbers from one reading, and rates since the one before it."""

    def __init__(
        self,
        samples: server_view.Samples,
        before: server_view.Samples | None = None,
        seconds: float = 0.0,
        programs: dict[str, int] | None = None,
    ) -> None:
        self.samples = samples
        self.programs = programs or {}
        restarted = before is not None and any(
            samples.get(name) < before.get(name)
            for name in ("pegaflow_cache_lookups_total", "pegaflow_connections_accepted_total")
        )
        self._before = None if restarted else before
        #: 0: counts are since the start of the server, whose time is unknown.
        self.seconds = seconds if self._before is not None else 0.0

    def _get(self, name: str, **labels: str) -> float:
        return self.samples.get(f"pegaflow_{name}", **labels)

    def _moved(self, name: str, **labels: str) -> float:
        before = self._before.get(f"pegaflow_{name}", **labels) if self._before else 0.0
        return self._get(name, **labels) - before

    def _moved_by(self, name: str, label: str) -> dict[str, float]:
        there = self.samples.by_label(f"pegaflow_{name}", label)
        return {value: self._moved(name, **{label: value}) for value in there}

    def _percentile(self, name: str, share: float, **labels: str) -> float | None:
        """Upper bound of its bucket, inf beyond the last; None without a call."""
        found = {
            float(bound): self._moved(f"{name}_bucket", le=bound, **labels)
            for bound in self.samples.by_label(f"pegaflow_{name}_bucket", "le")
        }
        total = found.get(math.inf, 0.0)
        if not total:
            return None
        return min(bound for bound, count in found.items() if count >= share * total)

    def _turns(self) -> dict[str, float | None]:
        """The bound is the longest iteration ever if the percentile's bucket ends beyond it."""
        p99 = self._percentile("rpc_turn_seconds", 0.99)
        longest = self._get("rpc_turn_longest_seconds")
        return {"p99": p99 and min(p99, longest), "longest_seconds": longest}

    def _blocks(self) -> dict[str, float | None]:
        found = self._moved("cache_block_hits_total")
        asked = found + self._moved("cache_block_misses_total")
        return {
            "asked": asked,
            "found": found,
            "hit_rate": found / asked if asked else None,
            "saved": self._moved("cache_block_insertions_total"),
            "evicted": self._moved("cache_block_evictions_total"),
            "not_saved_no_room": self._moved("save_skipped_blocks_total", reason="no_room"),
        }

    def _kinds(self) -> dict[str, dict[str, float]]:
        """Blocks and bytes by kind of layers; empty if the server is too old to count them."""
        return {
            kind: {
                f"{what}_{unit}": self._moved(f"kind_{what}_{unit}_total", kind=kind)
                for what in ("loaded", "saved")
                for unit in ("blocks", "bytes")
            }
            | {
                f"shortened_{unit}": self._moved(f"kind_shortened_{unit}_total", kind=kind)
                for unit in ("lookups", "tokens")
            }
            for kind in self.samples.by_label("pegaflow_kind_saved_blocks_total", "kind")
        }

    def _kind_lines(
        self,
        kinds: dict[str, dict[str, float]],
        count: Callable[[float], str],
        size: Callable[[float], str],
    ) -> list[str]:
        """A line for each kind that engines have saved; none if that was full attention only."""
        saved = self.samples.by_label("pegaflow_kind_saved_blocks_total", "kind")
        shown = [kind for kind, blocks in saved.items() if blocks]
        if shown == ["full"]:
            return []
        return [
            f"  {kind:<8} loaded {count(row['loaded_blocks'])} blocks, "
            f"{size(row['loaded_bytes'])}; saved {count(row['saved_blocks'])}, "
            f"{size(row['saved_bytes'])}"
            + (
                f"; shortened {count(row['shortened_lookups'])} hits"
                if row["shortened_lookups"]
                else ""
            )
            for kind, row in kinds.items()
            if kind in shown
        ]

    def _ssd(self) -> dict[str, Any]:
        """The disks by their path, and what they have in common; no disks without an SSD tier."""
        paths = self.samples.by_label("pegaflow_ssd_capacity_bytes", "disk")
        return {
            "disks": {
                path: {
                    "state": disks.state_of(self.samples, path),
                    "breaker_open": bool(self._get("ssd_breaker_open", disk=path)),
                    "bytes": size,
                    "used_share": disks.used_share(self.samples, path),
                    "blocks": self._get("ssd_blocks", disk=path),
                    "hit_blocks": self._moved("ssd_hits_blocks_total", disk=path),
                    "read_bytes": self._moved("ssd_read_bytes_total", disk=path),
                    "written_bytes": self._moved("ssd_write_bytes_total", disk=path),
                    "proof_failures": self._moved("ssd_proof_failures_total", disk=path),
                    "errors": self._moved("ssd_errors_total", disk=path),
                }
                for path, size in paths.items()
            },
            "not_written": self._moved_by("ssd_rejected_blocks_total", "reason"),
            "late_blocks": self._moved("ssd_late_blocks_total"),
            "waits_for_peers": bool(self._get("ssd_waits_for_peers")),
        }

    def _ssd_lines(
        self, ssd: dict[str, Any], count: Callable[[float], str], size: Callable[[float], str]
    ) -> list[str]:
        """A line for each disk, its path last, and one for lost blocks if there are any."""
        lines = []
        for path, disk in ssd["disks"].items():
            state = disk["state"] + (", reads fail" if disk["breaker_open"] else "")
            used = "" if disk["used_share"] is None else f"{disk['used_share']:.0%} of "
            wrong = disk["proof_failures"] + disk["errors"]
            lines.append(
                f"ssd        {state}, {used}{format_bytes(disk['bytes'])}, "
                f"{disk['blocks']:,.0f} blocks, hits {count(disk['hit_blocks'])}, "
                f"read {size(disk['read_bytes'])}, written {size(disk['written_bytes'])}"
                + (f", {count(wrong)} failed" if wrong else "")
                + f": {path}"
            )
        lost = [f"{reason} {count(n)}" for reason, n in ssd["not_written"].items() if n]
        notes = [f"not written: {', '.join(lost)}"] if lost else []
        if ssd["late_blocks"]:
            notes.append(f"late {count(ssd['late_blocks'])}")
        if ssd["waits_for_peers"]:
            notes.append("earlier blocks wait for peers")
        return [*lines, *([f"           {'; '.join(notes)}"] if notes else [])]

    def _kept(self) -> dict[str, float] | None:
        """The pool that outlives its server; None if it does not (--keep no)."""
        if not self.samples.has("pegaflow_keeper"):
            return None
        return {
            "keeper": bool(self._get("keeper")),
            "adopted_blocks": self._get("adopted_blocks"),
            "adopted_bytes": self._get("adopted_bytes"),
            "adopt_seconds": self._get("adopt_seconds"),
            "former_clients": self._get("former_clients"),
            "waits_for_nodes": bool(self._get("adopted_waits_for_nodes")),
        }

    def _windows(self) -> dict[str, dict[str, float]]:
        return {
            window: {
                "asked": self._get("hll_total_requests", window=window),
                "hit_rate": self._get("window_hit_rate", window=window),
                "ceiling": self._get("hll_estimated_hit_rate", window=window),
                "working_set_bytes": self._get("window_working_set_bytes", window=window),
            }
            for window in self.samples.by_label("pegaflow_window_hit_rate", "window")
        }

    def _latencies(self) -> dict[str, dict[str, float | None]]:
        return {
            method: {
                "calls": self._moved("rpc_duration_seconds_count", method=method),
                "p50": self._percentile("rpc_duration_seconds", 0.5, method=method),
                "p99": self._percentile("rpc_duration_seconds", 0.99, method=method),
            }
            for method in _METHODS
        }

    def numbers(self) -> dict[str, Any]:
        """The whole view for programs: bytes, blocks, seconds.

        Counts cover the last ``seconds``; if that is 0, the time since the server started.
        """
        return {
            "version": next(iter(self.samples.by_label("pegaflow_build_info", "version")), ""),
            "seconds": self.seconds,
            "blocks": self._blocks(),
            "windows": self._windows(),
            "misses": self._moved_by("cache_miss_blocks_total", "reason"),
            "bytes": {
                "loaded": self._moved("load_bytes_total"),
                "saved": self._moved("save_bytes_total"),
            },
            "kinds": self._kinds(),
            "pool": {
                "bytes": self._get("pool_capacity_bytes"),
                "used_bytes": self._get("pool_used_bytes"),
                "resident_blocks": self._get("cache_resident_blocks"),
                "held_blocks": self._get("held_blocks"),
                "next_victim_idle_seconds": self._get("cache_next_victim_idle_seconds"),
            },
            "kept": self._kept(),
            "ssd": self._ssd(),
            "quarantine": self.samples.by_label("pegaflow_quarantine_slots", "reason"),
            "clients": {
                "connections": self._get("connections"),
                "instances": self._get("instances"),
                "programs": self.programs,
                "instances_waiting": self._get("instances_waiting"),
                "claims": self._get("claims"),
                "pins": self._get("pins"),
                "oldest_pin_seconds": self._get("oldest_pin_seconds"),
            },
            "latency_at_most_seconds": self._latencies(),
            "turns": self._turns(),
        }

    def text(self, address: str) -> list[str]:
        """The same as text."""
        now = self.numbers()
        blocks, who = now["blocks"], now["clients"]
        per, seconds = ("/s", self.seconds) if self.seconds else (" in all", 1.0)
        since = f"last {self.seconds:.1f} s" if self.seconds else "since the start"

        def count(value: float) -> str:
            return f"{value / seconds:,.0f}{per}"

        def size(value: float) -> str:
            return f"{format_bytes(value / seconds)}{per}"

        waiting = sum(now["quarantine"].values())
        lines = [
            f"pegaflow {now['version']} at {address}, {since}",
            "",
            f"hit rate   {_share(blocks['hit_rate'])} of {count(blocks['asked'])} blocks asked for",
        ]
        lines += [
            f"  {window:<8} {_share(each['hit_rate'])}  ceiling {_share(each['ceiling'])}  "
            f"working set {format_bytes(each['working_set_bytes'])}"
            for window, each in now["windows"].items()
            if each["asked"]
        ]
        missed = sorted(now["misses"].items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{reason} {count(value)}" for reason, value in missed if value)
        lines += [
            f"missing    {reasons or 'nothing'}",
            f"loaded     {size(now['bytes']['loaded'])}",
            f"saved      {size(now['bytes']['saved'])}, {count(blocks['saved'])} blocks; "
            f"{count(blocks['evicted'])} evicted, {count(blocks['not_saved_no_room'])} had no room",
            *self._kind_lines(now["kinds"], count, size),
            _pool_line(now["pool"]),
            *_kept_lines(now["kept"]),
            *self._ssd_lines(now["ssd"], count, size),
            f"engines    {who['instances']:.0f} ({who['instances_waiting']:.0f} waiting), "
            f"{who['connections']:.0f} connections, {who['claims']:.0f} claims, "
            f"{who['pins']:.0f} pins, oldest {_time(who['oldest_pin_seconds'])}",
        ]
        if who["programs"]:
            lines.append(
                "           " + ", ".join(f"{n} of {name}" for name, n in who["programs"].items())
            )
        if waiting:
            which = ", ".join(f"{key} {n:.0f}" for key, n in now["quarantine"].items() if n)
            lines.append(f"quarantine {waiting:.0f} slots: {which}")
        lines += ["", "call            count   p50 <=   p99 <="]
        lines += [
            f"{method:<8} {count(each['calls']):>12} "
            f"{_time(each['p50']):>8} {_time(each['p99']):>8}"
            for method, each in now["latency_at_most_seconds"].items()
        ]
        lines.append(
            f"event-loop iterations: p99 <= {_time(now['turns']['p99'])}, "
            f"longest ever {_time(now['turns']['longest_seconds'])}"
        )
        return lines


def _pool_line(pool: dict[str, float]) -> str:
    used = pool["used_bytes"] / pool["bytes"] if pool["bytes"] else 0.0
    return (
        f"pool       {format_bytes(pool['used_bytes'])} of {format_bytes(pool['bytes'])} "
        f"({used:.0%}), {pool['resident_blocks']:,.0f} blocks, "
        f"{pool['held_blocks']:,.0f} held, "
        f"next to go unused for {_time(pool['next_victim_idle_seconds'])}"
    )


def _kept_lines(kept: dict[str, float] | None) -> list[str]:
    """One line for a pool that outlives its server."""
    if kept is None:
        return []
    texts = ["held by its keeper" if kept["keeper"] else "NO KEEPER, it ends with this server"]
    if kept["adopted_blocks"]:
        texts.append(
            f"{kept['adopted_blocks']:,.0f} blocks adopted in {_time(kept['adopt_seconds'])}"
        )
    if kept["former_clients"]:
        texts.append(f"{kept['former_clients']:.0f} former clients")
    if kept["waits_for_nodes"]:
        texts.append("earlier blocks wait for nodes")
    return [f"kept       {', '.join(texts)}"]


def _share(value: float | None) -> str:
    return "    -" if value is None else f"{value:5.1%}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if math.isinf(seconds):
        return "> 1 s"  # the histogram's last bound
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _finite(value: Any) -> Any:
    """JSON has no infinity: a percentile beyond the last bound becomes null, as it is unknown."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and math.isinf(value) else value


def _show(view: View, options: argparse.Namespace, in_place: bool, problem: str) -> None:
    if options.json:
        print(json.dumps(_finite({**view.numbers(), "problem": problem or None})), flush=True)
        return
    lines = view.text(options.http_addr)
    if problem:
        lines += ["", f"NO RESPONSE, the view above is old: {problem}"]
    if not in_place:
        print("\n".join([*lines, ""]), flush=True)
        return
    width, height = shutil.get_terminal_size((100, 24))
    shown = [line[: width - 1] + _CLEAR_RIGHT for line in lines[: height - 1]]
    print(_HOME + "\r\n".join(shown) + _CLEAR_BELOW, end="", flush=True)


@contextlib.contextmanager
def _screen(out: TextIO) -> Iterator[None]:
    """Switches to the terminal's other screen, reads keys one by one, and restores the terminal."""
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(keys) if keys is not None else None
    try:
        if keys is not None:
            tty.setcbreak(keys)
        out.write(_OTHER_SCREEN)
        yield
    finally:
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        out.write(_FIRST_SCREEN)
        out.flush()


def _wait(seconds: float, in_place: bool) -> bool:
    """Waits for the next view; true if the user pressed q."""
    if not (in_place and sys.stdin.isatty()):
        time.sleep(seconds)
        return False
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            if os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
                return True
    return False
