"""The server's view over HTTP: health, metrics and instances."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pegaflow.cli.finding import ADVICE, OK, PROBLEM, Finding
from pegaflow.cli.machine import format_bytes

DEFAULT_HTTP = "127.0.0.1:9091"
_TIMEOUT_S = 5.0
#: A load takes milliseconds, so an old pin belongs to a process that hangs.
_OLD_PIN_S = 60.0
#: The server itself warns below it.
_IN_PLACE = 0.95

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +(\S+)$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')

#: What to do when two engines of one model differ in a factor; see docs/connector.md.
_FACTOR_FIX = {
    "weights": "serve the same weights; compare what `pegaflow weights-id MODEL` prints for both",
    "config": "serve both with the same config.json and --hf-config-path",
    "dtype": "give both the same --dtype",
    "quantization": "give both the same --quantization",
    "overrides": "give both the same --hf-overrides",
    "rope": "give both the same --max-model-len and rope settings",
    "kv_dtype": "give both the same --kv-cache-dtype",
    "layout": "give both the same attention backend and VLLM_KV_CACHE_LAYOUT",
    "block_tokens": "give both the same --block-size",
    "hash_unit_tokens": "give both the same --block-size and hash block size",
    "hash_algorithm": "give both the same --prefix-caching-hash-algo",
    "hash_fingerprint": "set PYTHONHASHSEED=0 for every engine that is to share",
    "tp": "give both the same --tensor-parallel-size",
    "pp": "give both the same --pipeline-parallel-size",
    "dcp": "give both the same --decode-context-parallel-size",
    "options": "give both the same options of SGLang",
    "pcp": "give both the same --prefill-context-parallel-size",
}


class Unreachable(Exception):
    """No PegaFlow server responds at the HTTP address."""


class ServerHttp:
    """Queries one server. Each query opens a connection."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str) -> tuple[int, str]:
        """Status and body.

        Raises:
            Unreachable: no response.
        """
        connection = http.client.HTTPConnection(self.address, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"http://{self.address}{path}: {error}") from error
        finally:
            connection.close()

    def get_json(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and body.

        Raises:
            Unreachable: no response, or not a JSON object.
        """
        status, body = self.get(path)
        try:
            parsed = json.loads(body)
        except ValueError as error:
            raise Unreachable(f"http://{self.address}{path} is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise Unreachable(f"http://{self.address}{path} is a JSON {type(parsed).__name__}")
        return status, parsed


class Samples:
    """One reading of /metrics."""

    def __init__(self, page: str) -> None:
        self._samples = []
        for line in page.splitlines():
            if match := _SAMPLE.match(line):
                labels = dict(_LABEL.findall(match[2] or ""))
                self._samples.append((match[1], labels, float(match[3])))

    def get(self, name: str, **labels: str) -> float:
        """Sum over the samples with these labels; 0 when there is none."""
        return sum(
            value
            for sample, its, value in self._samples
            if sample == name and labels.items() <= its.items()
        )

    def has(self, name: str) -> bool:
        """Whether there is a sample of that name."""
        return any(sample == name for sample, _, _ in self._samples)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        return {its[label]: value for n, its, value in self._samples if n == name and label in its}


def check_health(server: ServerHttp) -> tuple[Finding, dict[str, Any] | None]:
    """One finding, and the body of /health if it is ready."""
    try:
        status, health = server.get_json("/health")
    except Unreachable as error:
        return Finding(
            "health",
            PROBLEM,
            str(error),
            "if the server has another --http-addr (see `http address=` in its log), "
            "name it: pegaflow doctor --http-addr HOST:PORT",
        ), None
    if status != 200:
        done, size = health.get("done_bytes", 0), health.get("pool_bytes", 0)
        return Finding(
            "health",
            PROBLEM,
            f"not ready: {health.get('status')} ({format_bytes(done)} of {format_bytes(size)})",
            "wait for it; if it waits for a previous server's memory, end the process that still "
            "maps it: grep -l pegaflow-pool /proc/*/maps",
        ), None
    return Finding("health", OK, f"{health.get('status')}, version {health.get('version')}"), health


def check_numa(
    health: Mapping[str, Any], instances: Sequence[Mapping[str, Any]], nodes: int
) -> Iterator[Finding]:
    """Where the pool lies. ``nodes``: this machine's NUMA nodes with memory and cores."""
    placement = health.get("numa")
    if placement is None:
        return  # an older server
    if refused := placement.get("refused"):
        yield Finding(
            "numa",
            ADVICE,
            f"the pool is not placed by NUMA node: {refused}",
            "docker run --cap-add SYS_NICE (deploy/container/compose.yaml has it), or start the "
            "server with --numa off if this is intended",
        )
        return
    policy = placement.get("policy")
    if policy == "off":
        detail = "one NUMA node" if nodes < 2 else f"{nodes} NUMA nodes; the kernel places the pool"
        yield Finding("numa", OK, detail)
        return
    parts = ", ".join(
        f"{format_bytes(part['bytes'])} on node {part['node']}"
        if "bytes" in part
        else f"node {part['node']}"
        for part in placement["nodes"]
    )
    in_place = placement.get("in_place", 1.0)
    if in_place < _IN_PLACE:
        yield Finding(
            "numa",
            ADVICE,
            f"{policy}: {parts}; {1 - in_place:.0%} of the pages are on another NUMA node because "
            "theirs was full",
            "choose a smaller --pool-size, or end the processes that fill that NUMA node: see "
            "numastat -m",
        )
    else:
        yield Finding("numa", OK, f"{policy}: {parts}")
    ranks = [rank for one in instances for rank in one.get("ranks", []) if rank.get("connected")]
    homeless = [rank for rank in ranks if rank.get("numa_node", -1) < 0]
    if policy == "auto" and homeless:
        yield Finding(
            "numa",
            ADVICE,
            f"{len(homeless)} of {len(ranks)} workers are not bound to the cores of one NUMA node: "
            "their pages are placed on the nodes in turn",
            "start each engine on its GPU's NUMA node: numactl --cpunodebind=N --membind=N vllm "
            "serve ...; nvidia-smi topo -m names the node",
        )


def check_metrics(samples: Samples) -> Iterator[Finding]:
    """Findings from the counters: the use of the pool, and each problem."""
    yield _check_pool(samples)
    yield _check_quarantine(samples)
    yield from _check_pins(samples)
    yield from _check_counters(samples)
    yield from _check_refusals(samples)


def _check_pool(samples: Samples) -> Finding:
    used, size = (
        samples.get("pegaflow_pool_used_bytes"),
        samples.get("pegaflow_pool_capacity_bytes"),
    )
    hits = samples.get("pegaflow_cache_block_hits_total")
    asked = hits + samples.get("pegaflow_cache_block_misses_total")
    use = f"{format_bytes(used)} of {format_bytes(size)} used"
    if asked:
        use += f", {hits / asked:.0%} of {asked:.0f} blocks asked for were found"
    return Finding("pool", OK, use)


def _check_quarantine(samples: Samples) -> Finding:
    reasons = samples.by_label("pegaflow_quarantine_slots", "reason")
    waiting = {reason: count for reason, count in reasons.items() if count}
    if not waiting:
        return Finding("quarantine", OK, "empty")
    counts = ", ".join(f"{count:.0f} {reason}" for reason, count in waiting.items())
    return Finding(
        "quarantine",
        ADVICE,
        f"slots that a lost engine may still access: {counts}",
        "they are released when that process ends or reconnects; find one that hangs: "
        "grep -l pegaflow-pool /proc/*/maps, then ps -o pid,stat,etime,cmd -p PID",
    )


def _check_pins(samples: Samples) -> Iterator[Finding]:
    age = samples.get("pegaflow_oldest_pin_seconds")
    if age > _OLD_PIN_S:
        yield Finding(
            "pins",
            ADVICE,
            f"the oldest of {samples.get('pegaflow_pins'):.0f} is {age:.0f} s old; a load takes "
            "milliseconds",
            "an engine is stopped or hangs: ps -eo pid,stat,cmd | grep -i vllm shows T for a "
            "stopped one; its pins end with its process",
        )


#: Counters that are 0 at a healthy server: name, what was counted, the fix.
_PROBLEM_COUNTERS = (
    (
        "pegaflow_pool_alloc_failures_total",
        "blocks were not saved because every slot was held",
        "choose a larger --pool-size, or look at pins and quarantine above",
    ),
    (
        "pegaflow_late_publishes_total",
        "saves arrived after their reservation had timed out",
        "engines hang for longer than --reservation-timeout: check their load",
    ),
    (
        "pegaflow_registrations_refused_total",
        "engines were rejected because of their page size",
        "compare `factors` of the instances; /instances has them",
    ),
)


def _check_counters(samples: Samples) -> Iterator[Finding]:
    for name, detail, fix in _PROBLEM_COUNTERS:
        if count := samples.get(name):
            yield Finding("counters", ADVICE, f"{count:.0f} {detail} ({name})", fix)


def _check_refusals(samples: Samples) -> Iterator[Finding]:
    for reason, count in samples.by_label("pegaflow_connections_refused_total", "reason").items():
        if count:
            fix = {
                "user": "start the server with --allow-uid for the user that the engines run as",
                "limit": "raise --max-connections; an engine needs two",
            }.get(reason, "see the server's log")
            yield Finding("connections", ADVICE, f"{count:.0f} refused: {reason}", fix)


#: The fix for an engine that is configured and not served, by reason.
_DECLINE_FIX = {
    "configuration": "correct that option in the engine's --kv-transfer-config or environment; "
    "docs/connector.md lists all options",
    "engine": 'start the engine without that setting; "What is served" in docs/connector.md lists '
    "the supported settings",
    "model": '"What is served" in docs/connector.md lists the supported kinds of KV cache; run '
    "this model without the connector",
    "weights": "run pegaflow weights-id MODEL on this machine, or set pegaflow.weights_id to a "
    "name that no other weights have, then restart the engine",
    "device": "docs/gpu.md lists devices and arrangements of the KV cache that are served; the "
    "engine's log has the whole error",
    "failure": "the engine's log has the traceback: report it, and restart the engine",
}


#: The same for SGLang, where the fix is another one.
_DECLINE_FIX_SGLANG = {
    "configuration": "correct that option in --hicache-storage-backend-extra-config, in "
    "linker_extra_config or in the environment; docs/sglang.md lists all options",
    "engine": '"What is served" in docs/sglang.md lists the supported settings',
    "model": '"What is served" in docs/sglang.md lists the supported pools; run this model without '
    "PegaFlow, or with pegaflow.untested",
}


def programs(instances: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The number of instances by engine and version, as "vllm 0.33.0" or "sglang 0.5.23"."""
    found: dict[str, int] = {}
    for instance in instances:
        build = instance.get("build", "")
        for row in instance.get("not_served", ()):
            build = build or row.get("build", "")
        if name := build.rpartition(", ")[2]:
            found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def check_declined(instances: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Engines that are configured to use the cache and do not, one line per side."""
    for engine in instances:
        for row in engine.get("not_served", ()):
            fixes = _DECLINE_FIX
            if ", sglang " in row["build"]:
                fixes = _DECLINE_FIX | _DECLINE_FIX_SGLANG
            side = row["side"] + (f" of rank {row['rank']}" if "rank" in row else "")
            yield Finding(
                "instance",
                PROBLEM,
                f"{engine['instance']} is configured to use the cache and runs without it "
                f"({side}, {row['build']}): {row['detail']}",
                fixes.get(row["reason"], "the engine's log has the whole reason"),
            )


def check_devices(engine: Mapping[str, Any]) -> Iterator[Finding]:
    """How the ranks of an engine copy: one line per kind of device."""
    seen = []
    for rank in engine.get("ranks", ()):
        device = tuple(rank.get(name, "") for name in ("device", "kernels", "copy_path"))
        if not rank.get("connected") or not device[0] or device in seen:
            continue
        seen.append(device)
        name, kernels, path = device
        detail = f"{engine['instance']}: KV cache on {name}, copy path {path}, kernels {kernels}"
        if kernels == "missing":
            yield Finding(
                "device",
                ADVICE,
                f"{detail}: pieces below some 512 KiB are copied slowly, and pages get no "
                "checksums",
                "install a wheel that was built with nvcc; docs/packages.md says how",
            )
        else:
            yield Finding("device", OK, detail)


def check_instances(instances: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """One line per instance, and for two of one model the factor that separates them."""
    yield from check_declined(instances)
    engines = [
        instance
        for instance in instances
        if instance.get("factors") and not instance.get("not_served")
    ]
    if not engines:
        yield Finding("instances", OK, "no engine is served yet")
        return
    for engine in engines:
        yield from check_devices(engine)
        name, state = engine["instance"], engine.get("state", "")
        detail = f"{name}: {state}, namespace {engine['namespace']}, {engine.get('build', '')}"
        detail += _kinds(engine)
        if state == "disconnected":
            yield Finding(
                "instance",
                ADVICE,
                detail,
                "its worker is gone: see that engine's log; it reconnects by itself",
            )
        elif "waiting" in state:
            yield Finding(
                "instance",
                ADVICE,
                f"{detail}: not all of its workers are connected",
                "see the engine's log for the missing ones; they connect by themselves",
            )
        elif state.startswith("refused"):
            yield Finding(
                "instance",
                ADVICE,
                detail,
                "start the server with a larger --pool-size, or the engine with the layout of the "
                "others in its namespace",
            )
        else:
            yield Finding("instance", OK, detail)
        if str(_factors(engine).get("hash_fingerprint", "")).startswith("private:"):
            yield Finding(
                "instance",
                ADVICE,
                f"{name} draws a secret hash seed at each start: no other engine finds its blocks, "
                "nor does it after a restart",
                "set PYTHONHASHSEED=0 for the engine",
            )
        if str(_factors(engine).get("weights", "")).startswith("private:"):
            yield Finding(
                "instance",
                ADVICE,
                f"{name} has weights without an id: no other engine finds its blocks, nor does it "
                "after a restart",
                "run pegaflow weights-id MODEL on this machine, then restart the engine",
            )
    yield from _differences(engines)


def _kinds(engine: Mapping[str, Any]) -> str:
    """The kinds of blocks of a model that has others than one of full attention."""
    texts = []
    for kind in engine.get("kinds", ()):
        # Of a window these are the tokens before the current one.
        reach = kind.get("tokens", 0) + (kind["kind"] == "window")
        size = f" of {reach}" if reach else ""
        texts.append(f"{kind['kind']}{size} in blocks of {kind['block_tokens']}")
    return f", kinds: {', '.join(texts)}" if texts else ""


def _differences(engines: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Each pair of namespaces of one model, with one instance of each."""
    of_namespace: dict[str, Mapping[str, Any]] = {}
    for engine in engines:
        of_namespace.setdefault(engine["namespace"], engine)
    different = list(of_namespace.values())
    for i, one in enumerate(different):
        for other in different[i + 1 :]:
            ours, theirs = _factors(one), _factors(other)
            # The same kind of model in the same shape: any other difference gets a line.
            if any(ours.get(key) != theirs.get(key) for key in ("architecture", "layers")):
                continue
            names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            for name in names:
                yield Finding(
                    "namespace",
                    ADVICE,
                    f"{one['instance']} and {other['instance']} share no blocks: {name} is "
                    f"{_short(ours.get(name))} and {_short(theirs.get(name))}",
                    _FACTOR_FIX.get(name, "start both with the same options and version")
                    + ", if they are to share",
                )


def _factors(engine: Mapping[str, Any]) -> dict[str, str]:
    return {factor["name"]: factor["value"] for factor in engine["factors"]}


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= 40 else f"{value[:18]}...{value[-18:]}"
