"""Two real vLLM engines on one server: the effect of a sleep, a pause and a reset of one on the
other.
"""

from pathlib import Path
from typing import Any

from tests.python.vllm_cases import BLOCK, SMALL, ask, call, serve, train_mlp
from tests.support.vllm_server import PegaServer, ensure_model

WHOLE = 500 // BLOCK * BLOCK


def test_a_sleep_costs_no_hits_a_pause_costs_one_engine_its_hits_and_a_reset_costs_all(
    own_pega: PegaServer, short_path: Path, prompt: Any
) -> None:
    tokens, others = prompt(500), prompt(500)
    base = ensure_model(SMALL)
    tuned = train_mlp(base, short_path / "tuned")
    with (
        serve(base, short_path / "a", own_pega) as a,
        serve(base, short_path / "b", own_pega) as b,
    ):
        answer, _ = ask(a, tokens)
        assert ask(b, tokens) == (answer, WHOLE)

        # vLLM itself brings the weights back.
        call(a, "/sleep?level=1")
        call(a, "/wake_up")
        assert ask(a, tokens) == (answer, WHOLE)
        assert a.metrics().total("vllm:pegaflow_private_view") == 0

        # Nothing changes in the pause, but a connector cannot detect that.
        call(a, "/pause")
        call(a, "/resume")
        assert ask(b, tokens) == (answer, WHOLE)
        assert ask(a, tokens) == (answer, 0)
        assert ask(a, tokens) == (answer, WHOLE)

        call(a, "/sleep?level=1")
        call(
            a,
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(tuned)}},
        )
        call(a, "/wake_up")
        by_tuned, hits = ask(a, tokens)
        assert by_tuned != answer and hits == 0
        assert ask(a, tokens) == (by_tuned, WHOLE)
        ask(a, others)
        assert ask(b, tokens) == (answer, WHOLE)
        by_base, hits = ask(b, others)
        assert hits == 0
        assert ask(a, others)[0] != by_base
        assert a.metrics().total("vllm:pegaflow_resets_total", kind="local") == 3
        assert a.metrics().total("vllm:pegaflow_private_view") == 1

        call(a, "/reset_prefix_cache?reset_external=true")
        assert ask(b, tokens) == (answer, 0)
        assert ask(a, tokens) == (by_tuned, 0)
        assert ask(b, tokens) == (answer, WHOLE)
        assert a.metrics().total("vllm:pegaflow_resets_total", kind="explicit") == 1
        assert b.metrics().total("vllm:pegaflow_private_view") == 0
