"""The CPU time that the connector adds to a prompt that is in no cache.

Two vLLMs run side by side, one with the connector. Each pair sends both the same new prompt, one
after the other, and they alternate in beginning; the CPU time of all their processes is compared
pair by pair. The side with the connector is charged with everything: its vLLM until the prompt is
stored, and pegaflow-server. Exits with 1 when the target is missed.
"""

from __future__ import annotations

import random
import statistics
import sys

from demo.client import complete
from demo.stage import wait_until
from perf.support.figure import Figure, mean_interval, note, publish
from perf.support.servers import Servers, parser, servers
from tests.support.vllm_server import ModelShape, VllmServer

#: Upper end of the 95 % interval of the relative difference.
MAX_OVERHEAD = 0.03
BLOCK_TOKENS = 32


def cpu_of_plain(run: Servers, prompt: list[int], max_tokens: int) -> float:
    before = run.plain.cpu_seconds()
    complete(run.plain.http, prompt, max_tokens)
    return run.plain.cpu_seconds() - before


def cpu_of_connected(run: Servers, prompt: list[int], max_tokens: int) -> tuple[float, float]:
    """CPU seconds of vLLM and of pegaflow-server, until the prompt's blocks are sealed."""
    before, server_before = run.connected.cpu_seconds(), run.pega.cpu_seconds()
    target = insertions(run) + len(prompt) // BLOCK_TOKENS
    complete(run.connected.http, prompt, max_tokens)
    wait_until("the prompt is stored", lambda: insertions(run) >= target, 30)
    return run.connected.cpu_seconds() - before, run.pega.cpu_seconds() - server_before


def insertions(run: Servers) -> float:
    return run.pega.metrics().total("pegaflow_cache_block_insertions_total")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--pairs", type=int, default=20, help="at least 9")
    arguments.add_argument("--tokens", type=int, default=2000, help="length of a prompt")
    arguments.add_argument("--output", type=int, default=8, help="tokens of an answer")
    options = arguments.parse_args()
    note(f"seed {options.seed}")
    draw = random.Random(options.seed)
    plain, connected, server = [], [], []
    with servers(options.build_dir, "2gb") as run:
        run.pega.start()
        started: tuple[VllmServer, ...] = (run.plain, run.connected)
        for vllm in started:
            vllm.start()
        for pair in range(-2, options.pairs):  # two to warm up
            prompt = [draw.randrange(3, ModelShape().vocabulary) for _ in range(options.tokens)]
            if pair % 2:
                alone = cpu_of_plain(run, prompt, options.output)
                ours, ours_server = cpu_of_connected(run, prompt, options.output)
            else:
                ours, ours_server = cpu_of_connected(run, prompt, options.output)
                alone = cpu_of_plain(run, prompt, options.output)
            if pair < 0:
                continue
            plain.append(alone)
            connected.append(ours + ours_server)
            server.append(ours_server)
            note(
                f"pair {pair + 1}: without {alone:.2f} s, with {ours:.2f} s "
                f"+ {ours_server:.2f} s in pegaflow-server"
            )
    differences = [(o - p) / statistics.fmean(plain) for o, p in zip(connected, plain, strict=True)]
    mean, low, high = mean_interval(differences)
    figure = Figure(
        run="cold request, CPU with the connector, upper end of the 95 % interval",
        params={
            "pairs": options.pairs,
            "prompt_tokens": options.tokens,
            "output_tokens": options.output,
            "seed": options.seed,
            "difference_mean": mean,
            "difference_interval": [low, high],
            "pegaflow_server_cpu_s": statistics.fmean(server),
            "plain_cpu_s": plain,
            "connected_cpu_s": connected,
        },
        figure=statistics.fmean(plain) * (1 + high),
        unit="CPU s",
        bound=statistics.fmean(plain),
        bound_name="vLLM without the connector",
        target=1 + MAX_OVERHEAD,
        n=options.pairs,
        spread=f"pairs, difference {mean:+.2%} ({low:+.2%} to {high:+.2%})",
    )
    return 0 if publish([figure], options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
