"""The stage of the claims of --model and --draft: one model, whose blocks are counted by kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.children import StartsChildren
from demo.client import Answer, complete, get
from demo.diagnosis import describe
from demo.expectations import Expected, ExpectedCache
from demo.progress import Progress
from demo.prompts import Prompt, PromptMaker
from demo.stage import LONG_DEADLINES, Late, forget_local, wait_until
from demo.subjects import Subject
from tests.support.vllm_server import PegaServer, VllmOptions, VllmServer

#: Tokens of an answer, and of those while the server is killed.
ANSWER, SHORT_ANSWER = 32, 8

POOL_SIZE = "512mb"
#: Enough for all prompts that are asked at once, with blocks that wait for their save.
KV_CACHE_BYTES = 256 << 20
#: Tokens after which the blocks of a window are kept; in production 2,048.
INTERVAL = 256
#: Each token's log-probability is compared, also where an answer has another token.
ALTERNATIVES = 5


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A prompt and those that share its beginning."""

    first: Prompt
    longer: Prompt
    branch: Prompt


@dataclasses.dataclass(frozen=True)
class Counted:
    """The counts of one request, of the engine and of the server."""

    counts: dict[str, int]
    expected: dict[str, int]

    @property
    def differences(self) -> list[str]:
        return [
            f"{name}: {got}, expected {self.expected[name]}"
            for name, got in self.counts.items()
            if got != self.expected[name]
        ]


