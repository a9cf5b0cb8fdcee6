"""Requests that the router sends to a decode engine together with their prefill (--flow auto)."""

import asyncio
import json
import os
import pathlib
import signal
import sys
import unittest
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from router_process import Client, Router
from streaming_engine import (
    WHOLE_STREAM,
    Answer,
    Behavior,
    Request,
    StreamingEngine,
    die,
    fail_with_status,
    report_no_params,
    send_garbage,
    serve_normally,
    wait_for_leaving,
)

LONG = "eins zwei drei " * 200  # Beyond --min-prefill-tokens.
PROMPT = {"prompt": LONG, "stream": True}
NODE, LIFE = "0123456789abcdef" * 2, "fedcba9876543210" * 2


def is_early(request: Request) -> bool:
    ours = (request.json.get("kv_transfer_params") or {}).get("pegaflow", {})
    return "wait_ms" in ours


def reported(job: int = 7, life: str = LIFE, **more: Any) -> dict[str, Any]:
    return {"pegaflow": {"node": NODE, "incarnation": life, "job": job, "tokens": 99} | more}


class PrefillEngine:
    """Announces blocks, and answers when `may_answer` is set, or behaves as `then`."""

    def __init__(self) -> None:
        self.params = reported(early=True)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.then: Behavior | None = None

    async def __call__(self, request: Request, answer: Answer) -> None:
        if not request.is_prefill:
            return await serve_normally(request, answer)
        leaves = asyncio.create_task(request.gone.wait())
        answers = asyncio.create_task(self.may_answer.wait())
        await asyncio.wait((leaves, answers), return_when=asyncio.FIRST_COMPLETED)
        for task in (leaves, answers):
            task.cancel()
        if request.gone.is_set():
            return None
        if self.then is not None:
            return await self.then(request, answer)
        return await answer.whole(json.dumps({"kv_transfer_params": self.params}).encode())


class DecodeEngine:
    """Responds to requests that came with their prefill when `may_answer` is set, and to others at
    once. With `head_first` the head is sent before, as vLLM does.
    """

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.head_first = False
        self.then: Behavior = serve_normally

    async def __call__(self, request: Request, answer: Answer) -> None:
        if request.target in ("/health", "/v1/models") or not is_early(request):
            return await serve_normally(request, answer)
        if self.head_first:
            await answer.begin_stream()
        leaves = asyncio.create_task(request.gone.wait())
        answers = asyncio.create_task(self.may_answer.wait())
        await asyncio.wait((leaves, answers), return_when=asyncio.FIRST_COMPLETED)
        for task in (leaves, answers):
            task.cancel()
        if not request.gone.is_set():
            await self.then(request, answer)
        return None


