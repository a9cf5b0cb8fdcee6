"""Random requests, aborts, preemptions, resets and server failures; every byte is checked.

PEGA_SOAK_STEPS is the number of random acts for each kind of engine; PEGA_TEST_SEED repeats a run.
"""

import os
import random
import signal

import pytest

from tests.python.early_mover import complete_early
from tests.python.harness import Engine

ACTS = int(os.environ.get("PEGA_SOAK_STEPS", "250"))

KINDS = {
    "plain": {},
    "asynchronous": {"asynchronous": True},
    "v2_asynchronous": {"v2_runner": True, "asynchronous": True},
    "old_release": {"old_release": True},
    "without_prefix_caching": {"enable_prefix_caching": False},
}


class Soak:
    """One engine under random acts."""

    def __init__(self, engine: Engine, server, rng: random.Random) -> None:
        self.engine, self.server, self.rng = engine, server, rng
        self.serial = 0
        self.aborted: set[str] = set()
        # Conversations that grow and share beginnings, as caches serve.
        self.prefixes = [self._tokens(rng.randrange(1, 200)) for _ in range(4)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(10, 1000) for _ in range(count)]

    def act(self) -> None:
        acts = {
            self.request: 30,
            self.some_steps: 40,
            self.abort: 5,
            self.forget: 6,
            self.preempt: 3,
            self.stop: 2,
            self.kill: 1,
            self.reset: 1,
        }
        self.rng.choices(list(acts), list(acts.values()))[0]()

    def request(self) -> None:
        if len(self.engine.scheduler.requests) >= 12:
            return self.some_steps()
        prefix = self.rng.choice(self.prefixes)
        tokens = prefix + self._tokens(self.rng.choice([1, 16, 40, 150]))
        if self.rng.random() < 0.3 and len(tokens) < 350:
            self.prefixes[self.rng.randrange(len(self.prefixes))] = tokens
        self.serial += 1
        salt = self.rng.choice([None, None, None, "a", "b"])
        self.engine.add(f"r{self.serial}", tokens, self.rng.choice([1, 3, 40]), salt=salt)

    def some_steps(self) -> None:
        for _ in range(self.rng.randrange(1, 8)):
            if self.engine.scheduler.has_requests():
                self.engine.step()

    def abort(self) -> None:
        alive = [r for r in self.engine.scheduler.requests.values() if not r.is_finished()]
        if alive:
            victim = self.rng.choice(alive).request_id
            self.aborted.add(victim)
            self.engine.abort(victim)

    def forget(self) -> None:
        if self.rng.random() < 0.5:
            self.engine.run()
        self.engine.scheduler.reset_prefix_cache()  # vLLM may refuse it

    def preempt(self) -> None:
        self.engine.preempt_all()

    def stop(self) -> None:
        """Stops the server for a while."""
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            for _ in range(self.rng.randrange(1, 4)):
                self.some_steps()
        finally:
            os.kill(self.server.pid, signal.SIGCONT)
        self.reconnect()

    def kill(self) -> None:
        self.server.kill()
        self.some_steps()
        self.server.start()
        self.reconnect()

    def reconnect(self) -> None:
        """Usually waits until the cache is back: otherwise it would hardly ever be used."""
        if self.rng.random() < 0.8:
            self.engine.wait_ready()

    def reset(self) -> None:
        self.engine.scheduler.reset_prefix_cache(reset_connector=True)

    def finish(self) -> None:
        self.engine.run()
        for request_id, made in self.engine.answers.items():
            if request_id not in self.aborted:
                made.check()
        self.engine.check_at_rest()


@pytest.mark.parametrize("kind", KINDS)
def test_random_acts(own_pega, seed, kind):
    rng = random.Random(f"{seed}/{kind}")
    # A cache that is too small for the requests, so that vLLM also preempts by itself.
    with Engine(
        own_pega.address, blocks=90, max_model_len=600, patient=False, **KINDS[kind]
    ) as made:
        made.wait_ready()
        soak = Soak(made, own_pega, rng)
        for _ in range(ACTS):
            soak.act()
        soak.finish()
        stats = made.stats
        print(
            f"{kind}: {soak.serial} requests, {made.steps} steps, "
            f"{made.model.checked_tokens} tokens checked, loaded {stats['loaded_blocks']}, "
            f"failed {stats['load_failed_blocks']}, saved {stats['saved_blocks']}"
        )
        assert stats["loaded_blocks"] > 0, "nothing was loaded"


@pytest.mark.parametrize("kind", ["v2_asynchronous", "without_prefix_caching"])
def test_random_acts_with_early_completion_of_loads(own_pega, seed, kind):
    rng = random.Random(f"{seed}/{kind}/early")
    with Engine(
        own_pega.address, blocks=90, max_model_len=600, patient=False, **KINDS[kind]
    ) as made:
        made.wait_ready()
        mover = complete_early(made, rng)
        tokens = list(range(10, 310))
        made.ask("stored", tokens)
        made.reset_local()
        made.ask("loaded", [*tokens, 5])
        assert mover.reported == 1
        mover.reports_every_load = False
        soak = Soak(made, own_pega, rng)
        for _ in range(ACTS):
            soak.act()
        made.run()
        mover.is_at_end = True
        made.worker._worker.collect()  # vLLM has their report, and takes no step for their end
        soak.finish()
        print(f"{kind}: {soak.serial} requests, {made.steps} steps, {mover.reported} early")
