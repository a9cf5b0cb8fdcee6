"""Faults at random moments while one engine reads blocks of another one."""

from __future__ import annotations

import collections
import random
import time

from tests.gpu.direct import COMPUTE_S, engine_of_group
from tests.gpu.processes import EngineProcess
from tests.gpu.scenarios import Place
from tests.support.vllm_server import PegaServer
from tests.support.waiting import wait_until

#: Each fault with its share of the rounds. Killed processes take seconds to start again.
FAULTS = {
    "abort": 10,
    "overwritten": 6,
    "prefill killed": 5,
    "decode killed": 5,
    "server killed": 1,
}
#: How long blocks may stay referenced after a fault.
REFERENCED_S = 2.0


class Faults:
    """A prefill and a decode engine, and what happened to them."""

    def __init__(self, place: Place, server: PegaServer) -> None:
        self._place = place
        self._server = server
        self._chance = random.Random(place.seed)
        self._spares: dict[str, list[EngineProcess]] = {}
        self._names = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.prefill = self._engine(place.devices[-1], "prefill")
        self.decode = self._engine(place.devices[0], "decode")

    def _engine(self, device: str, name: str) -> EngineProcess:
        """An engine in a process that was started before; others are started meanwhile."""
        spares = self._spares.setdefault(device, [])
        while len(spares) < 3:
            spares.append(self._place.process(device))
        self._names += 1
        return engine_of_group(
            self._place, spares.pop(0), device, f"{name}-{self._names}", self._server
        )

    def round(self, number: int, fault: str) -> None:
        sizes, chance = self._place.sizes, self._chance
        count = sizes.blocks // 4
        origins = list(range(number * count, (number + 1) * count))
        source, target = (chance.sample(range(sizes.blocks), count) for _ in range(2))
        self.decode.call("fill", target, origins, 2)
        moment = chance.random() * 2 * COMPUTE_S  # before, in and behind the reads
        abort_s = moment if fault == "abort" else None
        self.decode.begin("follow", "f", origins, target, 1.0, abort_s=abort_s)
        # Without computation: the blocks are overwritten as soon as they are saved.
        compute_s = 0.0 if fault == "overwritten" else COMPUTE_S
        self.prefill.begin("compute_and_save", "f", origins, source, compute_s)
        if fault.endswith("killed"):
            time.sleep(moment)
            victim = {"prefill killed": self.prefill, "decode killed": self.decode}.get(fault)
            (victim or self._server).kill()
        if fault != "decode killed":
            self._check(self.decode.take(), target, origins)
        if fault != "prefill killed":
            saved = self.prefill.take()
            assert saved["blocks"] == count or fault == "server killed", saved
        self.counts[fault] += 1
        if fault == "server killed":
            self._server.start()
            for engine in (self.prefill, self.decode):
                engine.call("wait_ready")
        self._wait_unreferenced()
        if fault == "prefill killed":
            self.prefill = self._engine(self._place.devices[-1], "prefill")
        if fault == "decode killed":
            self.decode = self._engine(self._place.devices[0], "decode")

    def _check(self, loaded: dict, target: list[int], origins: list[int]) -> None:
        failed = set(loaded["failed_blocks"])
        good = [i for i in range(len(target)) if target[i] not in failed]
        assert len(good) == loaded["blocks"], loaded
        self.counts["blocks"] += len(good)
        self.counts["cut short"] += 0 < len(good) < len(target)
        self.counts["direct bytes"] += loaded["direct_bytes"]
        wrong = self.decode.call("wrong", [target[i] for i in good], [origins[i] for i in good])
        assert wrong == [], f"blocks {wrong[:8]} are wrong"

    def _wait_unreferenced(self) -> None:
        def referenced() -> float:
            metrics = self._server.metrics()
            names = ("pegaflow_pins", "pegaflow_claims", "pegaflow_direct_reads")
            return sum(metrics.total(name) for name in names)

        begin = time.monotonic()
        wait_until(lambda: referenced() == 0, "blocks or reads stay referenced", REFERENCED_S)
        self.counts["slowest release, ms"] = max(
            self.counts["slowest release, ms"], int((time.monotonic() - begin) * 1e3)
        )


def direct_faults(place: Place) -> str:
    """Loads are aborted and blocks overwritten, engines and the server killed while one engine
    reads the other: no wrong byte, every load is reported, and no block stays referenced."""
    with place.server(2 * place.sizes.blocks) as server:
        faults = Faults(place, server)
        chance = random.Random(place.seed + 1)
        for number in range(place.sizes.faults):
            (fault,) = chance.choices(list(FAULTS), list(FAULTS.values()))
            try:
                faults.round(number, fault)
            except Exception as error:
                raise AssertionError(f"round {number}, {fault}: {error}") from error
        counts = faults.counts
        assert counts["direct bytes"] > 0, "nothing was read directly"
    gib = counts.pop("direct bytes") / (1 << 30)
    said = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f"{place.sizes.faults} faults, {gib:.1f} GiB read directly, every byte right: {said}"
