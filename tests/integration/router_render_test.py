"""--render at the router: a long unknown prompt becomes token ids once, and no request waits for it
beyond the time limit."""

from __future__ import annotations

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from publishing_engine import BLOCK, PublishingEngine, stored, tokenize
from router_process import Reply, Router
from score_test import ScoreTest, words

#: The time limit of tests that wait for the answer: machines may be busy.
LONG = ("--render-timeout", "20s")


class Render(ScoreTest):
    async def fleet(self, *options: str) -> tuple[list[PublishingEngine], Router]:
        """Two engines, of which the first renders, and a router that knows how they hash."""
        engines = [await self.publishing(), await self.publishing()]
        engines[0].renders = True
        router = await self.router(
            "--health-interval", "50ms", "--render", engines[0].url, "--render-min-bytes", "1kb",
            *options, d=engines,
        )  # fmt: skip
        for engine in engines:
            await engine.wait_for_subscriber()
        await router.wait_for_metrics(
            lambda m: sum(v for k, v in m.items() if k.startswith("engine_models")) == 2
        )
        return engines, router

    async def cached(self, engine: PublishingEngine, router: Router, text: str) -> None:
        """The engine announces the blocks of a text that the router has never seen."""
        tokens = tokenize({"prompt": text})
        await engine.publish(stored(tokens))
        await self.with_blocks(router, len(tokens) // BLOCK)

    async def complete(self, router: Router, text: str) -> Reply:
        reply = await router.post("/v1/completions", {"model": "m", "prompt": text})
        self.assertEqual(reply.status, 200, reply.body)
        return reply

    def rendered(self, engine: PublishingEngine) -> int:
        return sum(r.target.endswith("/render") for r in engine.requests)

    def completed(self, engine: PublishingEngine) -> int:
        return sum(r.target == "/v1/completions" for r in engine.requests)

    async def test_a_long_unknown_prompt_goes_where_its_blocks_are_after_one_call(self) -> None:
        engines, router = await self.fleet(*LONG)
        text = words(0, 800)
        await self.cached(engines[1], router, text)
        for turn in range(4):
            await self.complete(router, text + words(10_000, 100 * turn))
        self.assertEqual([self.completed(e) for e in engines], [0, 4])
        # Nor is a turn rendered that is much longer than all before it.
        await self.complete(router, text + words(20_000, 5000))
        self.assertEqual([self.rendered(e) for e in engines], [1, 0])
        first = next(r for r in engines[1].requests if r.target == "/v1/completions")
        self.assertNotIn("vllm_xargs", first.json)  # There is nothing to learn.
        metrics = await router.metrics()
        self.assertEqual(metrics['renders_total{result="rendered"}'], 1)

    async def test_a_chat_is_rendered_as_a_chat(self) -> None:
        engines, router = await self.fleet(*LONG)
        messages = [{"role": "user", "content": words(0, 800)}]
        tokens = tokenize({"messages": messages})
        await engines[1].publish(stored(tokens))
        await self.with_blocks(router, len(tokens) // BLOCK)
        body = {"model": "m", "messages": messages}
        for _ in range(3):
            self.assertEqual((await router.post("/v1/chat/completions", body)).status, 200)
        asked = [r.target for r in engines[0].requests if r.target.endswith("/render")]
        self.assertEqual(asked, ["/v1/chat/completions/render"])
        sent = [sum(r.target == "/v1/chat/completions" for r in e.requests) for e in engines]
        self.assertEqual(sent, [0, 3])

    async def test_short_known_and_truncated_prompts_and_images_are_not_rendered(self) -> None:
        engines, router = await self.fleet(*LONG)
        await self.cached(engines[1], router, words(0, 64))
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        content = [{"type": "text", "text": words(0, 800)}, image]
        chat = {"model": "m", "messages": [{"role": "user", "content": content}]}
        self.assertEqual((await router.post("/v1/chat/completions", chat)).status, 200)
        await self.complete(router, words(0, 64))
        cut = {"model": "m", "prompt": words(0, 900), "truncate_prompt_tokens": 64}
        self.assertEqual((await router.post("/v1/completions", cut)).status, 200)
        ids = {"model": "m", "prompt": tokenize({"prompt": words(0, 2000)})}
        self.assertEqual((await router.post("/v1/completions", ids)).status, 200)
        self.assertEqual(self.rendered(engines[0]), 0)

    async def test_without_a_way_to_hash_tokens_nothing_is_rendered(self) -> None:
        engines, router = await self.fleet(*LONG)
        await self.complete(router, words(0, 800))  # No engine has announced a block.
        self.assertEqual(self.rendered(engines[0]), 0)

    async def test_an_engine_without_render_is_asked_to_tokenize(self) -> None:
        engines, router = await self.fleet(*LONG)
        engines[0].renders = False
        await self.cached(engines[1], router, words(0, 800))
        await self.complete(router, words(0, 800))
        await self.complete(router, words(20_000, 800))
        asked = [r.target for r in engines[0].requests if r.method == "POST"]
        asked = [target for target in asked if target != "/v1/completions"]
        # The second time it is known to have no /render.
        self.assertEqual(asked, ["/v1/completions/render", "/tokenize", "/tokenize"])
        metrics = await router.metrics()
        self.assertEqual(metrics['renders_total{result="rendered"}'], 2)

    async def test_a_renderer_that_hangs_delays_a_few_requests_and_fails_none(self) -> None:
        engines, router = await self.fleet("--render-timeout", "30ms")
        await self.cached(engines[1], router, words(0, 64))
        engines[0].answers_renders = False
        for i in range(12):
            await self.complete(router, words(10_000 * (i + 1), 800))
        metrics = await router.metrics()
        # Five failures in a row open its breaker: the others are not delayed at all, but for one
        # after two seconds.
        late = metrics['renders_total{result="late"}']
        self.assertIn(late, range(5, 12))
        self.assertEqual(metrics['renders_total{result="busy"}'], 12 - late)
        self.assertEqual(self.rendered(engines[0]), late)
        await self.all_is_over(router)

    async def test_prompts_that_are_too_long_for_the_time_limit_leave_the_others_rendered(
        self,
    ) -> None:
        engines, router = await self.fleet("--render-timeout", "30ms")
        await self.cached(engines[1], router, words(0, 64))
        engines[0].answers_renders = False
        for i in range(7):
            await self.complete(router, words(10_000 * (i + 1), 9000))
        metrics = await router.metrics()
        self.assertEqual(metrics['renders_total{result="late"}'], 7)
        self.assertEqual(metrics['renders_total{result="busy"}'], 0)

    async def test_a_text_that_no_server_had_room_for_is_rendered_with_its_next_turn(self) -> None:
        engines, router = await self.fleet("--render-timeout", "30s", "--render-inflight", "1")
        await self.cached(engines[1], router, words(0, 64))
        engines[0].answers_renders = False
        async with router.client() as client:
            await client.post("/v1/completions", {"model": "m", "prompt": words(10_000, 800)})
            await router.wait_for_metrics(lambda _: self.rendered(engines[0]) == 1)
            await self.complete(router, words(20_000, 800))
            client.leave()
        await self.all_is_over(router)
        engines[0].answers_renders = True
        await self.complete(router, words(20_000, 800) + words(30_000, 2000))
        metrics = await router.metrics()
        self.assertEqual(metrics['renders_total{result="busy"}'], 1)
        self.assertEqual(metrics['renders_total{result="rendered"}'], 1)

    async def test_a_conversation_whose_rendering_failed_costs_no_second_call(self) -> None:
        engines, router = await self.fleet("--render-timeout", "30ms")
        await self.cached(engines[1], router, words(0, 64))
        engines[0].answers_renders = False
        text = words(10_000, 800)
        for turn in range(3):
            await self.complete(router, text + words(20_000, 2000 * turn))
        self.assertEqual(self.rendered(engines[0]), 1)

    async def test_a_client_that_leaves_during_the_rendering_is_not_forwarded(self) -> None:
        engines, router = await self.fleet("--render-timeout", "30s")
        await self.cached(engines[1], router, words(0, 64))
        engines[0].answers_renders = False
        async with router.client() as client:
            await client.post("/v1/completions", {"model": "m", "prompt": words(10_000, 800)})
            await router.wait_for_metrics(lambda _: self.rendered(engines[0]) == 1)
            client.leave()
        await self.all_is_over(router)
        self.assertEqual([self.completed(e) for e in engines], [0, 0])

    async def test_clients_have_their_answers_whatever_a_renderer_answers(self) -> None:
        engines, router = await self.fleet(*LONG)
        await self.cached(engines[1], router, words(0, 64))
        features = b'[{"token_ids":[1,2,3],"features":{"mm_hashes":{"image":["a"]}}}]'
        answers = [
            (200, b"garbage"), (200, b""), (200, b"[]"), (200, b'[{"token_ids":[1,"2"]}]'),
            (200, b'[{"token_ids":[-1]}]'), (200, b'[{"token_ids":[1]},{"token_ids":[2]}]'),
            (200, features), (400, b"{}"), (500, b""),
        ]  # fmt: skip
        for number, answer in enumerate(answers):
            with self.subTest(answer=answer):
                engines[0].rendered = answer
                await self.complete(router, words(10_000 * (number + 1), 800))
        metrics = await router.metrics()
        self.assertEqual(metrics['renders_total{result="failed"}'], len(answers))
        self.assertEqual(metrics['renders_total{result="rendered"}'], 0)
        self.assertEqual(self.rendered(engines[0]), len(answers))

    async def test_several_prompts_are_not_rendered_and_teach_nothing(self) -> None:
        engines, router = await self.fleet(*LONG)
        await self.cached(engines[1], router, words(0, 64))
        two = {"model": "m", "prompt": [words(0, 800), words(0, 900)]}
        self.assertEqual((await router.post("/v1/completions", two)).status, 200)
        self.assertEqual(self.rendered(engines[0]), 0)
        health = (await router.get("/health")).json
        self.assertEqual({s["hashes"] for s in health["kv_aware"]["sources"]} - {"sha256_cbor"},
                         {"not known"})  # fmt: skip


if __name__ == "__main__":
    unittest.main()