class Early(RouterTest):
    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        self.prefill, self.decode = PrefillEngine(), DecodeEngine()
        self.p = await self.engine(self.prefill)
        self.d = await self.engine(self.decode)

    async def taught(
        self,
        *options: str,
        p: list[StreamingEngine] | None = None,
        d: list[StreamingEngine] | None = None,
    ) -> Router:
        """A router that has one answer of the prefill engine."""
        router = await self.router("--flow", "auto", *options, p=p or [self.p], d=d or [self.d])
        self.assertEqual((await router.post("/v1/completions", PROMPT)).body, WHOLE_STREAM)
        for engine in (*(p or [self.p]), *(d or [self.d])):
            engine.requests.clear()
        self.prefill.may_answer.clear()
        return router

    async def sent(self, client: Client, body: dict[str, Any] = PROMPT) -> tuple[Request, Request]:
        """Sends a request, which arrives at both engines while the prefill is computed."""
        await client.post("/v1/completions", body)
        to_p, to_d = await self.p.wait_for(1), await self.d.wait_for(1)
        self.assertTrue(to_p.is_prefill)
        self.assertTrue(is_early(to_d))
        return to_p, to_d

    async def handovers(self, router: Router) -> dict[str, int]:
        """All but the one that the router has learned from, and those that are 0."""
        await self.all_is_over(router)
        metrics = await router.metrics()
        names = ("serial", "early", "withdrawn", "late")
        counts = {name: int(metrics[f'handover_total{{result="{name}"}}']) for name in names}
        counts["serial"] -= 1
        return {name: count for name, count in counts.items() if count}

    # -- both legs at once

    async def test_both_engines_receive_the_request_at_once(self) -> None:
        router = await self.taught()
        async with router.client() as client:
            to_p, to_d = await self.sent(client)
            self.assertEqual(to_p.json["kv_transfer_params"], {"pegaflow": {"save_tail": True}})
            ours = to_d.json["kv_transfer_params"]["pegaflow"]
            # 30 s for a short prompt, a second for each 1,000 tokens, and 2 s to load it.
            self.assertGreater(ours.pop("wait_ms"), 32_000)
            self.assertEqual(ours, {"node": NODE, "incarnation": LIFE, "job": 8, "tokens": 0})
            body = to_d.json
            del body["kv_transfer_params"]
            self.assertEqual(body, PROMPT)
            self.prefill.may_answer.set()
            await router.wait_for_metrics(lambda m: m['leg_seconds_count{role="prefill"}'] == 2)
            self.decode.may_answer.set()
            reply = await client.reply()
        self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))
        self.assertEqual(await self.handovers(router), {"early": 1})
        self.assertEqual((len(self.p.requests), len(self.d.requests)), (1, 1))
        metrics = await router.metrics()
        self.assertEqual(metrics['prefill_total{reason="done"}'], 2)
        self.assertEqual(metrics['handover_added_seconds_count{result="early"}'], 1)
        await router.wait_for_line(r"prefill=done legs=early p=http\S+ d=http\S+ p_ms=\d")

    async def test_some_requests_are_sent_one_leg_after_the_other(self) -> None:
        router = await self.taught()
        self.prefill.may_answer.set()
        for body in ({"prompt": LONG}, PROMPT | {"stream": False}):
            self.assertEqual((await router.post("/v1/completions", body)).status, 200)
        self.assertEqual((await router.post("/v1/completions", {"prompt": "hi"})).status, 200)
        self.assertFalse(any(is_early(request) for request in self.d.requests))
        self.assertEqual(await self.handovers(router), {"serial": 2})

    async def test_the_engines_decide_whether_requests_are_early(self) -> None:
        for params in (
            reported(),
            reported(early=False),
            reported(early="true"),
            reported(early=True, node="n-1"),
            reported(early=True, incarnation=None),
            reported(early=True, job=-1),
            reported(early=True, job=1.5),
            {"pegaflow": {}},
        ):
            with self.subTest(params=params):
                self.prefill.params = params
                router = await self.taught()
                self.prefill.may_answer.set()
                reply = await router.post("/v1/completions", PROMPT)
                self.assertEqual(reply.body, WHOLE_STREAM)
                self.assertFalse(any(is_early(request) for request in self.d.requests))
                await router.stop()

    async def test_with_the_store_flow_one_leg_follows_the_other(self) -> None:
        router = await self.router("--flow", "store", p=[self.p], d=[self.d])
        for _ in range(3):
            self.assertEqual((await router.post("/v1/completions", PROMPT)).body, WHOLE_STREAM)
        self.assertFalse(any(is_early(request) for request in self.d.requests))
        self.assertEqual(await self.handovers(router), {"serial": 2})

    async def test_the_last_job_of_an_engines_life_counts(self) -> None:
        router = await self.taught()
        self.decode.may_answer.set()
        self.prefill.may_answer.set()
        # A prompt that was cached has no job, and answers may overtake each other.
        for job, life, told in ((0, LIFE, 8), (12, LIFE, 8), (9, LIFE, 13), (3, NODE, 13)):
            self.prefill.params = reported(job, life, early=True)
            self.d.requests.clear()
            await router.post("/v1/completions", PROMPT)
            self.assertEqual(self.d.requests[0].json["kv_transfer_params"]["pegaflow"]["job"], told)
        self.d.requests.clear()
        await router.post("/v1/completions", PROMPT)
        ours = self.d.requests[0].json["kv_transfer_params"]["pegaflow"]
        self.assertEqual((ours["incarnation"], ours["job"]), (NODE, 4))

    # -- the prefill fails

    async def test_after_any_failure_of_the_prefill_the_decode_engine_gets_the_body_again(
        self,
    ) -> None:
        for reason, behavior, user in (
            ("status", fail_with_status, "500"),
            ("status", fail_with_status, "400"),
            ("status", fail_with_status, "503"),
            ("lost", die, ""),
            ("lost", send_garbage, ""),
            ("no_params", report_no_params, ""),
            ("timeout", wait_for_leaving, ""),
        ):
            for head_first in (False, True):
                with self.subTest(reason=reason, user=user, head_first=head_first):
                    self.prefill.then, self.decode.head_first = None, head_first
                    self.prefill.may_answer.set()
                    limit = ["--prefill-timeout", "300ms"] if reason == "timeout" else []
                    router = await self.taught(*limit)
                    self.prefill.then = behavior
                    body = PROMPT | {"user": user}
                    async with router.client() as client:
                        _, to_d = await self.sent(client, body)
                        self.prefill.may_answer.set()
                        reply = await client.reply()
                        await asyncio.wait_for(to_d.gone.wait(), 20)
                    self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))
                    self.assertEqual(len(self.d.requests), 2)
                    self.assertEqual(self.d.requests[1].json, body)
                    self.assertEqual(await self.handovers(router), {"withdrawn": 1})
                    metrics = await router.metrics()
                    self.assertEqual(metrics[f'prefill_total{{reason="{reason}"}}'], 1)
                    self.assertEqual(metrics["cancelled_legs_total"], 0)
                    self.assertEqual(
                        metrics[f'engine_failures_total{{role="decode",engine="{self.d.url}"}}'], 0
                    )
                    await router.stop()

    async def test_a_prefill_engine_that_refuses_is_forgotten(self) -> None:
        router = await self.taught("--health-interval", "30s")
        await self.p.stop()
        reply = await router.post("/v1/completions", PROMPT)
        self.assertEqual((reply.status, reply.body), (200, WHOLE_STREAM))
        self.assertEqual(await self.handovers(router), {"withdrawn": 1})
        metrics = await router.metrics()
        self.assertEqual(metrics['prefill_total{reason="refused"}'], 1)
        # It may be another process when it is back.
        self.assertFalse(is_early(self.d.requests[-1]))
        self.d.requests.clear()
        await self.p.start()
        self.prefill.may_answer.set()
        for early in (False, True):
            self.decode.may_answer.set()
            self.assertEqual((await router.post("/v1/completions", PROMPT)).body, WHOLE_STREAM)
            self.assertEqual(is_early(self.d.requests[-1]), early)

    async def test_a_prefill_engine_that_was_down_is_forgotten(self) -> None:
        router = await self.taught("--health-interval", "20ms")
        up = f'engine_up{{role="prefill",engine="{self.p.url}"}}'
        for is_healthy in (False, True):
            self.p.is_healthy = is_healthy
            await router.wait_for_metrics(lambda m, wanted=is_healthy: m[up] == wanted)
        self.prefill.may_answer.set()
        self.decode.may_answer.set()
        for early in (False, True):
            self.assertEqual((await router.post("/v1/completions", PROMPT)).body, WHOLE_STREAM)
            self.assertEqual(is_early(self.d.requests[-1]), early)

    async def test_a_prefill_engine_that_goes_down_is_not_waited_for(self) -> None:
        router = await self.taught("--health-interval", "20ms")
        async with router.client() as client:
            _, to_d = await self.sent(client)
            self.p.is_healthy = False
            reply = await client.reply()
            await asyncio.wait_for(to_d.gone.wait(), 20)
        self.assertEqual(reply.body, WHOLE_STREAM)
        self.assertEqual(await self.handovers(router), {"withdrawn": 1})
        self.assertEqual((await router.metrics())['prefill_total{reason="engine_down"}'], 1)

    async def test_another_prefill_engine_is_tried(self) -> None:
        other = PrefillEngine()
        other.params = reported(30, NODE, early=True)
        p2 = await self.engine(other)
        router = await self.taught("--prefill-policy", "round-robin", p=[self.p, p2])
        await router.post("/v1/completions", PROMPT)  # The other one's turn.
        p2.requests.clear()
        self.d.requests.clear()

        self.prefill.then = die
        async with router.client() as client:
            await self.sent(client)
            self.prefill.may_answer.set()
            reply = await client.reply()
        self.assertEqual(reply.body, WHOLE_STREAM)
        self.assertEqual(len(p2.requests), 1)
        self.assertEqual(self.d.requests[1].json["kv_transfer_params"], other.params)
        metrics = await router.metrics()
        self.assertEqual(metrics['retries_total{role="prefill"}'], 1)

    async def test_a_prefill_that_fails_after_the_response_began_changes_nothing(self) -> None:
        may_end = asyncio.Event()

        async def slowly(request: Request, answer: Answer) -> None:
            await answer.begin_stream()
            await answer.piece(WHOLE_STREAM[:60])
            await may_end.wait()
            await answer.piece(WHOLE_STREAM[60:])
            await answer.end_stream()

        router = await self.taught()
        self.prefill.then, self.decode.then = die, slowly
        async with router.client() as client:
            await self.sent(client)
            self.decode.may_answer.set()
            await client.head()
            begun = await client.chunk()
            self.prefill.may_answer.set()
            await router.wait_for_metrics(lambda m: m['leg_seconds_count{role="prefill"}'] == 2)
            may_end.set()
            body = begun or b""
            while chunk := await client.chunk():
                body += chunk
        self.assertEqual(body, WHOLE_STREAM)
        self.assertEqual(len(self.d.requests), 1)
        self.assertEqual(await self.handovers(router), {"early": 1})
        metrics = await router.metrics()
        self.assertEqual(metrics['prefill_total{reason="lost"}'], 1)
        # Nothing was handed over.
        self.assertEqual(metrics['handover_added_seconds_count{result="early"}'], 0)

    # -- the decode engine fails, or is late, or early

    async def test_a_decode_engine_that_is_late_gets_the_request_again(self) -> None:
        for head_first in (False, True):
            self.decode.head_first = head_first
            self.prefill.may_answer.set()
            router = await self.taught()
            async with router.client() as client:
                _, to_d = await self.sent(client)
                self.prefill.may_answer.set()
                reply = await client.reply()
                await asyncio.wait_for(to_d.gone.wait(), 20)
            self.assertEqual(reply.body, WHOLE_STREAM)
            # The leg that was withdrawn has no time.
            metrics = await router.metrics()
            self.assertEqual(metrics['leg_seconds_count{role="decode"}'], 2)
            self.assertEqual(self.d.requests[1].json["kv_transfer_params"], self.prefill.params)
            self.assertEqual(await self.handovers(router), {"late": 1})
            await router.wait_for_line(r"did not respond within \d+\.\d s after the prefill")
            # The next requests are sent one leg after the other.
            self.assertEqual((await router.post("/v1/completions", PROMPT)).body, WHOLE_STREAM)
            self.assertFalse(is_early(self.d.requests[2]))
            await router.stop()

    async def test_another_decode_engine_gets_the_same_body(self) -> None:
        async def status(request: Request, answer: Answer) -> None:
            await answer.whole(b"{}", 500)

        d2 = await self.engine()
        router = await self.taught("--decode-policy", "round-robin", d=[self.d, d2])
        await router.post("/v1/completions", {"prompt": "hi"})  # The other one's turn.
        d2.requests.clear()
        self.decode.then = status
        async with router.client() as client:
            _, to_d = await self.sent(client)
            self.decode.may_answer.set()
            reply = await client.reply()
            self.prefill.may_answer.set()
        self.assertEqual(reply.body, WHOLE_STREAM)
        self.assertEqual(d2.requests[0].body, to_d.body)
        self.assertEqual(len(self.p.requests), 1)
        self.assertEqual(await self.handovers(router), {"early": 1})

    async def test_after_a_withdrawal_an_engine_that_failed_before_is_the_last_choice(self) -> None:
        async def status(request: Request, answer: Answer) -> None:
            await answer.whole(b"{}", 500)

        d2 = await self.engine(DecodeEngine())
        router = await self.taught("--decode-policy", "round-robin", d=[self.d, d2])
        await router.post("/v1/completions", {"prompt": "hi"})  # The other one's turn.
        d2.requests.clear()
        self.decode.then, self.prefill.then = status, die
        async with router.client() as client:
            await self.sent(client)
            self.decode.may_answer.set()
            await d2.wait_for(1)
            await router.post("/v1/completions", {"prompt": "hi"})  # The failing one is next.
            self.prefill.may_answer.set()
            reply = await client.reply()
        self.assertEqual(reply.body, WHOLE_STREAM)
        self.assertEqual((len(self.d.requests), len(d2.requests)), (1, 3))
        self.assertEqual(await self.handovers(router), {"withdrawn": 1})

    async def test_a_response_that_ends_first_ends_the_prefill(self) -> None:
        async def rejects(request: Request, answer: Answer) -> None:
            await answer.whole(b'{"error":"no"}', 400)

        for behavior, status in ((serve_normally, 200), (rejects, 400)):
            router = await self.taught()
            self.decode.then = behavior
            self.decode.may_answer.set()
            async with router.client() as client:
                to_p, _ = await self.sent(client)
                self.assertEqual((await client.reply()).status, status)
                await asyncio.wait_for(to_p.gone.wait(), 20)
                # The connection serves the next request.
                self.prefill.may_answer.set()
                await client.post("/v1/completions", PROMPT)
                self.assertEqual((await client.reply()).status, status)
            self.assertEqual(await self.handovers(router), {"early": 2})
            metrics = await router.metrics()
            self.assertEqual(metrics['prefill_total{reason="unneeded"}'], 1)
            self.assertEqual(
                metrics[f'engine_failures_total{{role="prefill",engine="{self.p.url}"}}'], 0
            )
            await router.stop()

    async def test_a_request_in_the_queue_is_not_late(self) -> None:
        router = await self.taught("--max-decode-inflight", "1", "--queue-timeout", "30s")
        blocked = asyncio.Event()

        async def block(request: Request, answer: Answer) -> None:
            await blocked.wait()
            await serve_normally(request, answer)

        normal = self.d.behavior
        self.d.behavior = block
        async with router.client() as first, router.client() as second:
            await first.post("/v1/completions", {"prompt": "hi"})
            await self.d.wait_for(1)
            await second.post("/v1/completions", PROMPT)
            await self.p.wait_for(1)
            self.prefill.may_answer.set()
            await router.wait_for_metrics(
                lambda m: m["queue_length"] == 1 and m['leg_seconds_count{role="prefill"}'] == 2
            )
            self.d.behavior = normal
            # For longer than a decode engine may take after the prefill.
            loop = asyncio.get_running_loop()
            loop.call_later(3.5, blocked.set)
            self.assertEqual((await first.reply()).status, 200)
            await self.d.wait_for(2)
            loop.call_later(1, self.decode.may_answer.set)
            self.assertEqual((await second.reply()).body, WHOLE_STREAM)
        self.assertTrue(is_early(self.d.requests[1]))
        self.assertEqual(await self.handovers(router), {"early": 1})

    async def test_a_late_request_keeps_its_place_when_no_other_is_free(self) -> None:
        router = await self.taught("--max-decode-inflight", "1", "--queue-timeout", "30s")
        async with router.client() as first, router.client() as second:
            _, to_d = await self.sent(first)
            await second.post("/v1/completions", {"prompt": "hi"})
            await router.wait_for_metrics(lambda m: m["queue_length"] == 1)
            self.prefill.may_answer.set()
            # For longer than a decode engine may take after the prefill.
            with self.assertRaises(TimeoutError):
                await asyncio.wait_for(to_d.gone.wait(), 3.5)
            self.decode.may_answer.set()
            self.assertEqual((await first.reply()).body, WHOLE_STREAM)
            self.assertEqual((await second.reply()).status, 200)
        self.assertEqual(len(self.d.requests), 2)
        self.assertEqual(await self.handovers(router), {"early": 1})

    async def test_a_late_request_is_sent_again_before_the_answer_timeout(self) -> None:
        router = await self.taught("--answer-timeout", "1800ms")
        async with router.client() as client:
            await self.sent(client)
            self.prefill.may_answer.set()
            self.assertEqual((await client.reply()).body, WHOLE_STREAM)
        self.assertEqual(await self.handovers(router), {"late": 1})

    async def test_a_prefill_that_fails_while_the_request_is_in_the_queue(self) -> None:
        router = await self.taught("--max-decode-inflight", "1", "--queue-timeout", "30s")
        blocked = asyncio.Event()

        async def block(request: Request, answer: Answer) -> None:
            await blocked.wait()
            await serve_normally(request, answer)

        self.d.behavior = block
        self.prefill.then = die
        async with router.client() as first, router.client() as second:
            await first.post("/v1/completions", {"prompt": "hi"})
            await self.d.wait_for(1)
            await second.post("/v1/completions", PROMPT)
            await router.wait_for_metrics(lambda m: m["queue_length"] == 1)
            self.prefill.may_answer.set()
            await router.wait_for_metrics(lambda m: m['leg_seconds_count{role="prefill"}'] == 2)
            blocked.set()
            self.assertEqual((await first.reply()).status, 200)
            self.assertEqual((await second.reply()).body, WHOLE_STREAM)
        self.assertEqual(self.d.requests[1].json, PROMPT)
        self.assertEqual(await self.handovers(router), {"withdrawn": 1})

    # -- the client leaves

    async def test_a_client_that_leaves_ends_both_legs(self) -> None:
        router = await self.taught()
        async with router.client() as client:
            to_p, to_d = await self.sent(client)
        await asyncio.wait_for(to_p.gone.wait(), 20)
        await asyncio.wait_for(to_d.gone.wait(), 20)
        await self.all_is_over(router)
        self.assertEqual((await router.metrics())["cancelled_legs_total"], 2)

    async def test_a_client_that_leaves_after_the_prefill_ends_the_decode_leg(self) -> None:
        router = await self.taught()
        async with router.client() as client:
            _, to_d = await self.sent(client)
            self.prefill.may_answer.set()
            await router.wait_for_metrics(lambda m: m['leg_seconds_count{role="prefill"}'] == 2)
        await asyncio.wait_for(to_d.gone.wait(), 20)
        await self.all_is_over(router)
        self.assertEqual((await router.metrics())["cancelled_legs_total"], 1)


if __name__ == "__main__":
    os.environ.setdefault("PEGA_TEST_SEED", "1")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    unittest.main()