class KindsStage(StartsChildren):
    """One run's servers and results. Belongs to the main thread; ask() is thread-safe."""

    def __init__(
        self, build_dir: Path, logs: Path, sockets: Path, seed: int, subject: Subject
    ) -> None:
        self.subject = subject
        self.build_dir = build_dir
        self.progress = Progress()
        self.maker = PromptMaker(seed, 2048)
        self.conversations = [self._conversation(length) for length in subject.lengths]
        #: Asked all at once while the server is killed.
        self.long = [
            self.prompt(f"long {number}", subject.prompt(self.maker, 3000), SHORT_ANSWER)
            for number in range(1, 7)
        ]
        self.baseline: dict[str, Answer] = {}
        #: The next turn of each conversation, by the name of its first prompt.
        self.turns: dict[str, Prompt] = {}
        self.figures: dict[str, Any] = {}
        self.diagnosis = ""
        self.pega = PegaServer(build_dir / "server" / "pegaflow-server", sockets, POOL_SIZE)
        self.pega.log_file = logs / "pegaflow-server.log"
        plain = VllmOptions(
            subject.model(),
            dtype=subject.dtype,
            block_size=subject.block_size,
            kv_cache_bytes=KV_CACHE_BYTES,
            arguments=subject.arguments(),
            python_path=subject.plugin(sockets / "plugin") if subject.plugin else [],
        )
        connected = dataclasses.replace(
            plain,
            connector=self.pega.address,
            extra_config=LONG_DEADLINES
            | {"pegaflow.window_interval": INTERVAL, "pegaflow.max_pinned_percent": 50},
            python_path=[build_dir / "python", *plain.python_path],
        )
        # Two servers share a few cores; a small model is not computed faster by several threads.
        env = {"OMP_NUM_THREADS": "1"}
        self.plain = VllmServer(plain, sockets / "plain", env)
        self.plain.log_file = logs / "vllm-without-connector.log"
        self.vllm = VllmServer(connected, sockets / "pega", env)
        self.vllm.log_file = logs / "vllm-with-connector.log"
        self.expected = self._empty_cache()
        #: Bytes of a block of each kind, as the engine has registered them.
        self.page_bytes: dict[str, int] = {}

    def _conversation(self, length: int) -> Conversation:
        first = self.prompt(str(length), self.subject.prompt(self.maker, length))
        head = first.tokens[: length * 2 // 3]
        return Conversation(
            first,
            self.prompt(f"{length}, longer", first.tokens + self.maker.tokens(100)),
            self.prompt(f"{length}, branch", head + self.maker.tokens(300)),
        )

    def next_turn(self, first: Prompt, answer: Answer) -> Prompt:
        text = first.tokens + answer.tokens + self.maker.tokens(60)
        return self.prompt(f"{first.name}, next turn", text)

    def prompt(self, name: str, tokens: tuple[int, ...], answer: int = ANSWER) -> Prompt:
        """A prompt whose answer has ``answer`` tokens.

        The last one is computed only if it was a draft. So that this changes no count, no block
        ends there.
        """
        if self.subject.speculation is not None and (len(tokens) + answer) % self.subject.grid == 0:
            tokens += self.maker.tokens(1)
        return Prompt(name, tokens)

    def _empty_cache(self) -> ExpectedCache:
        subject = self.subject
        # Two blocks of the smallest kind, at most 64 tokens; a hit is a multiple of the largest.
        least = max(subject.grid, 64)
        return ExpectedCache(
            subject.layers, INTERVAL, least, last_block_is_proof=subject.drafts_have_kv
        )

    def describe(self) -> str:
        """The subject in a line, also kept among the figures."""
        subject = self.subject
        layers = [
            f"{one.name}{f' of {one.reach}' if one.reach else ''} (blocks of {one.block_tokens})"
            for one in subject.layers
        ]
        self.figures |= {"model": subject.name, "dtype": subject.dtype, "layers": layers}
        self.figures["change_to_vllm"] = subject.change
        text = f"{subject.name}, {subject.dtype}; layers: {', '.join(layers)}"
        return f"{text}. {subject.change}" if subject.change else text

    def diagnose(self) -> None:
        """Keeps the servers' counters and logs at the first failure."""
        vllm = self.vllm if self.vllm.running() else self.plain
        self.diagnosis = self.diagnosis or describe(vllm, self.pega)

    # -- requests

    def ask(
        self, tokens: Sequence[int], length: int = ANSWER, vllm: VllmServer | None = None
    ) -> Answer:
        server = vllm or self.vllm
        return complete(server.http, tokens, length, alternatives=ALTERNATIVES)

    def ask_counted(
        self, tokens: Sequence[int], length: int, *, is_foreign: bool = False
    ) -> tuple[Answer, Counted]:
        """Answers a prompt with vLLM's own cache empty before and after; it must be the only one.

        Args:
            is_foreign: Another process has written all blocks that are loaded.
        """
        before = self.counts()
        answer = self.ask(tokens, length)
        wanted = self._wanted(self.expected.ask(tokens, answer.tokens), is_foreign=is_foreign)
        # vLLM empties its cache once no block waits for its save.
        self.forget_local()

        def counted() -> dict[str, int]:
            return {name: count - before[name] for name, count in self.counts().items()}

        try:
            # vLLM and the connector count in other processes, and report once per step.
            wait_until("all counts are there", lambda: counted() == wanted, 10)
        except Late:
            pass  # the difference is reported
        return answer, Counted(counted(), wanted)

    def _wanted(self, expected: Expected, *, is_foreign: bool) -> dict[str, int]:
        is_hit = expected.loaded_tokens > 0
        wanted = {"tokens from the cache": expected.loaded_tokens, "tokens of vLLM's own cache": 0}
        foreign = 0
        for one in self.subject.layers:
            loaded = expected.loaded_blocks[one.name] if is_hit else 0
            stored = expected.stored_blocks[one.name]
            foreign += loaded * is_foreign
            wanted |= self._of_kind(one.name, loaded, loaded, stored, stored)
            page = self.page_bytes[one.name]
            wanted[f"bytes loaded ({one.name})"] = loaded * page
            wanted[f"bytes stored ({one.name})"] = stored * page
        return wanted | {"blocks of another process": foreign, "failed loads": 0}

    def _of_kind(self, name: str, *counts: int) -> dict[str, int]:
        places = ("loaded, by vLLM", "loaded, by the server")
        places += ("stored, by vLLM", "stored, by the server")
        return {
            f"blocks {place} ({name})": count for place, count in zip(places, counts, strict=True)
        }

    def forget_local(self) -> None:
        forget_local(self.vllm, self.maker)

    def start_empty(self) -> None:
        """Waits until a new server is used by both sides of the engine."""

        def is_stored() -> bool:
            prompt = self.maker.tokens(2 * self.subject.grid + 10)
            before = self.counts()
            wanted = self._empty_cache().ask(prompt, [0]).stored_blocks
            self.ask(prompt, 1)
            self.forget_local()
            after = self.counts()
            places = {kind: f"blocks stored, by the server ({kind})" for kind in wanted}
            return wanted == {kind: after[at] - before[at] for kind, at in places.items()}

        wait_until("a prompt is stored", is_stored, 60)
        self.expected = self._empty_cache()

    # -- what is counted

    def registered_kinds(self) -> list[tuple[str, int, int]]:
        """The kinds of the engine as its server shows them: name, tokens of a block, and of a
        window, or 0.
        """
        wait_until("the engine is registered", lambda: bool(self._instances()), 30)
        (instance,) = self._instances()
        (rank,) = instance["ranks"]
        kinds = instance.get("kinds")
        if kinds is None:
            self.page_bytes = {"full": rank["page_bytes"]}
            return [("full", self.subject.grid, 0)]
        names = [kind["kind"] for kind in kinds]
        self.page_bytes = dict(zip(names, rank["page_bytes_by_kind"], strict=True))
        # A window of 128 tokens is registered as the 127 before the current one.
        return [
            (
                kind["kind"],
                kind["block_tokens"],
                kind.get("tokens", 0) + (kind["kind"] == "window"),
            )
            for kind in kinds
        ]

    def _instances(self) -> list[dict[str, Any]]:
        _, answer = get(self.pega.http, "/instances")
        return [one for one in answer["instances"] if one["connected"]]

    def counts(self) -> dict[str, int]:
        engine, server = self.vllm.metrics(), self.pega.metrics()
        counts = {
            "tokens from the cache": engine.total("vllm:external_prefix_cache_hits_total"),
            "tokens of vLLM's own cache": engine.total("vllm:prefix_cache_hits_total"),
        }
        for one in self.subject.layers:
            name = one.name
            counts |= self._of_kind(
                name,
                int(engine.total("vllm:pegaflow_loaded_blocks_total", kind=name)),
                int(server.total("pegaflow_kind_loaded_blocks_total", kind=name)),
                int(engine.total("vllm:pegaflow_saved_blocks_total", kind=name)),
                int(server.total("pegaflow_kind_saved_blocks_total", kind=name)),
            )
            for what in ("loaded", "saved"):
                place = f"bytes {what.replace('saved', 'stored')} ({name})"
                counts[place] = server.total(f"pegaflow_kind_{what}_bytes_total", kind=name)
        loaded = "pegaflow_load_blocks_total"
        counts["blocks of another process"] = server.total(loaded, written_by="another_process")
        counts["failed loads"] = self.failed_loads()
        return {name: int(count) for name, count in counts.items()}

    def failed_loads(self) -> int:
        return int(self.vllm.metrics().total("vllm:pegaflow_load_failures_total"))

    def answered(self) -> int:
        return int(self.vllm.metrics().total("vllm:request_success_total"))

    def held(self) -> float:
        """Claims and pins of the server: what loads in flight hold."""
        metrics = self.pega.metrics()
        return metrics.total("pegaflow_claims") + metrics.total("pegaflow_pins")

    def drafts(self, vllm: VllmServer) -> tuple[int, int]:
        """The numbers of drafted tokens and of accepted ones."""
        metrics = vllm.metrics()
        return (
            int(metrics.total("vllm:spec_decode_num_draft_tokens_total")),
            int(metrics.total("vllm:spec_decode_num_accepted_tokens_total")),
        )
