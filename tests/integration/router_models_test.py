"""Requests go to engines that serve their model, and steer no engine."""

import json
import pathlib
import signal
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from router_process import Router
from streaming_engine import Answer, Request, StreamingEngine, serve_normally, wait_for_leaving

LONG = "eins zwei drei " * 200  # Beyond --min-prefill-tokens.


async def ok(request: Request, answer: Answer) -> None:
    await answer.whole(b"{}")


class Models(RouterTest):
    async def serving(self, *models: str) -> StreamingEngine:
        engine = await self.engine()
        engine.models = list(models)
        return engine

    async def known(self, router: Router, *engines: StreamingEngine) -> None:
        def listed(metrics: dict[str, float]) -> bool:
            rows = {k: v for k, v in metrics.items() if k.startswith("engine_models")}
            return all(
                any(v == len(e.models or []) for k, v in rows.items() if e.url in k)
                for e in engines
            )

        await router.wait_for_metrics(listed)

    async def test_a_model_goes_to_the_engines_that_list_it(self) -> None:
        a, b = await self.serving("a", "shared"), await self.serving("b", "shared")
        router = await self.router("--decode-policy", "round-robin", d=[a, b])
        await self.known(router, a, b)
        for path in ("/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"):
            for model, engine in (("a", a), ("b", b)):
                for each in (a, b):
                    each.requests.clear()
                for _ in range(4):
                    reply = await router.post(path, {"model": model, "prompt": "x"})
                    self.assertEqual(reply.status, 200)
                self.assertEqual(len(engine.requests), 4, (path, model))
        for each in (a, b):
            each.requests.clear()
        for _ in range(4):
            await router.post("/v1/completions", {"model": "shared", "prompt": "x"})
        self.assertEqual((len(a.requests), len(b.requests)), (2, 2))
        # A request without a model goes to engines of one model.
        for _ in range(4):
            await router.post("/v1/completions", {"prompt": "x"})
        self.assertEqual((len(a.requests), len(b.requests)), (6, 2))

    async def test_a_form_goes_to_the_engines_that_list_its_model(self) -> None:
        a, b = await self.engine(ok), await self.engine(ok)
        a.models, b.models = ["a"], ["b"]
        router = await self.router("--decode-policy", "round-robin", d=[a, b])
        await self.known(router, a, b)
        file = (
            b'--B\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n'
            b"Content-Type: audio/wav\r\n\r\n" + bytes(range(256)) * 400 + b"\r\n"
        )
        kind = 'Content-Type: multipart/form-data; boundary="B"\r\n'

        def form(*models: str) -> bytes:
            name = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
            fields = b"".join(name + model.encode() + b"\r\n" for model in models)
            return file + fields + b"--B--\r\n"

        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            for model, engine in (("a", a), ("b", b)):
                for each in (a, b):
                    each.requests.clear()
                for _ in range(4):
                    self.assertEqual((await router.post(path, form(model), kind)).status, 200)
                self.assertEqual(len(engine.requests), 4, (path, model))
                self.assertEqual({r.body for r in engine.requests}, {form(model)})
            reply = await router.post(path, form("b", "c"), kind)  # Frameworks take the last one.
            self.assertEqual((reply.status, reply.json["error"]["param"]), (404, "model"))
        # A form without a model is like a request without one; the engine rejects broken ones.
        for each in (a, b):
            each.requests.clear()
        for body in (form(), form(), file, b"--B"):
            self.assertEqual((await router.post(path, body, kind)).status, 200)
        self.assertEqual((len(a.requests), len(b.requests)), (4, 0))

    async def test_an_unknown_model_is_rejected_as_vllm_does_without_an_engine(self) -> None:
        d = await self.serving("m")
        router = await self.router(d=[d])
        await self.known(router, d)
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/responses"):
            reply = await router.post(path, {"model": "x", "messages": []})
            self.assertEqual(
                (reply.status, reply.json["error"]),
                (
                    404,
                    {
                        "message": "The model `x` does not exist.",
                        "type": "NotFoundError",
                        "param": "model",
                        "code": 404,
                    },
                ),
            )
        reply = await router.post("/v1/messages", {"model": "x", "messages": []})
        self.assertEqual((reply.status, reply.json["error"]["type"]), (404, "not_found_error"))
        self.assertEqual(d.requests, [])
        self.assertEqual((await router.metrics())["unknown_models_total"], 4)
        # Requests of clients must not cause requests for models without a limit.
        before = d.model_questions
        async with router.client() as client:
            for _ in range(200):
                await client.post("/v1/completions", {"model": "x"})
                self.assertEqual((await client.reply()).status, 404)
        self.assertLess(d.model_questions - before, 20)
        passing = await self.router("--pass-unknown-models", d=[d])
        await self.known(passing, d)
        self.assertEqual((await passing.post("/v1/completions", {"model": "x"})).status, 200)

    async def test_an_adapter_that_was_loaded_later_is_found_at_once(self) -> None:
        d = await self.serving("m")
        router = await self.router("--models-interval", "1h", d=[d])
        await self.known(router, d)
        d.models = ["m", "adapter"]
        reply = await router.post("/v1/completions", {"model": "adapter", "prompt": "x"})
        self.assertEqual(reply.status, 200)

        async def not_found(request: Request, answer: Answer) -> None:
            await answer.whole(b'{"error":{}}', 404)

        # An unloaded adapter is known to be gone after an engine has reported so.
        d.models = ["m"]
        d.behavior = not_found
        row = f'engine_models{{role="decode",engine="{d.url}"}}'
        end = time.monotonic() + 20  # Extra requests for models are sent once a second at most.
        while (await router.metrics())[row] != 1:
            self.assertLess(time.monotonic(), end)
            reply = await router.post("/v1/completions", {"model": "adapter", "prompt": "x"})
            self.assertEqual((reply.status, reply.body), (404, b'{"error":{}}'))

    async def test_unknown_model_lists_reject_nothing(self) -> None:
        d = await self.engine()
        d.models = None  # It responds with 404.
        router = await self.router(d=[d])
        reply = await router.post("/v1/completions", {"model": "x", "prompt": "x"})
        self.assertEqual(reply.status, 200)

    async def test_a_model_of_an_engine_that_is_down_is_503_and_not_404(self) -> None:
        a, b = await self.serving("a"), await self.serving("b")
        router = await self.router("--health-interval", "20ms", d=[a, b])
        await self.known(router, a, b)
        await b.stop()
        await router.wait_for_line("engine is down")
        reply = await router.post("/v1/completions", {"model": "b", "prompt": "x"})
        self.assertEqual((reply.status, reply.headers["retry-after"]), (503, "1"))
        self.assertEqual((await router.post("/v1/completions", {"model": "a"})).status, 200)

    async def test_prefill_and_decode_engine_have_the_same_model(self) -> None:
        pa, pb = await self.serving("a"), await self.serving("b")
        da, db, dc = await self.serving("a"), await self.serving("b"), await self.serving("c")
        router = await self.router(p=[pa, pb], d=[da, db, dc])
        await self.known(router, pa, pb, da, db, dc)
        for model, engines in (("a", (pa, da)), ("b", (pb, db)), ("c", (dc,)), (None, (pa, da))):
            for each in (pa, pb, da, db, dc):
                each.requests.clear()
            for _ in range(3):
                body = {"model": model, "prompt": LONG}
                self.assertEqual((await router.post("/v1/completions", body)).status, 200)
            asked = {e for e in (pa, pb, da, db, dc) if e.requests}
            self.assertEqual(asked, set(engines), model)
        self.assertEqual((await router.metrics())['prefill_total{reason="no_engine"}'], 3)

    async def test_requests_that_wait_for_one_model_delay_no_other(self) -> None:
        a, b = await self.serving("a"), await self.serving("b")
        a.behavior = wait_for_leaving
        router = await self.router("--max-decode-inflight", "1", d=[a, b])
        await self.known(router, a, b)
        async with router.client() as first, router.client() as second:
            await first.post("/v1/completions", {"model": "a", "stream": True})
            await a.wait_for(1)
            await second.post("/v1/completions", {"model": "a", "stream": True})
            await router.wait_for_metrics(lambda m: m["queue_length"] == 1)
            for _ in range(3):
                reply = await router.post("/v1/completions", {"model": "b", "prompt": "x"})
                self.assertEqual(reply.status, 200)
            a.behavior = serve_normally
            first.leave()
            self.assertEqual((await second.reply()).status, 200)
        await self.all_is_over(router)


