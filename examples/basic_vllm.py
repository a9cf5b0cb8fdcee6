#!/usr/bin/env python3
"""vLLM without a server, twice on one long prompt: computed, and then brought back from PegaFlow.

Start pegaflow-server, then this. Between the two runs vLLM's own prefix cache is emptied, so that
what the second run does not compute has come from PegaFlow.

    pegaflow-server --pool-size 8gb &
    python examples/basic_vllm.py --model Qwen/Qwen3-0.6B
"""

import argparse
import json
import sys
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

#: Some 700 tokens, as a system prompt or a document would be.
PROMPT = " ".join(
    f"Rule {number}: a cache may forget, it may never lie; what it does not have is computed."
    for number in range(30)
)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name or folder (%(default)s)")
    parser.add_argument("--server", help="unix:PATH of its socket, if it is not the usual one")
    parser.add_argument("--output-len", type=int, default=16, help="tokens to answer (%(default)s)")
    parser.add_argument(
        "--llm",
        type=json.loads,
        default={},
        help='more arguments of vllm.LLM, as {"dtype": "auto"}',
    )
    parser.add_argument(
        "--connector",
        type=json.loads,
        default={},
        help='more of kv_connector_extra_config, as {"pegaflow.verify": "all"}',
    )
    return parser.parse_args()


def make_llm(chosen: argparse.Namespace) -> LLM:
    """The engine with the connector in it; everything else is plain vLLM."""
    server = {"pegaflow.host": chosen.server} if chosen.server else {}
    connector = KVTransferConfig(
        kv_connector="PegaKVConnector",
        kv_connector_module_path="pegaflow.connector",
        kv_role="kv_both",
        kv_connector_extra_config=server | chosen.connector,
    )
    return LLM(model=chosen.model, kv_transfer_config=connector, **chosen.llm)


def forget(llm: LLM) -> None:
    """Empties vLLM's own cache. It answers false while blocks wait for their save."""
    deadline = time.monotonic() + 30
    while not llm.reset_prefix_cache():
        if time.monotonic() > deadline:
            sys.exit("vLLM's prefix cache could not be emptied within 30 s")
        time.sleep(0.05)


def ask(llm: LLM, name: str, output_len: int) -> tuple[list[int], int]:
    """The answer's tokens, and how many tokens of the prompt were not computed."""
    greedy = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    (answer,) = llm.generate(PROMPT, greedy, use_tqdm=False)
    seconds = time.perf_counter() - start
    cached, tokens = answer.num_cached_tokens or 0, len(answer.prompt_token_ids)
    print(f"{name}: {seconds:.2f} s, {cached} of {tokens} prompt tokens came from a cache")
    return list(answer.outputs[0].token_ids), cached


def main() -> int:
    chosen = options()
    llm = make_llm(chosen)
    cold, _ = ask(llm, "cold", chosen.output_len)
    forget(llm)
    warm, cached = ask(llm, "warm", chosen.output_len)
    print("the answers are the same" if warm == cold else "the answers differ")
    if cached == 0:
        print("nothing came back: `pegaflow doctor` says why")
    return 0 if cached and warm == cold else 1


if __name__ == "__main__":
    sys.exit(main())
