"""One real vLLM with the connector and a real server, shared by all tests here; none kills it.

It is started as by a user: its processes are not forks of one another, as in other tests.
"""

import contextlib
import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.client import complete, post
from pegaflow.vllm.metrics import COUNTER, HISTOGRAM, METRICS
from tests.python.vllm_cases import BLOCK, PATIENT, SMALL
from tests.support.event_consumer import consumer
from tests.support.vllm_server import (
    MODEL_NAME,
    PegaServer,
    VllmOptions,
    VllmServer,
    ensure_model,
)
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def events(short_path: Path) -> Iterator[Any]:
    with consumer(short_path, "real") as made:
        yield made


@pytest.fixture(scope="module")
def vllm(pega: PegaServer, short_path: Path, events: Any) -> Iterator[VllmServer]:
    options = VllmOptions(
        model=ensure_model(SMALL),
        connector=pega.address,
        extra_config=PATIENT | {"pegaflow.log_interval_s": 1},
        block_size=BLOCK,
        kv_cache_bytes=256 << 20,
        python_path=[Path(os.environ["PEGA_BUILD_DIR"]) / "python"],
        arguments=["--kv-events-config", json.dumps(events[0])],
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("PEGA_VLLM_FORKS", raising=False)
        with VllmServer(options, short_path / "v") as server:
            yield server


def forget(vllm: VllmServer) -> None:
    """Empties vLLM's own cache, which waits for blocks that are being saved."""
    wait_until(
        lambda: post(vllm.http, "/reset_prefix_cache")[1]["success"], "the cache is still in use"
    )


def external_hits(vllm: VllmServer) -> float:
    return vllm.metrics().total("vllm:external_prefix_cache_hits_total")


@contextlib.contextmanager
def loads(vllm: VllmServer, tokens: int) -> Iterator[None]:
    """Checks that exactly this many tokens are loaded from the cache meanwhile."""
    before = external_hits(vllm)
    yield
    assert external_hits(vllm) - before == tokens


def send(vllm: VllmServer, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(vllm.http, timeout=120)
    text = json.dumps({"model": MODEL_NAME} | body)
    connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
    return connection


def salted(vllm: VllmServer, prompt: list[int], salt: str) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    connection = send(vllm, body | {"return_token_ids": True, "cache_salt": salt})
    with contextlib.closing(connection):
        response = connection.getresponse()
        answer = json.loads(response.read())
    assert response.status == 200, answer
    return answer["choices"][0]["token_ids"]


@pytest.mark.parametrize("length", [64, 500, 2500])
def test_cold_local_and_loaded_answers_are_equal(vllm, prompt, length):
    tokens = prompt(length)
    with loads(vllm, 0):
        cold = complete(vllm.http, tokens, 8)
        local = complete(vllm.http, tokens, 8)
    forget(vllm)
    with loads(vllm, length // BLOCK * BLOCK):
        loaded = complete(vllm.http, tokens, 8)

    assert cold.tokens == local.tokens == loaded.tokens
    # The batch of a token shows in its last bits; the origin of its KV must not.
    assert loaded.first_logprob == pytest.approx(local.first_logprob, abs=1e-5)
    assert cold.first_logprob == pytest.approx(local.first_logprob, abs=1e-5)


def test_the_cache_extends_the_engines_own_prefix(vllm, prompt):
    head, tail = prompt(320), prompt(400)
    whole = complete(vllm.http, head + tail, 8)
    forget(vllm)
    with loads(vllm, 320):
        complete(vllm.http, head + prompt(50), 2)
    with loads(vllm, 720 // BLOCK * BLOCK - 320):
        assert complete(vllm.http, head + tail, 8).tokens == whole.tokens


def test_salts_share_no_block(vllm, prompt):
    tokens = prompt(200)
    with loads(vllm, 0):
        answers = [salted(vllm, tokens, salt) for salt in ("a", "b")]
    forget(vllm)
    with loads(vllm, 2 * 192):
        assert [salted(vllm, tokens, salt) for salt in ("a", "b")] == answers
    forget(vllm)
    with loads(vllm, 0):
        salted(vllm, tokens, "c")


def test_a_handover_goes_through_vllms_own_fields(vllm, prompt):
    # One engine has both roles, one after the other.
    tokens = prompt(500)
    whole = complete(vllm.http, tokens, 8)
    forget(vllm)
    post(vllm.http, "/reset_prefix_cache?reset_external=true")
    ask = {"kv_transfer_params": {"pegaflow": {"save_tail": True}}}
    with contextlib.closing(send(vllm, {"prompt": tokens, "max_tokens": 1} | ask)) as prefill:
        answer = json.loads(prefill.getresponse().read())
    params = answer["kv_transfer_params"]
    assert params["pegaflow"]["tokens"] == 500
    forget(vllm)

    body = {"prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "kv_transfer_params": params}
    with loads(vllm, 499), contextlib.closing(send(vllm, body)) as decode:
        answer = json.loads(decode.getresponse().read())

    assert tuple(answer["choices"][0]["token_ids"]) == whole.tokens
    assert answer["kv_transfer_params"] is None
    assert vllm.metrics().total("vllm:pegaflow_handovers_total", result="over") == 1


def test_clients_that_disconnect_leave_nothing_behind(vllm, pega, prompt):
    tokens = prompt(2500)
    answer = complete(vllm.http, tokens, 8)
    for _ in range(5):
        forget(vllm)
        send(vllm, {"prompt": tokens, "max_tokens": 50}).close()
    wait_until(
        lambda: (
            vllm.metrics().total("vllm:num_requests_running") == 0
            and vllm.metrics().total("vllm:num_requests_waiting") == 0
        ),
        "requests of clients that left",
    )
    forget(vllm)
    assert complete(vllm.http, tokens, 8).tokens == answer.tokens
    wait_until(
        lambda: (
            pega.metrics().total("pegaflow_pins") == pega.metrics().total("pegaflow_claims") == 0
        ),
        "claims or pins of requests that ended",
    )


def test_vllm_exports_the_connectors_metrics(vllm, prompt):
    tokens = prompt(300)
    before = vllm.metrics()
    complete(vllm.http, tokens, 4)
    forget(vllm)
    complete(vllm.http, tokens, 4)
    wait_until(
        lambda: (
            vllm.metrics().total("vllm:pegaflow_loaded_blocks_total")
            > before.total("vllm:pegaflow_loaded_blocks_total")
        ),
        "loaded blocks are counted",
    )

    after = vllm.metrics()
    for metric in METRICS:
        if not metric.labels:
            suffix = {COUNTER: "_total", HISTOGRAM: "_count"}.get(metric.kind, "")
            assert f"vllm:pegaflow_{metric.name}{suffix}" in after.names()
    assert after.total("vllm:pegaflow_loaded_blocks_total") == (
        before.total("vllm:pegaflow_loaded_blocks_total") + 300 // BLOCK
    )
    page = 4 * 2 * BLOCK * SMALL.kv_heads * SMALL.head_dim * SMALL.layers
    assert after.total("vllm:pegaflow_loaded_bytes_total") == (
        before.total("vllm:pegaflow_loaded_bytes_total") + 300 // BLOCK * page
    )
    assert after.total("vllm:pegaflow_link_state", side="worker", state="ready") == 1
    assert after.total("vllm:pegaflow_link_state", side="scheduler", state="ready") == 1
    assert after.total("vllm:pegaflow_serving") == 2
    assert after.total("vllm:pegaflow_internal_errors_total") == 0


def test_the_log_sums_up_the_cache(vllm, prompt):
    complete(vllm.http, prompt(300), 10)

    def said() -> bool:
        complete(vllm.http, prompt(40), 2)
        return "pegaflow: in " in vllm.log_text()

    wait_until(said, "no line within the interval")


def test_a_reset_reaches_the_cache(vllm, prompt):
    tokens = prompt(300)
    complete(vllm.http, tokens, 4)
    forget(vllm)
    status, answer = post(vllm.http, "/reset_prefix_cache?reset_external=true")
    assert (status, answer["success"]) == (200, True)
    with loads(vllm, 0):
        complete(vllm.http, tokens, 4)


def test_a_router_that_subscribes_to_events_knows_the_cached_blocks(vllm, events, prompt):
    router = events[1]()
    tokens = prompt(500)
    complete(vllm.http, tokens, 4)
    # Hashes of this prompt, from vLLM's own events.
    mine = tuple(tokens[: 15 * BLOCK])

    def chain(medium: str) -> list[Any]:
        router.read()
        blocks = {said[1:3]: key for key, said in router.blocks[medium].items()}
        found, parent = [], None
        for first in range(0, len(mine), BLOCK):
            parent = blocks.get((parent, mine[first : first + BLOCK]))
            if parent is None:
                break
            found.append(parent)
        return found

    wait_until(lambda: len(chain("CPU")) == 15, "saved blocks are not reported")
    assert chain("CPU") == chain("GPU")
    forget(vllm)
    with loads(vllm, 480):
        complete(vllm.http, tokens, 4)
    wait_until(lambda: len(chain("CPU")) == 15, "loaded blocks are not reported")
    assert chain("CPU") == chain("GPU")