class Steering(RouterTest):
    async def test_no_route_passes_members_that_only_a_router_may_send(self) -> None:
        d = await self.engine(ok)
        router = await self.router("--pass", "/extra", d=[d])
        bad = b'"kv_transf\\u0065r_params":{"remote_host":"10.6.6.6","do_remote_prefill":true}'
        body = b'{%s,"model":"m" , %s, "n":1.0,"kv_hints":{},%s}' % (bad, bad, bad)
        xargs = (
            b'{"vllm_xargs":{"kv_cache_report_mode":"full","a":1,"session_id":"pf1:0"},'
            b'"session_id":"mine","kv_hints":1}'
        )
        count = 0
        for path in (
            "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens",
            "/v1/responses", "/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score",
            "/v1/score", "/classify", "/pooling", "/tokenize", "/detokenize", "/v1/audio/speech",
            "/extra", "/v1/responses/resp_1/cancel",
        ):  # fmt: skip
            for sent, left in (
                (body, b'{"model":"m" , "n":1.0}'),
                (xargs, b'{"vllm_xargs":{"a":1},"session_id":"mine"}'),
            ):
                reply = await router.post(path, sent, "X-Session-ID: pf1:77\r\n")
                self.assertEqual(reply.status, 200, path)
                self.assertEqual(d.requests[-1].body, left, path)
                self.assertNotIn("x-session-id", d.requests[-1].headers)
                count += 1
        self.assertEqual((await router.metrics())["steering_removed_total"], count)

    async def test_batches_and_nested_parameters_of_passed_paths_are_cleaned(self) -> None:
        d = await self.engine(ok)
        router = await self.router("--pass", "/extra", "/v1/chat/completions/batch", d=[d])
        batch = b'[{"kv_transfer_params":{},"a":1},{"body":{"b":2,"kv_transfer_params":{}}}]'
        await router.post("/extra", batch)
        self.assertEqual(d.requests[-1].body, b'[{"a":1},{"body":{"b":2}}]')
        await router.post(
            "/extra", b'{"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}',
            "Content-Type: application/vnd.x+json; a=b\r\n",
        )  # fmt: skip
        self.assertEqual(d.requests[-1].body, b'{"sampling_params":{"extra_args":{}}}')
        conversations = {"messages": [[{"role": "user", "content": "x"}]], "kv_transfer_params": {}}
        await router.post("/v1/chat/completions/batch", conversations)
        self.assertNotIn("kv_transfer_params", d.requests[-1].json)
        # A body that an engine could parse differently is rejected; one that is not JSON at all
        # passes.
        utf_16 = json.dumps({"kv_transfer_params": {}}).encode("utf-16")
        self.assertEqual((await router.post("/extra", utf_16)).status, 400)
        self.assertEqual((await router.post("/tokenize", utf_16)).status, 400)
        reply = await router.post("/extra", b"\x00\x01", "Content-Type: audio/wav\r\n")
        self.assertEqual((reply.status, d.requests[-1].body), (200, b"\x00\x01"))
        reply = await router.post("/tokenize", b"{}", "Content-Type: text/plain\r\n")
        self.assertEqual(reply.status, 415)

    async def test_the_routers_own_parameters_replace_a_clients(self) -> None:
        p, d = await self.engine(), await self.engine()
        router = await self.router(p=[p], d=[d])
        body = {"prompt": LONG, "kv_transfer_params": {"pegaflow": {"node": "evil"}}}
        self.assertEqual((await router.post("/v1/completions", body)).status, 200)
        self.assertEqual(
            p.requests[0].json["kv_transfer_params"], {"pegaflow": {"save_tail": True}}
        )
        self.assertEqual(d.requests[0].body.count(b"kv_transfer_params"), 1)
        self.assertNotIn(b"evil", d.requests[0].body + p.requests[0].body)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    unittest.main()
