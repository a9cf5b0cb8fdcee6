"""Lookups of a linker: what a waiting request can restore, pinned until it loads. Thread-bound.

SGLang asks at each scheduling pass, and aborts a request whose load fails. So the pages of an
answer are claimed at once, and the time that a pass may wait is limited.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from pegaflow import _native
from pegaflow.sglang.pages import KEY_BYTES
from pegaflow.sglang.settings import Settings

log = logging.getLogger("sglang.pegaflow")

#: An answer is given again for this long; then more pages may have been saved.
_AGAIN_S = 0.1
#: After a missed deadline, lookups are misses for this long.
_OPEN_S = 1.0


@dataclasses.dataclass
class Pin:
    """An answer, and the claim on its pages."""

    last_key: str
    keys: int
    units: int = 0
    end_key: str = ""  #: Of the last promised page; keys are chained, so it names all of them.
    token: bytes = b""
    ranges: tuple[tuple[int, int, int], ...] = ()
    lengths: list[int] = dataclasses.field(default_factory=list)
    asked_at: float = 0.0
    used_at: float = 0.0


class Pins:
    """The pins of all waiting requests, by their ids."""

    def __init__(
        self,
        session: Any,
        settings: Settings,
        *,
        several_kinds: bool,
        all_lengths: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``all_lengths``: other ranks may allow other lengths, so all of them are needed. SGLang
        takes more than a microsecond for each, so otherwise only the longest one is answered.
        """
        self._session = session
        self._settings = settings
        self._several = several_kinds
        self._all_lengths = all_lengths
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._open_until = 0.0
        self._pass_s = 0.0
        self._said = ""
        self.missed_deadlines = 0

    def __len__(self) -> int:
        return sum(1 for pin in self._pins.values() if pin.token)

    def begin_pass(self) -> None:
        """A new scheduling pass: its time begins, and pins of requests that have gone end."""
        self._pass_s = 0.0
        now = self._clock()
        for rid in [
            rid for rid, pin in self._pins.items() if now - pin.used_at > self._settings.pin_s
        ]:
            self.release(rid)

    def lookup(self, rid: str, keys: Sequence[str]) -> list[int]:
        """Lengths in pages, the longest among them, that are pinned for the request."""
        now = self._clock()
        pin = self._pins.get(rid)
        same = pin is not None and (pin.keys, pin.last_key) == (len(keys), keys[-1])
        if same and now - pin.asked_at < _AGAIN_S:
            pin.used_at = now
            return pin.lengths
        made = self._ask(keys, now)
        if made is None:
            if same and pin.units:
                pin.used_at = now  # its pages are pinned still
                return pin.lengths
            return []
        self.release(rid)
        if made.token and len(self) >= self._settings.max_pins:
            self._session.unclaim(made.token)
            return []
        self._pins[rid] = made
        return made.lengths

    def take(self, rid: str, keys: Sequence[str]) -> Pin | None:
        """The pin for exactly these keys, whose claim the caller ends; None without one."""
        pin = self._pins.pop(rid, None)
        if pin is not None and pin.token and (pin.units, pin.end_key) == (len(keys), keys[-1]):
            return pin
        if pin is not None and pin.token:
            self._session.unclaim(pin.token)
        made = self._ask(keys, self._clock())
        if made is None or made.units != len(keys):
            if made is not None and made.token:
                self._session.unclaim(made.token)
            return None
        return made

    def release(self, rid: str) -> None:
        pin = self._pins.pop(rid, None)
        if pin is not None and pin.token:
            self._session.unclaim(pin.token)

    def release_all(self) -> None:
        for rid in list(self._pins):
            self.release(rid)

    # ---- questions

    def _ask(self, keys: Sequence[str], now: float) -> Pin | None:
        """The answer; None without one in time, or without asking after a missed deadline."""
        left = self._settings.pass_wait_ms / 1e3 - self._pass_s
        if now < self._open_until or left <= 0:
            return None
        packed = _native.pack_hex_keys(keys[: _native.MAX_KEYS])
        if not packed:
            return None
        patience = min(left, self._settings.call_wait_ms / 1e3)
        try:
            answer = self._claim(packed, patience, keys, now)
        except _native.PegaFlowError as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("pegaflow: the cache is unavailable: %s", error)
            answer = None
        self._pass_s += self._clock() - now
        if answer is None:
            self._open_until = self._clock() + _OPEN_S
            self.missed_deadlines += 1
        return answer

    def _claim(self, packed: bytes, patience: float, keys: Sequence[str], now: float) -> Pin | None:
        """
        Raises:
            PegaFlowError: there is no server, or no answer.
        """
        end = now + patience
        session = self._session
        ticket = session.claim(packed, KEY_BYTES)
        lengths_ticket = None
        if self._several and self._all_lengths:
            lengths_ticket = session.boundaries(packed, KEY_BYTES)
        pin = Pin(keys[-1], len(keys), asked_at=now, used_at=now)
        if self._several:
            answer = session.take_ranges(ticket, patience)
        else:
            answer = session.take(ticket, patience)
        if answer is None:
            session.forget(ticket)
            if lengths_ticket is not None:
                session.forget(lengths_ticket)
            return None
        self._fill(pin, answer)
        pin.end_key = keys[pin.units - 1] if pin.units else ""
        if lengths_ticket is not None and pin.units:
            other = session.take_boundaries(lengths_ticket, max(0.0, end - self._clock()))
            if other is None:
                session.forget(lengths_ticket)
            else:
                pin.lengths = [one for one in other[0] if one <= pin.units]
        elif lengths_ticket is not None:
            session.forget(lengths_ticket)
        return pin

    def _fill(self, pin: Pin, answer: Any) -> None:
        """Of pages at another node none is promised: they may not arrive."""
        units, token = answer[0], answer[2]
        if self._several:
            pin.ranges, coming = tuple(answer[3]), answer[4]
            pin.units = 0 if coming else units
        else:
            pin.units = units - answer[3]
        if token and not pin.units:
            self._session.unclaim(token)
            return
        pin.token = token if pin.units else b""
        if self._all_lengths and not self._several:
            pin.lengths = list(range(1, pin.units + 1))
        else:
            pin.lengths = [pin.units] if pin.units else []
