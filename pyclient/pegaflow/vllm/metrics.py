"""The connector's counts, their way into vLLM's /metrics, and the periodic log line.

Each side fills a Counts; vLLM polls it every step, adds the sides up, carries the sum to its front
end and shows it there as ``vllm:pegaflow_*``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclasses.dataclass(frozen=True)
class Metric:
    name: str  #: Without vllm:pegaflow_; prometheus_client adds _total to counters.
    kind: str
    sentence: str
    labels: tuple[str, ...] = ()
    #: The labels of a series that is shown as 0 from the start, as all metrics without labels are.
    always: tuple[str, ...] = ()


METRICS = (
    Metric("hits", COUNTER, "Requests that were offered cached blocks."),
    Metric("misses", COUNTER, "Requests that were offered no blocks, by reason.", ("reason",)),
    Metric(
        "followed", COUNTER, "Requests that waited for another request's load of the same blocks."
    ),
    Metric("handovers", COUNTER, "Waits for a prefill engine's saves, by result.", ("result",)),
    Metric("handover_seconds", HISTOGRAM, "Duration of waits for a prefill engine's saves."),
    Metric(
        "early_handovers",
        COUNTER,
        "Waits of requests that came together with their prefill, by result.",
        ("result",),
    ),
    Metric(
        "early_handover_seconds",
        HISTOGRAM,
        "Duration of waits of requests that came together with their prefill.",
    ),
    Metric(
        "chunked_loads",
        COUNTER,
        "Loads that followed a prefill chunk by chunk, by the reason for their last part.",
        ("result",),
    ),
    Metric(
        "idle_steps",
        COUNTER,
        "Steps in which every request waited for the cache.",
    ),
    Metric("idle_seconds", COUNTER, "Time for which such steps slept until an answer came."),
    Metric("kv_hints", COUNTER, "Actions of vLLM's KV hints, by action.", ("action",)),
    Metric("loads", COUNTER, "Loads handed to the workers."),
    Metric(
        "declined",
        COUNTER,
        "Loads that were not offered because computing was predicted to be faster, by source.",
        ("source",),
    ),
    Metric(
        "load_cuts",
        COUNTER,
        "Loads that were cut because the engine computes the rest sooner, by reason.",
        ("reason",),
    ),
    Metric("loaded_blocks", COUNTER, "Blocks loaded, by kind of layers.", ("kind",), ("full",)),
    Metric("loaded_bytes", COUNTER, "Bytes loaded by all ranks."),
    Metric(
        "direct_bytes",
        COUNTER,
        "Loaded bytes that came out of another engine's memory or another node's pool.",
    ),
    Metric(
        "load_failures",
        COUNTER,
        "Loads that failed for some of their blocks, by error.",
        ("error",),
    ),
    Metric("load_failed_blocks", COUNTER, "Blocks of loads that failed and were computed."),
    Metric("verified_pages", COUNTER, "Loaded pages that were compared with their checksums."),
    Metric(
        "corrupt_pages",
        COUNTER,
        "Loaded pages whose checksum differed from that of the saved page.",
    ),
    Metric("load_seconds", HISTOGRAM, "Duration of loads, from the order to the report."),
    Metric(
        "saves",
        COUNTER,
        "Save jobs handed to the workers, at most one for each step and kind of layers.",
    ),
    Metric(
        "saved_blocks",
        COUNTER,
        "Blocks that saves added to the cache, by kind of layers.",
        ("kind",),
        ("full",),
    ),
    Metric("saved_bytes", COUNTER, "Bytes saved by all ranks."),
    Metric(
        "save_skipped_blocks",
        COUNTER,
        "Blocks that were not saved because they were cached or there was no room.",
    ),
    Metric("save_failed_blocks", COUNTER, "Blocks whose save failed, by error.", ("error",)),
    Metric(
        "save_dropped_blocks",
        COUNTER,
        "Blocks for which no save was requested, by reason.",
        ("reason",),
    ),
    Metric("save_seconds", HISTOGRAM, "Duration of save jobs, from the order to the report."),
    Metric(
        "resets",
        COUNTER,
        "Resets by vLLM: `explicit` resets apply to all nodes, `local` ones (pause, sleep) do not.",
        ("kind",),
    ),
    Metric(
        "reset_unconfirmed_nodes",
        COUNTER,
        "Nodes that did not confirm an explicit reset; the log names them.",
    ),
    Metric(
        "private_view",
        GAUGE,
        "1 while the engine shares no blocks because its weights may have changed.",
    ),
    Metric("event_stored_blocks", COUNTER, "Cached blocks that KV events reported as stored."),
    Metric("event_removed_blocks", COUNTER, "Cached blocks that KV events reported as removed."),
    Metric(
        "event_take_backs",
        COUNTER,
        "Times that all reported blocks were withdrawn: reset, restart or overrun.",
    ),
    Metric("pinned_blocks", GAUGE, "GPU blocks that are pinned for a save."),
    Metric(
        "pin_waits",
        COUNTER,
        "Times that vLLM waited for blocks of a save instead of preempting a request.",
    ),
    Metric("link_state", GAUGE, "1 for the state of the link to the server.", ("side", "state")),
    Metric("serving", GAUGE, "1 while this side uses the cache, 0 as plain vLLM.", ("side",)),
    Metric(
        "internal_errors",
        COUNTER,
        "Internal errors; the first one disables the cache on its side.",
        ("side",),
    ),
)
_BY_NAME = {metric.name: metric for metric in METRICS}

#: As in pegaflow._native; shown one-hot.
LINK_STATES = ("connecting", "refused", "ready", "broken", "retired")


class Counts(KVConnectorStats):
    """Increments since they were last taken. Bound to its side's thread.

    ``data`` is {name: {labels joined by "|": number or list}}, which vLLM can send anywhere.
    """

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        assert name in _BY_NAME, name
        if amount:
            row = self.data.setdefault(name, {})
            key = "|".join(labels)
            row[key] = row.get(key, 0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        assert name in _BY_NAME, name
        self.data.setdefault(name, {})["|".join(labels)] = value

    def observe(self, name: str, value: float) -> None:
        assert name in _BY_NAME, name
        self.data.setdefault(name, {}).setdefault("", []).append(value)

    def set_link_state(self, side: str, state: str) -> None:
        for name in LINK_STATES:
            self.set("link_state", float(name == state), side, name)

    def take(self) -> Counts | None:
        """What was counted since the last call, or None."""
        if not self.data:
            return None
        taken = Counts(data=self.data)
        self.data = {}
        return taken

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> Counts:
        for name, row in other.data.items():
            kind = _BY_NAME[name].kind if name in _BY_NAME else GAUGE
            mine = self.data.setdefault(name, {})
            for key, value in row.items():
                if kind == COUNTER:
                    mine[key] = mine.get(key, 0) + value
                elif kind == HISTOGRAM:
                    mine[key] = [*mine.get(key, ()), *value]
                else:
                    mine[key] = value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The changed counts, for vLLM's own periodic line."""
        total = {name: sum(self.data.get(name, {}).values()) for name in _LINE}
        return {name: value for name, value in total.items() if value}


