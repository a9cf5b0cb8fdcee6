"""Engines in processes of their own, which a test can kill."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

#: The limit of a call; more than any takes on a busy machine.
ANSWER_S = 240.0

#: Set for engines that have IPC namespaces of their own.
OWN_IPC = "PEGA_TEST_OWN_IPC"

_CLONE_NEWIPC = 0x08000000

_CONTEXT = multiprocessing.get_context("spawn")


def _serve(pipe: Connection, device: str) -> None:
    """The child: imports the slow modules, then executes commands."""
    if OWN_IPC in os.environ and ctypes.CDLL(None).unshare(_CLONE_NEWIPC) != 0:
        raise PermissionError("an IPC namespace of its own needs root")
    import torch

    from tests.gpu.engine import Engine

    if device.startswith("cuda"):
        torch.zeros(1, device=device)  # the context, which takes a second
    pipe.send(("ready", None))
    engine: Any = None
    while True:
        try:
            name, arguments, options = pipe.recv()
        except EOFError:
            return
        if name == "end":
            if engine is not None:
                engine.close()
            pipe.send(("value", None))
            return
        try:
            if name == "open":
                engine = Engine(*arguments, device=device, **options)
                value = None
            elif name == "function":
                module, _, name = arguments[0].partition(":")
                value = getattr(importlib.import_module(module), name)(*arguments[1:], **options)
            elif name == "call":
                name, *arguments = arguments
                value = getattr(engine, name)(*arguments, **options)
            else:  # "watch": a call that continues until the next message
                name, *arguments = arguments
                if name == "churn":
                    options["tell"] = lambda told: pipe.send(("told", told))
                value = getattr(engine, name)(*arguments, stop=pipe.poll, **options)
                pipe.recv()
            pipe.send(("value", value))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


class EngineProcess:
    """One engine's worker; exceptions of the child are raised here."""

    def __init__(self, device: str) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self._is_ready = False
        self._watching = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def open(self, *arguments: Any, **options: Any) -> EngineProcess:
        """Makes the engine; see Engine."""
        self._wait_started()
        self._pipe.send(("open", arguments, options))
        self._answer()
        return self

    def begin(self, name: str, *arguments: Any, **options: Any) -> None:
        """Starts a call whose result take() returns."""
        self._pipe.send(("call", (name, *arguments), options))

    def take(self) -> Any:
        return self._answer()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.begin(name, *arguments, **options)
        return self._answer()

    def call_function(self, function: str, *arguments: Any) -> Any:
        """Calls ``module:name`` there."""
        self._wait_started()
        self._pipe.send(("function", (function, *arguments), {}))
        return self._answer()

    def watch(self, name: str, *arguments: Any, **options: Any) -> None:
        """Starts a call that continues until stop()."""
        self._pipe.send(("watch", (name, *arguments), options))
        self._watching = True

    def told(self) -> dict[str, int]:
        """The next progress report of a call under watch()."""
        kind, value = self._receive()
        assert kind == "told", value
        return value

    def stop(self) -> Any:
        self._watching = False
        self._pipe.send(None)
        return self._answer()

    def kill(self) -> None:
        """SIGKILL. The process is not reaped: its pidfd shows when it is gone."""
        os.kill(self.pid, 9)

    def close(self) -> None:
        if self.process.is_alive():
            try:
                if self._watching:
                    self.stop()
                self._wait_started()
                self._pipe.send(("end", (), {}))
                self._answer()
            except (OSError, EOFError, RuntimeError, AssertionError):
                self.process.kill()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.process.kill()
        self.close()

    def _wait_started(self) -> None:
        if not self._is_ready:
            kind, value = self._receive()
            assert kind == "ready", value
            self._is_ready = True

    def _receive(self) -> tuple[str, Any]:
        if not self._pipe.poll(ANSWER_S):
            raise RuntimeError(f"process {self.pid} does not respond")
        return self._pipe.recv()

    def _answer(self) -> Any:
        while True:
            kind, value = self._receive()
            if kind == "told":
                continue
            if kind == "error":
                raise RuntimeError(f"in process {self.pid}:\n{value}")
            return value
