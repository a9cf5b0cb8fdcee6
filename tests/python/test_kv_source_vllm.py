"""The stream of a real vLLM, as ``index/events`` follows it: history, live batches, sessions, full
reports, a reset of an idle engine, and a restart in place.
"""

import contextlib
import http.client
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from tests.python.vllm_cases import BLOCK, SMALL, call, serve
from tests.support.vllm_server import MODEL_NAME, VllmServer, ensure_model, free_port

HANG_S = 60.0
PROMPT = [7 * i % 1000 + 5 for i in range(3 * BLOCK + 4)]


class Probe:
    """``kv_event_probe``: the lines that it printed, in order."""

    def __init__(self, sources: str) -> None:
        program = Path(os.environ["PEGA_BUILD_DIR"], "tests/integration/kv_event_probe")
        self._process = subprocess.Popen(
            [program, "127.0.0.1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: Queue[dict[str, Any]] = Queue()
        self.seen: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.say(sources)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next line that is wanted; those before it are in ``seen``."""
        while True:
            try:
                line = self._lines.get(timeout=HANG_S)
            except Empty:
                raise AssertionError(f"no such line; the last were {self.seen[-8:]}") from None
            self.seen.append(line)
            if wanted(line):
                return line

    def stored(self, count: int) -> list[dict[str, Any]]:
        """The next stored events, with ``count`` blocks together."""
        events: list[dict[str, Any]] = []
        while sum(len(event["hashes"]) for event in events) < count:
            events.append(self.wait(lambda line: line.get("event") == "stored"))
        return events

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(HANG_S) == 0
        self._reader.join()


@contextlib.contextmanager
def following(vllm: VllmServer) -> Iterator[Probe]:
    connection = http.client.HTTPConnection(vllm.http, timeout=HANG_S)
    with contextlib.closing(connection):
        connection.request("GET", "/kv_event_sources")
        response = connection.getresponse()
        sources = response.read().decode()
    assert response.status == 200, sources
    probe = Probe(sources)
    try:
        yield probe
    finally:
        probe.close()


def complete(vllm: VllmServer, tokens: list[int], **more: Any) -> None:
    body = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": 1, "temperature": 0} | more
    call(vllm, "/v1/completions", body)


def full_report(session: str) -> dict[str, Any]:
    return {"vllm_xargs": {"kv_cache_report_mode": "full", "session_id": session}}


def hashes(events: list[dict[str, Any]]) -> list[int]:
    return [block for event in events for block in event["hashes"]]


def test_the_stream_of_a_real_engine_is_followed_through_reports_resets_and_a_restart(
    short_path: Path,
) -> None:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{free_port()}",
    }
    vllm = serve(
        ensure_model(SMALL), short_path / "a", None, "--kv-events-config", json.dumps(events)
    )
    with vllm:
        # The history: published before the first subscription.
        complete(vllm, PROMPT)
        with following(vllm) as probe:
            first = probe.stored(3)
            assert first[0]["parent"] is None
            assert first[0]["block_size"] == BLOCK
            exact = probe.wait(lambda line: line.get("trust") == "exact")
            assert exact["reason"] == "the engine's whole history was replayed"

            # A reused prefix is announced by a full report only, with the session.
            complete(vllm, PROMPT, **full_report("pf1:0001"))
            report = probe.stored(3)
            assert hashes(report) == hashes(first)
            assert {event["session_id"] for event in report} == {"pf1:0001"}

            # New blocks continue the chain.
            complete(vllm, PROMPT[: 3 * BLOCK] + [9] * (BLOCK + 1), session_id="pf1:0002")
            more = probe.stored(1)
            assert more[0]["parent"] == hashes(first)[2]
            assert more[0]["session_id"] == "pf1:0002"

            # An overflow here: the engine replays what was lost, nothing is forgotten.
            probe.say("overflowed")
            probe.wait(lambda line: "replay_from" in line)
            complete(vllm, PROMPT, **full_report("pf1:0003"))
            assert hashes(probe.stored(3)) == hashes(first)
            assert not any("forget" in line for line in probe.seen)

            # An idle engine reports its reset with the next request only.
            call(vllm, "/reset_prefix_cache")
            complete(vllm, PROMPT)
            probe.wait(lambda line: line.get("event") == "cleared")
            assert hashes(probe.stored(3)) == hashes(first)

            # Another process at the same addresses.
            vllm.stop()
            probe.wait(lambda line: line.get("connection") is False)
            vllm.start()
            probe.wait(lambda line: line.get("connection") is True)
            forget = probe.wait(lambda line: "forget" in line)
            assert forget["forget"] == "the engine no longer has the last known batch"
            probe.wait(lambda line: line.get("trust") == "exact")
            complete(vllm, PROMPT)
            assert hashes(probe.stored(3)) == hashes(first)
