"""A vLLM that publishes its KV events, and a proxy that drops some of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import zmq

from tests.support.vllm_server import VllmOptions, VllmServer, free_port


class PublishingVllm(VllmServer):
    """A vLLM with KV events, whose addresses stay the same when it starts again."""

    def __init__(
        self,
        options: VllmOptions,
        directory: Path,
        env: Mapping[str, str] | None = None,
        *,
        events_socket: Path | None = None,
    ) -> None:
        """
        Args:
            events_socket: Publishes at this Unix socket, of at most 100 characters; None: at a
                free port.
        """
        self.events_socket = events_socket
        events = f"ipc://{events_socket}" if events_socket else f"tcp://*:{free_port()}"
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events,
            "replay_endpoint": f"tcp://*:{free_port()}",
        }
        arguments = (
            *options.arguments,
            *("--kv-events-config", json.dumps(config), "--enable-prompt-tokens-details"),
        )
        super().__init__(dataclasses.replace(options, arguments=arguments), directory, env)

    def start_again(self) -> None:
        """Starts it at the address that it had."""
        port = self._port
        self._make_temporary()
        self._port = port
        super(VllmServer, self).start()


class EventProxy:
    """Stands between the Unix socket of an engine's events and its subscribers.

    A context manager: takes the engine's place at the socket, so it begins after the engine's start
    and before that of the subscribers, and is not for an engine that starts again. Replays do not
    pass through it. Owned by the main thread; a thread of its own passes the batches on.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._drops = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event-proxy", daemon=True)
        self._context = zmq.Context()
        self._engine = self._context.socket(zmq.SUB)
        self._subscribers = self._context.socket(zmq.XPUB)
        #: Batches; written by the proxy's thread.
        self.passed = 0
        self.dropped = 0

    def __enter__(self) -> Self:
        moved = self._socket.with_name(self._socket.name + ".engine")
        self._socket.rename(moved)
        for one in (self._engine, self._subscribers):
            one.set_hwm(0)
            one.linger = 0
        self._engine.subscribe(b"")
        self._engine.connect(f"ipc://{moved}")
        self._subscribers.bind(f"ipc://{self._socket}")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        self._context.destroy()

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Drops all batches that arrive meanwhile."""
        self._drops.set()
        try:
            yield
        finally:
            self._drops.clear()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._engine, zmq.POLLIN)
        poller.register(self._subscribers, zmq.POLLIN)
        while not self._ends.is_set():
            ready = dict(poller.poll(50))
            if self._subscribers in ready:
                self._subscribers.recv()  # A subscription; the proxy itself has subscribed to all.
            if self._engine in ready:
                batch = self._engine.recv_multipart()
                if self._drops.is_set():
                    self.dropped += 1
                else:
                    self._subscribers.send_multipart(batch)
                    self.passed += 1
