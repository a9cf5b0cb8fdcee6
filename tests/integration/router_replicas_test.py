"""Several routers share what they place and learn; one that is lost or cut off is only slower."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import sys
import time
import unittest
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

import zmtp
from kv_engine import KvEngine
from router_case import RouterTest
from router_process import PATIENCE_S, Router


class Cable:
    """A TCP proxy in front of one router's --replica-listen, which the test can cut."""

    def __init__(self) -> None:
        self.target = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._mended = asyncio.Event()
        self._mended.set()

    async def start(self) -> Cable:
        self._server = await asyncio.start_server(self._serve, sock=self._listener)
        return self

    def cut(self) -> None:
        """Nothing passes from now on, and no connection ends by it."""
        self._mended.clear()

    def mend(self) -> None:
        self._mended.set()

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._mended.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._mended.wait()
            # No router listens there yet, or it has ended.
            with contextlib.suppress(ConnectionError):
                there = await asyncio.open_connection("127.0.0.1", self.target)
                try:
                    await asyncio.gather(
                        self._carry(reader, there[1]), self._carry(there[0], writer)
                    )
                finally:
                    there[1].close()
        finally:
            self._tasks.discard(task)
            writer.close()


def prompt_of(name: str, size: int = 4000) -> str:
    return "".join(f"{name} says {i}, " for i in range(size // 8))[:size]


class Replicas(RouterTest):
    def secret(self, text: str = "0123456789abcdef-example\n") -> str:
        path = self.scratch() / "secret"
        path.write_text(text)
        os.chmod(path, 0o600)
        return str(path)

    async def kv_engines(self, count: int) -> list[KvEngine]:
        engines = [await KvEngine().start() for _ in range(count)]
        for engine in engines:
            self.stack.push_async_callback(engine.stop)
        return engines

    async def cables(self, count: int) -> list[Cable]:
        cables = [await Cable().start() for _ in range(count)]
        for cable in cables:
            self.stack.push_async_callback(cable.stop)
        return cables

    async def replica(
        self, engines: list[KvEngine], others: list[int], secret: str, cable: Cable | None = None
    ) -> Router:
        ready = self.scratch() / "ready"
        words = [word for e in engines for word in ("--decode", e.url)]
        words += [word for port in others for word in ("--replicas", f"127.0.0.1:{port}")]
        router = await Router.start(
            *words, "--replica-listen", "127.0.0.1:0", "--peer-secret-file", secret,
            "--ready-file", str(ready), "--health-interval", "200ms",
        )  # fmt: skip
        self.stack.push_async_callback(router.stop)
        told = json.loads(ready.read_text())
        if cable is not None:
            cable.target = int(told["replica_listen"].rsplit(":", 1)[1])
        await self.wait_for_health(
            router, lambda kv: all(s["events"] in ("exact", "partial") for s in kv["sources"])
        )
        return router

    async def kv(self, router: Router) -> dict[str, Any]:
        return (await router.get("/health")).json["kv_aware"]

    async def wait_for_health(
        self, router: Router, wanted: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while not wanted(kv := await self.kv(router)):
            assert time.monotonic() < end, (kv, "".join(router.log))
            await asyncio.sleep(0.01)
        return kv

    async def wait_for_states(self, router: Router, *states: str) -> dict[str, Any]:
        return await self.wait_for_health(
            router, lambda kv: sorted(r["state"] for r in kv["replicas"]) == sorted(states)
        )

    async def fleet(self, engines: list[KvEngine], count: int) -> tuple[list[Router], list[Cable]]:
        """Routers of which each has the addresses of all, its own included."""
        cables = await self.cables(count)
        secret = self.secret()
        ports = [cable.port for cable in cables]
        routers = [await self.replica(engines, ports, secret, cable) for cable in cables]
        for router in routers:
            await self.wait_for_states(router, "self", *["live"] * (count - 1))
        return routers, cables

    async def post(self, router: Router, prompt: str) -> int:
        reply = await router.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        return reply.status

    async def placed_elsewhere(self, router: Router) -> int:
        return sum(r["placements"] for r in (await self.kv(router))["replicas"])

    async def test_requests_through_two_routers_do_not_stack_on_one_engine(self) -> None:
        engines = await self.kv_engines(8)
        routers, _ = await self.fleet(engines, 2)
        for engine in engines:
            engine.may_answer.clear()
        pending = []
        for i in range(8):
            before = await self.placed_elsewhere(routers[1 - i % 2])
            pending.append(asyncio.create_task(self.post(routers[i % 2], prompt_of(f"user {i}"))))
            await self.wait_for_health(
                routers[1 - i % 2],
                lambda kv, n=before: sum(r["placements"] for r in kv["replicas"]) > n,
            )
        self.assertEqual([len(e.prompts) for e in engines], [1] * 8)
        # The same prompt follows the first one, through either router.
        for router in routers:
            pending.append(asyncio.create_task(self.post(router, prompt_of("user 0"))))
        first = next(e for e in engines if prompt_of("user 0") in e.prompts)
        await first.http.wait_for(3)
        for engine in engines:
            engine.may_answer.set()
        self.assertEqual(await asyncio.gather(*pending), [200] * 10)

    async def test_one_of_two_routers_waits_for_its_turn(self) -> None:
        engines = await self.kv_engines(2)
        routers, _ = await self.fleet(engines, 2)
        # The other router has placed nothing, so each request of the later one waits.
        for number, router in enumerate(routers):
            for i in range(20):
                prompt = prompt_of(f"user {number} {i}", 16 << 10)
                self.assertEqual(await self.post(router, prompt), 200)
        waits = sorted([(await r.metrics())["turn_wait_seconds_count"] for r in routers])
        self.assertEqual(waits[0], 0)
        self.assertGreater(waits[1], 0)

    async def test_a_killed_and_a_stopped_router_fail_no_request_of_the_third(self) -> None:
        engines = await self.kv_engines(2)
        routers, _ = await self.fleet(engines, 3)
        statuses: list[list[int | str]] = [[], [], []]
        is_over = False

        async def load(number: int, client: int) -> None:
            turn = 0
            while not is_over:
                turn += 1
                prompt = prompt_of(f"client {number} {client}", 500 + 300 * (turn % 8))
                try:
                    statuses[number].append(await self.post(routers[number], prompt))
                except (ConnectionError, asyncio.IncompleteReadError) as error:
                    statuses[number].append(str(error))
                    return
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(load(n, c)) for n in range(3) for c in range(3)]
        await self.wait_for_health(
            routers[0], lambda kv: sum(r["placements"] for r in kv["replicas"]) > 50
        )
        routers[1].signal(signal.SIGKILL)
        routers[2].signal(signal.SIGSTOP)
        await routers[2].wait_until_stopped()
        sent = len(statuses[0])
        kv = await self.wait_for_states(routers[0], "self", "silent", "silent")
        for replica in kv["replicas"]:
            if replica["state"] == "silent":
                self.assertEqual(replica["reason"], "no heartbeat for 5 s")
        self.assertEqual((await routers[0].get("/health")).json["status"], "degraded")
        self.assertGreater(len(statuses[0]), sent + 50)
        routers[2].signal(signal.SIGCONT)
        await self.wait_for_states(routers[0], "self", "silent", "live")
        is_over = True
        await asyncio.gather(*tasks)
        self.assertEqual(set(statuses[0]), {200})
        self.assertEqual(set(statuses[2]), {200})
        # Each of its clients lost the request that was open.
        self.assertLessEqual(sum(s != 200 for s in statuses[1]), 3)

    async def test_routers_that_are_cut_off_go_on_alone_and_find_each_other_again(self) -> None:
        engines = await self.kv_engines(2)
        routers, cables = await self.fleet(engines, 2)
        for cable in cables:
            cable.cut()
        await self.wait_for_states(routers[0], "self", "silent")
        for i, router in enumerate(routers * 4):
            self.assertEqual(await self.post(router, prompt_of(f"alone {i}")), 200)
        before = await self.placed_elsewhere(routers[0])
        for cable in cables:
            cable.mend()
        await self.wait_for_states(routers[0], "self", "live")
        await self.wait_for_states(routers[1], "self", "live")
        self.assertEqual(await self.post(routers[1], prompt_of("together")), 200)
        await self.wait_for_health(
            routers[0], lambda kv: sum(r["placements"] for r in kv["replicas"]) > before
        )

    async def test_a_new_router_sends_old_conversations_where_their_cache_is(self) -> None:
        await self.start_beside_another(has_history=True)

    async def test_a_new_router_knows_blocks_that_engines_no_longer_replay(self) -> None:
        await self.start_beside_another(has_history=False)

    async def start_beside_another(self, has_history: bool) -> None:
        engines = await self.kv_engines(4)
        secret = self.secret()
        cables = await self.cables(2)
        ports = [cable.port for cable in cables]
        first = await self.replica(engines, ports, secret, cables[0])
        names = [f"conversation {i}" for i in range(8)]
        for name in names:
            self.assertEqual(await self.post(first, prompt_of(name)), 200)
        await self.wait_for_health(first, lambda kv: kv["texts"] == 8)
        owner = {n: e for n in names for e in engines if prompt_of(n) in e.prompts}

        if not has_history:
            for engine in engines:
                engine.forget_history()
        second = await self.replica(engines, ports, secret, cables[1])
        await self.wait_for_health(second, lambda kv: kv["snapshot"]["state"] == "done")
        kv = await self.kv(second)
        self.assertEqual((kv["texts"], kv["snapshot"]["texts"]), (8, 8))
        # Engines that have published one batch or none have a whole history all the same.
        longer = sum(len(e.prompts) > 1 for e in engines)
        self.assertEqual(kv["snapshot"]["engines"], 0 if has_history else longer)
        self.assertGreater(longer, 0)
        for name in names:
            before = len(owner[name].cached)
            self.assertEqual(await self.post(second, prompt_of(name) + "and more"), 200)
            self.assertEqual(len(owner[name].cached), before + 1, name)
            self.assertEqual(owner[name].cached[-1], 4000 // 64 * 16)
        # A lesson of the second one reaches the first.
        self.assertEqual(await self.post(second, prompt_of("another")), 200)
        await self.wait_for_health(first, lambda kv: kv["texts"] >= 9)

    async def test_a_snapshot_needs_the_secret(self) -> None:
        engines = await self.kv_engines(1)
        (cable,) = await self.cables(1)
        router = await self.replica(engines, [cable.port], self.secret(), cable)
        target = "/index/snapshot?" + "a" * 32
        self.assertEqual((await router.get(target)).status, 401)
        alone = await self.router("--decode", engines[0].url)
        self.assertEqual((await alone.get(target)).status, 404)

    async def test_garbage_foreign_and_repeated_messages_are_ignored_and_counted(self) -> None:
        engines = await self.kv_engines(1)
        stranger = await zmtp.Publisher().start()
        self.stack.push_async_callback(stranger.stop)
        cables = await self.cables(2)
        router = await self.replica(engines, [stranger.port], self.secret())
        await stranger.wait_for_subscribers(1)

        async def refused(**wanted: int) -> None:
            await self.wait_for_health(
                router,
                lambda kv: all(kv["replicas"][0]["refused"][k] == v for k, v in wanted.items()),
            )

        await stranger.send(b"")
        await stranger.send(b"garbage" * 100)
        await stranger.send(b"PFR1", b"two frames")
        await refused(malformed=3)
        other = await self.replica(
            engines, [cables[0].port], self.secret("another secret of 32 bytes\n"), cables[0]
        )
        await stranger.send(await self.heard(cables[0]))
        await refused(foreign=1)
        kv = await self.kv(router)
        self.assertEqual(kv["replicas"][0]["state"], "connecting")
        self.assertIn("secret", kv["replicas"][0]["reason"])
        await other.terminate()

        await self.replica(engines, [cables[1].port], self.secret(), cables[1])
        good = await self.heard(cables[1])
        await stranger.send(good)
        await self.wait_for_states(router, "live")
        await stranger.send(good)
        await stranger.send(good)
        await refused(repeated=2)
        # A frame above the limit ends the connection, which is made anew.
        await stranger.send(bytes(2_000_000))
        self.assertEqual(await self.post(router, prompt_of("still here")), 200)

    async def test_after_many_subscriptions_of_a_stranger_the_port_is_opened_anew(self) -> None:
        engines = await self.kv_engines(1)
        routers, cables = await self.fleet(engines, 2)
        _, writer = await zmtp.subscribe(cables[0].target)
        for i in range(1001):
            writer.write(zmtp.frame(b"\x01" + i.to_bytes(40, "big")))
        await writer.drain()
        await routers[0].wait_for_line("strangers subscribe")
        writer.close()
        # Both still share what they place, once they are connected again.
        end = time.monotonic() + PATIENCE_S
        known = await self.placed_elsewhere(routers[1])
        while await self.placed_elsewhere(routers[1]) == known:
            self.assertLess(time.monotonic(), end)
            self.assertEqual(await self.post(routers[0], prompt_of("still here")), 200)

    async def heard(self, cable: Cable) -> bytes:
        """A message of the router behind the cable."""
        reader, writer = await zmtp.subscribe(cable.port)
        try:
            return await asyncio.wait_for(zmtp.receive(reader, writer), PATIENCE_S)
        finally:
            writer.close()

    async def test_options_that_would_let_strangers_in_are_refused(self) -> None:
        engine = "http://127.0.0.1:1"
        for options, words in (
            (("--replicas", "10.0.0.1:1", "--replica-listen", "127.0.0.1:0"), "peer-secret-file"),
            (("--replicas", "127.0.0.1:1", "--replica-listen", "0.0.0.0:0"), "peer-secret-file"),
            (("--replicas", "dns://r:1", "--replica-listen", "127.0.0.1:0"), "peer-secret-file"),
            (("--replicas", "127.0.0.1:1"), "--replica-listen"),
            (("--replica-listen", "127.0.0.1:0"), "--replicas"),
            (("--replicas", "127.0.0.1", "--replica-listen", "127.0.0.1:0"), "HOST:PORT"),
        ):
            process = await asyncio.create_subprocess_exec(
                os.environ["PEGA_BUILD_DIR"] + "/router/pegaflow-router",
                "--listen", "127.0.0.1:0", "--decode", engine, *options,
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, text = await asyncio.wait_for(process.communicate(), PATIENCE_S)
            self.assertEqual(process.returncode, 1, options)
            self.assertIn(words, text.decode())


if __name__ == "__main__":
    unittest.main()
