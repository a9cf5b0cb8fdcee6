#!/usr/bin/env python3
"""Measures what a KV cache saves: time to first token (TTFT) of a running vLLM, cold and warm.

For each prompt length it sends each prompt three times, one request at a time:
  cold    nothing is cached
  gpu     vLLM's own prefix cache holds it
  reload  after vLLM's prefix cache was emptied: the connector loads it, or it is computed again
Then a burst (prompts arriving at a fixed rate) in the same phases; with --neighbours N once more
while N other requests decode: their gaps between tokens are what the burst costs them, in phase gpu
without a connector's part. --fragment
first shuffles vLLM's free blocks, as hours of traffic do; a fresh server's blocks lie in order and
copy as one piece.

Prompts are random token ids, so nothing is shared by chance. `=cold` and `=gpu` count the answers'
leading tokens that agree with those of that phase. They need `--load-format pegaflow_seeded`, whose
answers hang on every KV block. A reload that restores what the prefix cache held agrees with gpu in
all tokens, since both compute the same; cold computes in other portions, so its rounding differs
and so may its answers.

Needs the server's development mode (VLLM_SERVER_DEV_MODE=1) and only the standard library.
"""

import argparse
import http.client
import json
import pathlib
import random
import re
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Answer:
    ttft_s: float = 0.0
    tokens: list[str] = field(default_factory=list)
    arrivals: list[float] = field(
        default_factory=list
    )  # perf_counter() of each piece of the answer
    error: str = ""

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first."""
        steps = len(self.tokens) - 1
        return (self.arrivals[-1] - self.arrivals[0]) / steps * 1e3 if steps > 0 else 0.0


class Server:
    def __init__(self, host: str, port: int, model: str, timeout_s: float) -> None:
        self._address = (host, port)
        self._model = model
        self._timeout_s = timeout_s

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self._address, timeout=self._timeout_s)

    def _body(self, prompt: list[int], output_tokens: int, more: dict | None, **own: bool) -> str:
        body = {"model": self._model, "prompt": prompt, "max_tokens": output_tokens}
        return json.dumps(body | {"temperature": 0, "ignore_eos": True} | own | (more or {}))

    def _post(self, body: str, request_id: str) -> http.client.HTTPConnection:
        connection = self._connect()
        connection.connect()
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        connection.request("POST", "/v1/completions", body, headers)
        return connection

    def begin(self, prompt: list[int], output_tokens: int) -> http.client.HTTPConnection:
        """A request whose response is not read here."""
        return self._post(self._body(prompt, output_tokens, None, stream=True), "")

    def post(
        self, prompt: list[int], output_tokens: int, more: dict | None = None, request_id: str = ""
    ) -> dict:
        """The whole response, with ``more`` fields in the body of the request."""
        connection = self._post(self._body(prompt, output_tokens, more), request_id)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def complete(
        self, prompt: list[int], output_tokens: int, more: dict | None = None, request_id: str = ""
    ) -> Answer:
        """The response as it arrives, with ``more`` fields in the body of the request."""
        body = self._body(prompt, output_tokens, more, stream=True)
        start = time.perf_counter()
        connection = self._post(body, request_id)
        response = connection.getresponse()
        if response.status != 200:
            return Answer(error=f"{response.status} {response.read()[:300]!r}")
        answer = Answer()
        text = ""
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                return Answer(error=str(event["error"])[:300])
            text += event["choices"][0]["text"]
            answer.arrivals.append(now)
        connection.close()
        answer.ttft_s = answer.arrivals[0] - start
        answer.tokens = text.split()
        return answer

    def stream(self, prompt: list[int], output_tokens: int) -> Iterator[float]:
        """The times (perf_counter()) at which the pieces of the response arrive. Closing it ends
        the request.
        """
        connection = self._post(self._body(prompt, output_tokens, None, stream=True), "")
        try:
            for line in connection.getresponse():
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield time.perf_counter()
        finally:
            connection.close()

    def complete_many(self, prompts: list[list[int]], output_tokens: int) -> None:
        body = {
            "model": self._model,
            "prompt": prompts,
            "max_tokens": output_tokens,
            "ignore_eos": True,
        }
        connection = self._connect()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        connection.getresponse().read()
        connection.close()

    def empty_prefix_cache(self) -> float:
        """Seconds until vLLM could empty its prefix cache; blocks in use delay it."""
        start = time.perf_counter()
        while time.perf_counter() - start < 30:
            connection = self._connect()
            connection.request("POST", "/reset_prefix_cache")
            answer = json.loads(connection.getresponse().read() or b"{}")
            connection.close()
            if answer.get("success"):
                return time.perf_counter() - start
            time.sleep(0.05)
        raise TimeoutError("the prefix cache could not be emptied within 30 s")

    def metrics(self, peer_port: int = 0) -> dict[str, float]:
        """Counters and gauges of the server, and of the process at peer_port if given."""
        connection = (
            http.client.HTTPConnection(self._address[0], peer_port)
            if peer_port
            else self._connect()
        )
        connection.request("GET", "/metrics")
        values: dict[str, float] = {}
        for line in connection.getresponse().read().decode().splitlines():
            if line.startswith("#") or "_bucket" in line or "_created" in line:
                continue
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
        connection.close()
        return values | self.metrics() if peer_port else values

    def block_count(self) -> int:
        """Blocks of vLLM's KV cache on the GPU."""
        for name in self.metrics():
            if found := re.search(r'cache_config_info.*num_gpu_blocks(?:_override)?="(\d+)"', name):
                return int(found.group(1))
        raise LookupError("the server's metrics do not name num_gpu_blocks")


