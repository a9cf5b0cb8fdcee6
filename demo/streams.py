"""One streamed completion from the client's view, event by event, to any end."""

from __future__ import annotations

import dataclasses
import http.client
import json
from collections.abc import Sequence
from typing import Any

from demo.client import RequestFailed, completion_body


@dataclasses.dataclass
class Seen:
    """The part of an answer that a client received."""

    status: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    error: str = ""  #: The text of an error body, or of an error event in the stream.
    done: bool = False  #: The stream ended with [DONE].


class Stream:
    """Sends a completion and reads its events one at a time. A context manager."""

    def __init__(
        self, address: str, prompt: Sequence[int], max_tokens: int, timeout_s: float = 120.0
    ) -> None:
        self.seen = Seen()
        self._response: http.client.HTTPResponse | None = None
        self._connection = http.client.HTTPConnection(address, timeout=timeout_s)
        self._connection.request(
            "POST",
            "/v1/completions",
            json.dumps(completion_body(prompt, max_tokens)),
            {"Content-Type": "application/json"},
        )

    def read_tokens(self, count: int) -> None:
        """Reads until this many tokens have arrived.

        Raises:
            RequestFailed: the answer ended before.
        """
        while len(self.seen.tokens) < count:
            if not self._read_event():
                raise RequestFailed(f"ended before {count} tokens: {self.seen}")

    def read_all(self) -> Seen:
        """Reads to the end of the answer, successful or not."""
        while self._read_event():
            pass
        return self.seen

    def _read_event(self) -> bool:
        """The next event; False at the end."""
        try:
            if self._response is None:
                self._response = self._connection.getresponse()
                self.seen.status = self._response.status
            if self.seen.status != 200:
                body = self._response.read().decode(errors="replace")
                self.seen.error = body or "no body"
                return False
            return self._read_line(self._response)
        except (OSError, http.client.HTTPException) as error:
            self.seen.error = self.seen.error or f"the connection ended: {error!r}"
            return False

    def _read_line(self, response: http.client.HTTPResponse) -> bool:
        line = response.readline()
        if not line:
            return False
        if not line.startswith(b"data: "):
            return True
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            self.seen.done = True
            return True
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            self.seen.error = json.dumps(event["error"])
        else:
            self.seen.tokens += event["choices"][0]["token_ids"]
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
