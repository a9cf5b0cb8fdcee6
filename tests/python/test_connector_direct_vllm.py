"""Two real vLLMs behind a router that sends them a request at once, and that read directly."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.client import complete, post
from demo.stage import LONG_DEADLINES, SMALL, wait_until
from demo.streams import Stream
from tests.python.conftest import server_binary
from tests.support.memory_reads import why_forbidden
from tests.support.vllm_server import (
    PegaServer,
    RouterServer,
    VllmOptions,
    VllmServer,
    ensure_model,
)

pytestmark = pytest.mark.skipif(bool(why_forbidden()), reason=why_forbidden())

BUILD = Path(os.environ["PEGA_BUILD_DIR"])
OUTPUT = 24
#: The prefill engine computes and saves longer prompts in chunks of this size.
CHUNK_TOKENS = 512
#: A prompt of several chunks, and one of a single chunk.
LENGTHS = (3000, 2900, 400)


@dataclasses.dataclass
class Fleet:
    pega: PegaServer
    prefill: VllmServer
    decode: VllmServer
    router: RouterServer

    def counted(self, name: str, **labels: str) -> int:
        """A count of the decode engine's connector."""
        return int(self.decode.metrics().total(f"vllm:pegaflow_{name}_total", **labels))

    def unfinished(self) -> tuple[int, int]:
        """Requests that the prefill engine and the decode engine have."""
        counts = [
            metrics.total("vllm:num_requests_running") + metrics.total("vllm:num_requests_waiting")
            for metrics in (self.prefill.metrics(), self.decode.metrics())
        ]
        return int(counts[0]), int(counts[1])

    def computed(self, prompt: list[int]) -> list[int]:
        """The answer of the decode engine alone, without any cache."""
        wait_until("the caches are empty", self._forget, 60)
        loaded = self.counted("loaded_blocks")
        tokens = complete(self.decode.http, prompt, OUTPUT).tokens
        assert self.counted("loaded_blocks") == loaded
        return list(tokens)

    def _forget(self) -> bool:
        answer = post(self.decode.http, "/reset_prefix_cache?reset_external=true")
        return bool(answer[1]["success"])


@pytest.fixture(scope="module")
def fleet(short_path: Path) -> Iterator[Fleet]:
    pega = PegaServer(server_binary(), short_path, "256mb")
    prefill_options = VllmOptions(
        ensure_model(SMALL),
        kv_cache_bytes=1 << 29,
        connector=pega.address,
        extra_config=LONG_DEADLINES
        | {"pegaflow.handover_wait_ms": 10_000, "pegaflow.direct_group": "test"},
        python_path=[BUILD / "python"],
        arguments=("--max-num-batched-tokens", str(CHUNK_TOKENS)),
    )
    decode_options = dataclasses.replace(prefill_options, arguments=())
    prefill = VllmServer(prefill_options, short_path / "prefill")
    decode = VllmServer(decode_options, short_path / "decode")
    with pega, prefill, decode:
        router = RouterServer(
            BUILD / "router" / "pegaflow-router", short_path, [prefill.http], [decode.http]
        )
        router.arguments += ["--flow", "auto"]
        with router:
            # The router learns from an answer where the prefill engine's saves are.
            complete(router.http, random_prompt("first", 1000), OUTPUT)
            yield Fleet(pega, prefill, decode, router)


def random_prompt(name: str, length: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(3, SMALL.vocabulary) for _ in range(length)]


def test_prompts_are_answered_as_by_one_engine(fleet):
    prompts = [random_prompt(f"equal {length}", length) for length in LENGTHS]
    loads = fleet.counted("chunked_loads", result="over")

    answers = [list(complete(fleet.router.http, prompt, OUTPUT).tokens) for prompt in prompts]

    assert fleet.counted("direct_bytes") > 0
    assert fleet.counted("chunked_loads", result="over") >= loads + 1
    assert fleet.counted("load_failed_blocks") == 0
    assert answers == [fleet.computed(prompt) for prompt in prompts]


def test_a_client_leaves_in_the_middle_of_a_prefill(fleet):
    dropped = fleet.counted("early_handovers", result="dropped")
    with Stream(fleet.router.http, random_prompt("left", 3000), OUTPUT):
        wait_until("both engines have the request", lambda: fleet.unfinished() == (1, 1), 60)
    wait_until("no engine has it any longer", lambda: fleet.unfinished() == (0, 0), 60)
    assert fleet.counted("early_handovers", result="dropped") == dropped + 1

    prompt = random_prompt("after", 2000)
    answer = list(complete(fleet.router.http, prompt, OUTPUT).tokens)
    assert answer == fleet.computed(prompt)
    assert fleet.counted("internal_errors") == 0


def test_a_prefill_engine_is_killed_in_the_middle_of_a_prefill(fleet):
    prompt = random_prompt("killed", 3000)
    with Stream(fleet.router.http, prompt, OUTPUT) as stream:
        wait_until("both engines have the request", lambda: fleet.unfinished() == (1, 1), 60)
        fleet.prefill.kill()
        seen = stream.read_all()
    assert seen.status == 200 and seen.done, seen
    assert seen.tokens == fleet.computed(prompt)
    assert fleet.counted("internal_errors") == 0