def prompt(seed: int, length: int, vocabulary: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(10, vocabulary) for _ in range(length)]


def run_burst(
    server: Server, prompts: list[list[int]], rate: float, output_tokens: int
) -> list[Answer]:
    answers: list[Answer | None] = [None] * len(prompts)

    def one(index: int) -> None:
        answers[index] = server.complete(prompts[index], output_tokens)

    threads = []
    start = time.perf_counter()
    for index in range(len(prompts)):
        time.sleep(max(0.0, start + index / rate - time.perf_counter()))
        threads.append(threading.Thread(target=one, args=(index,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return [answer or Answer(error="no answer") for answer in answers]


def shuffle_free_blocks(server: Server, vocabulary: int, rounds: int) -> None:
    """Takes and frees all blocks `rounds` times in requests that end in disorder."""
    requests = server.block_count() * rounds * 2 // 7
    generator = random.Random(5)
    batches = [
        [
            [generator.randrange(10, vocabulary) for _ in range(16 * generator.randrange(1, 7) - 8)]
            for _ in range(16)
        ]
        for _ in range(requests // 16)
    ]

    def work(lane: int) -> None:
        for index in range(lane, len(batches), 8):
            server.complete_many(batches[index], (1, 2, 3, 5)[(index + lane) % 4])

    lanes = [threading.Thread(target=work, args=(lane,)) for lane in range(8)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()


class Neighbours:
    """Requests that decode in the background; measures the gaps between their tokens."""

    def __init__(self, server: Server, count: int, vocabulary: int, output_tokens: int) -> None:
        self._answers: list[Answer] = []
        prompts = [prompt(77_000 + i, 500, vocabulary) for i in range(count)]
        self._threads = [
            threading.Thread(
                target=lambda p=p: self._answers.append(server.complete(p, output_tokens))
            )
            for p in prompts
        ]
        for thread in self._threads:
            thread.start()
        time.sleep(0.4)  # past their own prefill

    def gaps_ms(self, start: float, end: float) -> list[float]:
        """Waits for the requests to end. Gaps that touch the time from start to end."""
        for thread in self._threads:
            thread.join()
        gaps = []
        for answer in self._answers:
            for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False):
                if later >= start and earlier <= end:
                    gaps.append((later - earlier) * 1e3)
        return sorted(gaps)


def same_tokens(reference: list[Answer], answers: list[Answer]) -> str:
    """The number of leading tokens that agree, and the total."""
    count = 0
    for expected, actual in zip(reference, answers, strict=True):
        for left, right in zip(expected.tokens, actual.tokens, strict=False):
            if left != right:
                break
            count += 1
    return f"{count}/{sum(len(answer.tokens) for answer in reference)}"


class Report:
    def __init__(self, label: str) -> None:
        self._label = label
        self.rows: list[dict] = []

    def add(
        self, phase: str, length: int, answers: list[Answer], references: dict[str, list[Answer]]
    ) -> None:
        good = [a for a in answers if not a.error]
        ttft = [a.ttft_s * 1e3 for a in good] or [0.0]
        row = {
            "label": self._label,
            "phase": phase,
            "prompt_tokens": length,
            "requests": len(answers),
            "errors": len(answers) - len(good),
            "ttft_ms": [round(t, 2) for t in ttft],
            "ttft_ms_median": round(statistics.median(ttft), 2),
            "ttft_ms_mean": round(statistics.mean(ttft), 2),
            "ttft_ms_max": round(max(ttft), 2),
            "tpot_ms_median": round(statistics.median([a.tpot_ms for a in good] or [0.0]), 3),
            "same": {
                name: same_tokens(reference, answers) for name, reference in references.items()
            },
        }
        same = "  ".join(f"={name} {count}" for name, count in row["same"].items())
        print(
            f"{self._label:<14} {phase:<22} {length:>6} tok n={row['requests']}"
            f" err={row['errors']}  ttft ms"
            f" median {row['ttft_ms_median']} mean {row['ttft_ms_mean']} max {row['ttft_ms_max']}"
            f"  tpot {row['tpot_ms_median']}  {same}",
            flush=True,
        )
        for answer in answers:
            if answer.error:
                print("  error:", answer.error, flush=True)
                break
        self.rows.append(row)

    def add_gaps(self, phase: str, gaps: list[float]) -> None:
        if not gaps:
            print(f"{self._label:<14} {phase:<22} no gaps: the neighbours had ended", flush=True)
            return
        row = {
            "label": self._label,
            "phase": phase,
            "gaps": len(gaps),
            "gap_ms_median": round(gaps[len(gaps) // 2], 2),
            "gap_ms_p99": round(gaps[len(gaps) * 99 // 100], 2),
            "gap_ms_max": round(gaps[-1], 2),
            "gap_ms_mean": round(statistics.mean(gaps), 2),
        }
        print(
            f"{self._label:<14} {phase:<22} gaps between the neighbours' tokens:"
            f" median {row['gap_ms_median']} mean {row['gap_ms_mean']} p99 {row['gap_ms_p99']}"
            f" max {row['gap_ms_max']} ms, n={len(gaps)}",
            flush=True,
        )
        self.rows.append(row)


class Bench:
    """The phases of one run against one server."""

    def __init__(self, server: Server, report: Report, arguments: argparse.Namespace) -> None:
        self._server = server
        self._report = report
        self._arguments = arguments

    def _prompts(self, length: int, count: int, series: int) -> list[list[int]]:
        first = (self._arguments.seed * 1000 + series) * 1_000_003 + length * 101
        return [prompt(first + i, length, self._arguments.vocabulary) for i in range(count)]

    def _empty(self) -> None:
        time.sleep(self._arguments.save_pause)
        self._server.empty_prefix_cache()

    def warm_up(self, lengths: set[int]) -> None:
        """Kernels are compiled on first use: once a length, with a repeat for the path of a hit."""
        for length in sorted(lengths):
            warm_up = self._prompts(length, 1, 999)[0]
            for _ in range(2):
                answer = self._server.complete(warm_up, 4)
                if answer.error:
                    raise SystemExit(f"warm-up: {answer.error}")
            self._empty()
            self._server.complete(warm_up, 4)

    def fragment(self, rounds: int) -> None:
        start = time.perf_counter()
        shuffle_free_blocks(self._server, self._arguments.vocabulary, rounds)
        self._empty()
        print(
            f"shuffled {self._server.block_count()} blocks in {time.perf_counter() - start:.1f} s",
            flush=True,
        )

    def one_by_one(self, length: int) -> None:
        """One prompt after the other through all phases, so that drift affects all equally."""
        answers: dict[str, list[Answer]] = {"cold": [], "gpu": [], "reload": []}
        before = self._server.metrics()
        for one in self._prompts(length, self._arguments.repeats, 0):
            for phase, found in answers.items():
                if phase == "reload":
                    self._empty()
                found.append(self._server.complete(one, self._arguments.output_tokens))
        self._empty()
        references: dict[str, list[Answer]] = {}
        for phase, found in answers.items():
            self._report.add(phase, length, found, references)
            references[phase] = found
        moved = moved_metrics(before, self._server.metrics())
        loaded = sum(v for k, v in moved.items() if k.startswith("vllm:pegaflow_loaded_bytes"))
        self._report.rows[-1]["loaded_bytes"] = loaded / self._arguments.repeats

    def burst(self, length: int) -> None:
        arguments = self._arguments
        prompts = self._prompts(length, arguments.burst, 1)
        references: dict[str, list[Answer]] = {}
        for phase in ("cold", "gpu", "reload"):
            if phase == "reload":
                self._empty()
            answers = run_burst(self._server, prompts, arguments.rate, arguments.output_tokens)
            self._report.add(f"burst {phase}", length, answers, references)
            references[phase] = answers

    def beside_neighbours(self, length: int) -> None:
        arguments, server = self._arguments, self._server
        seconds = arguments.burst / arguments.rate + 0.5
        quiet = Neighbours(server, arguments.neighbours, arguments.vocabulary, 200)
        start = time.perf_counter()
        self._report.add_gaps("neighbours alone", quiet.gaps_ms(start, start + 60))
        prompts = self._prompts(length, arguments.burst, 2)
        for phase in ("cold", "gpu", "reload"):
            if phase != "gpu":
                self._empty()
            neighbours = Neighbours(
                server, arguments.neighbours, arguments.vocabulary, int(seconds / 0.004)
            )
            start = time.perf_counter()
            answers = run_burst(server, prompts, arguments.rate, 1)
            end = max(answer.arrivals[-1] for answer in answers if not answer.error)
            gaps = neighbours.gaps_ms(start, end)
            self._report.add(f"beside neighbours {phase}", length, answers, {})
            self._report.add_gaps(f"neighbours, {phase}", gaps)


def moved_metrics(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The growth of a connector's counters; prints that of bytes and times."""
    moved = {
        name: round(after[name] - before.get(name, 0.0), 6)
        for name in after
        if ("offload" in name or "external" in name or "kv_connector" in name or "pega" in name)
        and after[name] != before.get(name, 0.0)
    }
    for name, value in sorted(moved.items()):
        if re.search(r"(load|save|store)\w*_(bytes|time|duration\w*_sum)(_total)?($|{)", name):
            print(f"  {name.split('{')[0]} +{value}", flush=True)
    return moved


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="model")
    parser.add_argument("--label", default="server")
    parser.add_argument("--lengths", default="2000,10000,32000")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument(
        "--burst", type=int, default=8, help="prompts in the burst; 0 leaves it out"
    )
    parser.add_argument("--burst-length", type=int, default=10000)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second in the burst")
    parser.add_argument(
        "--neighbours", type=int, default=0, help="requests that decode during a second burst"
    )
    parser.add_argument(
        "--fragment", type=int, default=0, metavar="ROUNDS", help="shuffle the free blocks first"
    )
    parser.add_argument(
        "--peer-port", type=int, default=0, help="port of another process whose metrics count"
    )
    parser.add_argument(
        "--save-pause", type=float, default=0.7, help="seconds a connector gets to finish saving"
    )
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    server = Server(arguments.host, arguments.port, arguments.model, arguments.timeout)
    report = Report(arguments.label)
    bench = Bench(server, report, arguments)
    lengths = [int(length) for length in arguments.lengths.split(",") if length]

    bench.warm_up({*lengths, arguments.burst_length if arguments.burst else lengths[0]})
    if arguments.fragment:
        bench.fragment(arguments.fragment)
    before = server.metrics(arguments.peer_port)
    for length in lengths:
        bench.one_by_one(length)
    if arguments.burst:
        bench.burst(arguments.burst_length)
    if arguments.neighbours:
        bench.beside_neighbours(arguments.burst_length)
    moved = moved_metrics(before, server.metrics(arguments.peer_port))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": report.rows, "metrics": moved}, indent=1))


if __name__ == "__main__":
    main()
