"""Requests that decode while others are measured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from perf.support.two_gpus import Server, prompt

#: Tokens of a neighbor's prompt.
PROMPT = 500


class Neighbors:
    """Decodes from __enter__(), which returns when all of them have a token, to __exit__()."""

    def __init__(self, server: Server, count: int, vocabulary: int, most_tokens: int) -> None:
        """``most_tokens``: of a prompt and what follows it, at which a neighbor ends by itself."""
        self._output = most_tokens - PROMPT
        self._arrivals: list[list[float]] = [[] for _ in range(count)]
        self._begun = threading.Barrier(count + 1)
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(server, number, vocabulary))
            for number in range(count)
        ]

    def _run(self, server: Server, number: int, vocabulary: int) -> None:
        arrivals = self._arrivals[number]
        with contextlib.closing(
            server.stream(prompt(77_000 + number, PROMPT, vocabulary), self._output)
        ) as stream:
            for at in stream:
                if not arrivals:
                    self._begun.wait()
                arrivals.append(at)
                if self._end.is_set():
                    return

    def __enter__(self) -> Neighbors:
        for thread in self._threads:
            thread.start()
        self._begun.wait(timeout=60)
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def gaps_ms(self, windows: Sequence[tuple[float, float]]) -> list[float]:
        """Sorted: the gaps between tokens that overlap one of the windows."""
        gaps = []
        for arrivals in self._arrivals:
            for earlier, later in zip(arrivals, arrivals[1:], strict=False):
                if any(later >= begin and earlier <= end for begin, end in windows):
                    gaps.append((later - earlier) * 1e3)
        return sorted(gaps)
