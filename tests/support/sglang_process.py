"""Engines of SGLang's cache classes in processes of their own.

SGLang takes ten seconds to import, so one process does it once and forks the engines.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from typing import Any

#: Far more than any call takes on a busy machine; an engine that hangs is detected.
ANSWER_S = 120.0


class EngineFailed(Exception):
    """An engine raised; the text has its traceback."""


def _serve(connection: Any, module: str, kind: str, arguments: dict[str, Any]) -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    try:
        engine = getattr(importlib.import_module(module), kind)(**arguments)
        connection.send((True, None))
        while (call := connection.recv()) is not None:
            name, args, kwargs = call
            try:
                connection.send((True, getattr(engine, name)(*args, **kwargs)))
            except Exception:
                connection.send((False, traceback.format_exc()))
        engine.close()
        connection.send((True, None))
    except EOFError:
        pass  # the test has ended
    except Exception:
        connection.send((False, traceback.format_exc()))
    connection.close()
    # SGLang's threads are daemons in the middle of waits.
    os._exit(0)


class EngineProcess:
    """An engine: ``process.do("name", ...)`` calls its method."""

    def __init__(self, kind: str, *, module: str = "tests.support.sglang_engine", **arguments: Any):
        # The parent of forks may not use CUDA, and importing SGLang does.
        on_cpu = os.environ.get("PEGA_SGLANG_DEVICE", "cpu") == "cpu"
        context = multiprocessing.get_context("forkserver" if on_cpu else "spawn")
        if on_cpu:
            context.set_forkserver_preload(["tests.support.sglang_linker_engine"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, module, kind, arguments), daemon=True
        )
        self._process.start()
        theirs.close()
        self._answer()

    def start(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Sends a call whose answer ``wait`` returns."""
        self._connection.send((name, args, kwargs))

    def wait(self) -> Any:
        return self._answer()

    def do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.start(name, *args, **kwargs)
        return self.wait()

    def _answer(self) -> Any:
        if not self._connection.poll(ANSWER_S):
            raise EngineFailed(f"no answer within {ANSWER_S} s")
        good, value = self._connection.recv()
        if not good:
            raise EngineFailed(value)
        return value

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.is_alive():
            try:
                self._connection.send(None)
                self._answer()
            except (EngineFailed, OSError, EOFError):
                self._process.kill()
        self._process.join()
        self._connection.close()
