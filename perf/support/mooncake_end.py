"""One end of Mooncake's TCP transport, run by a Python with Mooncake: see perf/net_mooncake.py.

    mooncake_end.py hold ADDRESS BYTES SEED
    mooncake_end.py read ADDRESS BYTES SEED NAME BASE

Requests come on standard input and responses go to standard output, one line of JSON each. The
program ends with its input.
"""

import ctypes
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Iterator

from mooncake.engine import TransferEngine

UNIT = 64 << 10
#: Share of a batch's expected time that the reader sleeps before it polls for the batch.
ASLEEP = 0.85


def pattern(seed: int, count: int) -> Iterator[memoryview]:
    """`count` units that all differ."""
    noise = memoryview(random.Random(seed).randbytes(UNIT + count))
    return (noise[number : number + UNIT] for number in range(count))


class End:
    """Memory that is registered with the transport."""

    def __init__(self, address: str, size_bytes: int) -> None:
        self.memory = mmap.mmap(-1, size_bytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.engine = TransferEngine()
        if self.engine.initialize(address, "P2PHANDSHAKE", "tcp", "") != 0:
            raise SystemExit(f"Mooncake's transfer engine does not start at {address}")
        if self.engine.register_memory(self.base, size_bytes) != 0:
            raise SystemExit(f"Mooncake does not register {size_bytes} bytes")
        self.name = f"{address}:{self.engine.get_rpc_port()}"

    def fill(self, seed: int) -> None:
        for number, unit in enumerate(pattern(seed, len(self.memory) // UNIT)):
            self.memory[number * UNIT : (number + 1) * UNIT] = unit

    def clear(self) -> None:
        ctypes.memset(self.base, 0, len(self.memory))

    def check(self, seed: int) -> None:
        view = memoryview(self.memory)
        for number, unit in enumerate(pattern(seed, len(view) // UNIT)):
            if view[number * UNIT : (number + 1) * UNIT] != unit:
                raise SystemExit(f"unit {number} of the memory is not the holder's")


class Reader:
    """Reads pages from the holder's memory to the same places of its own."""

    def __init__(self, end: End, name: str, base: int) -> None:
        self.end = end
        self.name = name
        self.base = base

    def batch(self, at: int, page_bytes: int, pages: int) -> tuple[list[int], list[int], list[int]]:
        size = len(self.end.memory)
        offsets = [(at + page * page_bytes) % size for page in range(pages)]
        near = [self.end.base + offset for offset in offsets]
        far = [self.base + offset for offset in offsets]
        return near, far, [page_bytes] * pages

    def read(
        self, size_bytes: int, page_bytes: int, pages: int, depth: int, asleep_s: float
    ) -> float:
        """Seconds for `size_bytes`, in batches of `pages` with `depth` in flight.

        Mooncake waits by polling. With ``asleep_s``, the expected time of a batch, the reader
        sleeps for most of it first, which leaves the core to the transfer.
        """
        step = page_bytes * pages
        # Requests are prepared before the clock starts, as for the socket lane.
        batches = [self.batch(at, page_bytes, pages) for at in range(0, size_bytes, step)]
        engine = self.end.engine
        in_flight: list[int] = []
        begin = last = time.perf_counter()
        for asked in [*batches, *[None] * depth]:
            if depth == 1:
                if asked and engine.batch_transfer_sync_read(self.name, *asked) != 0:
                    raise SystemExit("Mooncake's batch_transfer_sync_read failed")
                continue
            if asked:
                in_flight.append(engine.batch_transfer_async_read(self.name, *asked))
                if in_flight[-1] == 0:
                    raise SystemExit("Mooncake's batch_transfer_async_read failed")
            if in_flight and (len(in_flight) == depth or not asked):
                if asleep_s:
                    time.sleep(max(0.0, last + asleep_s * ASLEEP - time.perf_counter()))
                if engine.get_batch_transfer_status([in_flight.pop(0)]) != 0:
                    raise SystemExit("a batch of Mooncake's failed")
                last = time.perf_counter()
        return time.perf_counter() - begin


def main() -> None:
    # The library also logs to standard output, which goes to standard error here.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    what, address, size_bytes, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    end = End(address, size_bytes)
    if what == "hold":
        end.fill(seed)
        print(json.dumps({"name": end.name, "base": end.base}), file=answers, flush=True)
        sys.stdin.read()
        return
    reader = Reader(end, sys.argv[5], int(sys.argv[6]))
    for line in sys.stdin:
        question = json.loads(line)
        check = question.pop("check")
        if check:
            end.clear()
        took_s = reader.read(**question)
        if check:
            end.check(seed)
        print(json.dumps({"took_s": took_s}), file=answers, flush=True)


if __name__ == "__main__":
    main()
    # Its threads do not end with the engine.
    os._exit(0)
