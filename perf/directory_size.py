"""Memory and processor time of a real Redis with the contents and the commands of a directory.

Writes anchors in batches as nodes do, as many for each sorted set as in the sizing table of
docs/directory.md, then reads and removes some. The number of sorted sets is a part of a server's;
neither figure depends on it.
"""

from __future__ import annotations

import random
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from perf.support.figure import Figure, note, publish
from perf.support.servers import parser
from tests.support.child_process import group_cpu_seconds
from tests.support.redis_server import RedisServer, encoded, read_reply
from tests.support.vllm_server import free_port

#: Commands of one batch: the most that a node has open at one server.
BATCH = 512
#: Sorted sets whose memory Redis is asked for.
SAMPLED = 1000
#: The sizing table of docs/directory.md: bytes of a member, and microseconds of a core.
TABLE_BYTES = 19.0
TABLE_US = {"zadd": 3.3, "zrem": 3.3, "zrangebylex": 5.0}
#: Measured memory is within this ratio of the table.
WITHIN = 1.1


class Batches:
    """One connection that sends commands in batches, as a node does."""

    def __init__(self, redis: RedisServer) -> None:
        host, _, port = redis.address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)), 60)
        self._replies = self._connection.makefile("rb")
        self._connection.sendall(encoded(("AUTH", redis.password)))
        read_reply(self._replies)

    def run(self, commands: Iterator[tuple[str | bytes, ...]]) -> int:
        """Sends all commands; returns how many there were."""
        count = 0
        batch: list[bytes] = []
        for command in commands:
            batch.append(encoded(command))
            count += 1
            if len(batch) == BATCH:
                self._send(batch)
                batch = []
        self._send(batch)
        return count

    def _send(self, batch: list[bytes]) -> None:
        self._connection.sendall(b"".join(batch))
        for _ in batch:
            read_reply(self._replies)

    def close(self) -> None:
        self._replies.close()
        self._connection.close()


def key_of(bucket: int) -> bytes:
    return b"a:" + bucket.to_bytes(4, "big")


def member_of(bucket: int, bits: int, low: int) -> bytes:
    """12 bytes: an anchor of that bucket, a node and its life."""
    anchor = bucket << (64 - bits) | low >> 32 & ((1 << (64 - bits)) - 1)
    return anchor.to_bytes(8, "big") + (low & 0xFFFFFFFF).to_bytes(4, "big")


def used_memory(redis: RedisServer) -> int:
    for line in redis.call("INFO", "memory").decode().splitlines():
        if line.startswith("used_memory:"):
            return int(line.partition(":")[2])
    raise RuntimeError("INFO memory without used_memory")


def usec_per_call(redis: RedisServer, command: str) -> float:
    """Redis's own time for a command, without its network; the clock's, not the processor's."""
    for line in redis.call("INFO", "commandstats").decode().splitlines():
        if line.startswith(f"cmdstat_{command}:"):
            fields = dict(part.split("=") for part in line.partition(":")[2].split(","))
            return float(fields["usec_per_call"])
    raise RuntimeError(f"INFO commandstats without {command}")


def measure(redis: RedisServer, bits: int, each: float, rng: random.Random) -> list[Figure]:
    """The figures for ``each`` members of a sorted set on average."""
    redis.call("FLUSHALL")
    redis.call("CONFIG", "RESETSTAT")
    batches = Batches(redis)
    count = int((1 << bits) * each)
    before = used_memory(redis)
    drawn = [(rng.getrandbits(bits), rng.getrandbits(64)) for _ in range(count)]
    named = [(key_of(bucket), member_of(bucket, bits, low)) for bucket, low in drawn]
    del drawn
    cpu: dict[str, float] = {}

    def timed(name: str, commands: Iterator[tuple[str | bytes, ...]]) -> None:
        begin = group_cpu_seconds(redis.pid)
        sent = batches.run(commands)
        cpu[name] = (group_cpu_seconds(redis.pid) - begin) / sent * 1e6

    timed("zadd", (("ZADD", key, "0", member) for key, member in named))
    bytes_each = (used_memory(redis) - before) / count
    keys = rng.sample(sorted({key for key, _ in named}), SAMPLED)
    usage = redis.calls([("MEMORY", "USAGE", key, "SAMPLES", "0") for key in keys], 60)
    cards = redis.calls([("ZCARD", key) for key in keys], 60)
    encodings = redis.calls([("OBJECT", "ENCODING", key) for key in keys], 60)
    compact = sum(encoding == b"listpack" for encoding in encodings) / SAMPLED
    asked = rng.sample(named, count // 4)
    timed("zrangebylex", map(_lookup, asked))
    timed("zrem", (("ZREM", key, member) for key, member in asked))
    batches.close()
    params = {"members": each, "sets": 1 << bits}
    told = f"{each:g} members of a set"
    figures = [
        Figure(
            f"used_memory of a member, {told}", params, bytes_each, "B", TABLE_BYTES, "the table",
            WITHIN, count, f"{compact:.1%} of the sets are listpacks",
        ),
        Figure(
            f"MEMORY USAGE of a member, {told}", params, sum(usage) / sum(cards), "B", TABLE_BYTES,
            "the table", WITHIN, SAMPLED, f"{min(cards)} to {max(cards)} members",
        ),
    ]  # fmt: skip
    for name, us in cpu.items():
        own = usec_per_call(redis, name)
        figures.append(
            Figure(
                f"{name}, {told}, its network included", params, us, "us of a core",
                TABLE_US[name], "the table", WITHIN, count if name == "zadd" else len(asked),
                f"one run; usec_per_call {own:.2f}",
            )
        )  # fmt: skip
    return figures


def _lookup(named: tuple[bytes, bytes]) -> tuple[str | bytes, ...]:
    """The question for one anchor, as directory/lookups.cpp sends it."""
    key, member = named
    anchor = int.from_bytes(member[:8], "big")
    end = b"(" + (anchor + 1).to_bytes(8, "big") if anchor + 1 < 1 << 64 else b"+"
    return ("ZRANGEBYLEX", key, b"[" + member[:8], end, "LIMIT", "0", "8")


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--members", type=float, nargs="+", default=[42, 64], help="members of a sorted set"
    )
    options.add_argument("--bits", type=int, default=15, help="2^BITS sorted sets")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        redis = RedisServer(Path(directory), f"127.0.0.1:{free_port()}", "perf")
        with redis:
            info = redis.call("INFO", "server").decode().splitlines()
            note(next(line for line in info if line.startswith("redis_version")))
            figures = [
                figure
                for each in chosen.members
                for figure in measure(redis, chosen.bits, each, random.Random(chosen.seed))
            ]
    return 0 if publish(figures, chosen.json) else 1


if __name__ == "__main__":
    sys.exit(main())