_LINE = ("hits", "loaded_blocks", "loaded_bytes", "saved_blocks", "saved_bytes")


class PromMetrics(KVConnectorPromMetrics):
    """The counts as Prometheus metrics, in vLLM's front end."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        classes = {
            COUNTER: self._counter_cls,
            GAUGE: self._gauge_cls,
            HISTOGRAM: self._histogram_cls,
        }
        self._metrics = {}
        for metric in METRICS:
            more: dict[str, Any] = {"buckets": _SECONDS} if metric.kind == HISTOGRAM else {}
            if metric.kind == GAUGE:
                more["multiprocess_mode"] = "mostrecent"
            made = classes[metric.kind](
                name=f"vllm:pegaflow_{metric.name}",
                documentation=metric.sentence,
                labelnames=[*labelnames, *metric.labels],
                **more,
            )
            self._metrics[metric.name] = made
            if not metric.labels or metric.always:
                for values in per_engine_labelvalues.values():
                    made.labels(*values, *metric.always)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, row in transfer_stats_data.items():
            if name not in self._metrics:
                continue  # from another release of PegaFlow, in a rolling upgrade
            metric, kind = self._metrics[name], _BY_NAME[name].kind
            for key, value in row.items():
                # An older release states no kind.
                child = metric.labels(*values, *(key.split("|") if key else _BY_NAME[name].always))
                if kind == COUNTER:
                    child.inc(value)
                elif kind == GAUGE:
                    child.set(value)
                else:
                    for observation in value:
                        child.observe(observation)


class Summary:
    """The periodic line about the cache's activity. An idle engine, without steps, logs none."""

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._since = now
        self._counts = Counts()

    def note(self, counts: Counts | None) -> None:
        if counts is not None:
            self._counts.aggregate(counts)

    def line(self, now: float, link: str) -> str:
        """The line, if it is due and there was any activity; else empty."""
        if not self._interval_s or now - self._since < self._interval_s:
            return ""
        seconds, self._since = now - self._since, now
        data, self._counts = self._counts.data, Counts()

        def total(name: str) -> int:
            return int(sum(data.get(name, {}).values()))

        def by_label(name: str) -> str:
            row = sorted(data.get(name, {}).items(), key=lambda item: -item[1])
            return ", ".join(f"{key} {int(value)}" for key, value in row)

        parts = []
        if total("loads"):
            took = sorted(data.get("load_seconds", {}).get("", [0.0]))
            parts.append(
                f"{total('loads')} requests loaded {total('loaded_blocks')} blocks, "
                f"{total('loaded_bytes') / 1e6:.1f} MB, median {took[len(took) // 2] * 1e3:.0f} ms"
            )
        if total("saves"):
            parts.append(
                f"saved {total('saved_blocks')} blocks, {total('saved_bytes') / 1e6:.1f} MB, "
                f"{total('save_skipped_blocks')} were cached or had no room"
            )
        for name, word in (
            ("misses", "misses"),
            ("load_failures", "failed loads"),
            ("save_failed_blocks", "blocks not saved"),
            ("save_dropped_blocks", "blocks dropped"),
        ):
            if total(name):
                parts.append(f"{word}: {by_label(name)}")
        if not parts:
            return ""
        return f"pegaflow: in {seconds:.0f} s {'; '.join(parts)}; link {link}"


def metrics_markdown() -> str:
    """The table of docs/connector.md."""
    lines = ["| vllm:pegaflow_... | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        name = metric.name + ("_total" if metric.kind == COUNTER else "")
        labels = ", ".join(metric.labels) or "-"
        lines.append(f"| `{name}` | {metric.kind} | {labels} | {metric.sentence} |")
    return "\n".join(lines)
