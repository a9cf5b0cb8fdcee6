"""Tenants of one router do not find each other's cached prompts, unless they share the cache."""

import asyncio
import pathlib
import sys
import unittest
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

from router_case import RouterTest
from router_process import BINARY, Router
from streaming_engine import StreamingEngine

LONG = "eins zwei drei " * 200  # Beyond --min-prefill-tokens.


class Tenants(RouterTest):
    async def salted(self, *options: str) -> tuple[Router, StreamingEngine, StreamingEngine]:
        """A router with the keys of two tenants, and its engines."""
        keys = self.scratch() / "keys"
        keys.write_text("ann k-ann\nann k-ann-2\nbob k-bob\n")
        p, d = await self.engine(), await self.engine()
        words = ("--api-keys-file", str(keys), "--pass", "/extra", *options)
        return await self.router(*words, p=[p], d=[d]), p, d

    async def salt_of(
        self, router: Router, engine: StreamingEngine, key: str, body: Any, path: str
    ) -> Any:
        """The salt that the engine received."""
        engine.requests.clear()
        reply = await router.post(path, body, f"x-api-key: {key}\r\n")
        self.assertEqual(reply.status, 200, reply.body)
        return engine.requests[-1].json.get("cache_salt")

    async def test_the_prompts_of_tenants_have_different_salts(self) -> None:
        router, p, d = await self.salted()
        again, _p, d2 = await self.salted()
        body = {"model": "m", "prompt": "x", "input": "x", "messages": []}
        for path in (
            "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses",
            "/v1/embeddings", "/score", "/v1/rerank", "/classify", "/pooling", "/extra",
        ):  # fmt: skip

            async def salt(key: str, more: dict[str, Any], path: str = path) -> str:
                return await self.salt_of(router, d, key, body | more, path)

            own = {key: await salt(key, {}) for key in ("k-ann", "k-ann-2", "k-bob")}
            # A tenant is a name; another router derives the same salt for it.
            self.assertEqual(own["k-ann"], own["k-ann-2"], path)
            self.assertEqual(own["k-ann"], await self.salt_of(again, d2, "k-ann", body, path))
            folded = [await salt(key, {"cache_salt": "x"}) for key in ("k-ann", "k-bob")]
            # A client cannot use another tenant's salt, even if it knows it.
            stolen = await salt("k-bob", {"cache_salt": own["k-ann"]})
            self.assertEqual(len({own["k-ann"], own["k-bob"], *folded, stolen, "x"}), 6, path)
            self.assertEqual(await salt("k-ann", {"cache_salt": None}), own["k-ann"], path)
        # Both engines of a request receive the same salt, and otherwise the client's body.
        await router.post("/v1/completions", {"prompt": LONG, "n": 1.50}, "x-api-key: k-ann\r\n")
        to_p, to_d = p.requests[-1], d.requests[-1]
        self.assertEqual(to_p.json["cache_salt"], own["k-ann"])
        self.assertEqual(to_d.json["cache_salt"], own["k-ann"])
        self.assertIn(b'"n": 1.5}', to_d.body)
        reply = await router.post(
            "/v1/completions", {"prompt": "x", "cache_salt": 7}, "x-api-key: k-ann\r\n"
        )
        self.assertEqual((reply.status, b"cache_salt" in reply.body), (400, True))

    async def test_salts_come_from_a_key_that_routers_share(self) -> None:
        secret = self.scratch() / "secret"
        secret.write_text("0123456789abcdef\n")
        options = ("--cache-salt-key-file", str(secret), "--health-interval", "20ms")
        plain, _p, d1 = await self.salted()
        router, _p, d2 = await self.salted(*options)
        again, _p, d3 = await self.salted(*options)
        body, path = {"prompt": "x"}, "/v1/completions"
        without = await self.salt_of(plain, d1, "k-ann", body, path)
        salt = await self.salt_of(router, d2, "k-ann", body, path)
        self.assertNotEqual(without, salt)
        self.assertEqual(salt, await self.salt_of(again, d3, "k-ann", body, path))
        secret.write_text("too short\n")
        await router.wait_for_line("the key of cache salts stays unchanged: .* 9 bytes")
        self.assertEqual(salt, await self.salt_of(router, d2, "k-ann", body, path))
        secret.write_text("another secret of bytes\n")
        await router.wait_for_line("the key of cache salts has changed")
        changed = await self.salt_of(router, d2, "k-ann", body, path)
        self.assertNotIn(changed, (salt, without))
        self.assertNotIn("another secret", "".join(router.log))

    async def test_tenants_share_the_cache_on_request_and_without_keys(self) -> None:
        router, _p, d = await self.salted("--share-cache-among-tenants")
        open_to_all = await self.router(d=[d])
        for each in (router, open_to_all):
            for path in ("/v1/completions", "/extra"):
                path = path if each is router else "/v1/completions"
                body = {"prompt": "x"}
                self.assertIsNone(await self.salt_of(each, d, "k-ann", body, path))
                body |= {"cache_salt": "x"}
                self.assertEqual(await self.salt_of(each, d, "k-ann", body, path), "x")

    async def test_a_salt_key_without_effect_is_rejected(self) -> None:
        folder = self.scratch()
        (folder / "keys").write_text("ann k-ann\n")
        (folder / "secret").write_text("0123456789abcdef\n")
        (folder / "short").write_text("0123456789abcde \n")
        keys = ("--api-keys-file", str(folder / "keys"))
        secret = ("--cache-salt-key-file", str(folder / "secret"))
        for options, why in (
            (secret, "needs --api-keys-file"),
            ((*keys, *secret, "--share-cache-among-tenants"), "has no effect"),
            ((*keys, "--cache-salt-key-file", str(folder / "short")), "15 bytes"),
            ((*keys, "--cache-salt-key-file", str(folder / "none")), "cannot be read"),
        ):
            process = await asyncio.create_subprocess_exec(
                BINARY, "--decode", "http://127.0.0.1:1", *options, stderr=asyncio.subprocess.PIPE
            )
            _, error = await asyncio.wait_for(process.communicate(), 20)
            self.assertEqual(process.returncode, 1)
            self.assertIn(why, error.decode())


if __name__ == "__main__":
    unittest.main()
