"""The stage of the claims of --sglang: SGLang's cache classes in processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from demo.children import StartsChildren
from demo.diagnosis import describe
from demo.progress import Progress
from demo.prompts import PromptMaker
from tests.support.child_process import ChildFailed
from tests.support.sglang_process import EngineFailed, EngineProcess
from tests.support.vllm_server import PegaServer

PAGE = 16
POOL_SIZE = "64mb"

#: The deadlines of an engine whose server has a core; here all share two.
PATIENT = dict.fromkeys(
    ("lookup_deadline_ms", "open_deadline_ms", "reserve_deadline_ms", "load_patience_ms"), 5000
) | {"call_wait_ms": 100, "pass_wait_ms": 1000, "pin_s": 0.5}


@dataclasses.dataclass(frozen=True)
class Route:
    """One way from SGLang to the server, with a shape of model."""

    name: str
    kind: str
    module: str
    tree: dict[str, Any]
    has_states: bool = False
    #: Of one page of the only pool; 0 where there are several.
    page_bytes: int = 0

    @property
    def is_hicache(self) -> bool:
        return self.kind == "HiCacheEngine"


_LINKER = ("LinkerEngine", "tests.support.sglang_linker_engine")
#: Two layers of keys and values, 2 heads of 32 elements of 2 bytes.
_PAGE_BYTES = 2 * 2 * PAGE * 2 * 32 * 2

ROUTES = (
    Route("HiCache", "HiCacheEngine", "tests.support.sglang_engine", {}, page_bytes=_PAGE_BYTES),
    Route("linker, full attention", *_LINKER, {}, page_bytes=_PAGE_BYTES),
    Route(
        "linker, windows",
        *_LINKER,
        {"components": ("FULL", "SWA"), "sliding_window_size": 2 * PAGE, "layers": 3},
    ),
    Route(
        "linker, states",
        *_LINKER,
        {
            "components": ("FULL", "MAMBA"),
            "enable_mamba_extra_buffer": True,
            "layers": 3,
            "mamba_cache_size": 60,
        },
        has_states=True,
    ),
)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A prompt of whole pages, and two that share its beginning."""

    first: list[int]
    longer: list[int]
    branch: list[int]


class SglangStage(StartsChildren):
    """One run's server and results. Belongs to the main thread."""

    def __init__(self, build_dir: Path, logs: Path, sockets: Path, seed: int) -> None:
        """
        Raises:
            ChildFailed: SGLang is not installed.
        """
        # Its import prepares SGLang's modules, which replaces others: for this setup alone.
        from tests.support import sglang_classes

        if reason := sglang_classes.missing():
            raise ChildFailed("SGLang is missing", reason)
        self._installed = str(sglang_classes.DIRECTORY)
        self.progress = Progress()
        self.maker = PromptMaker(seed, 2048)
        self.figures: dict[str, Any] = {}
        self.diagnosis = ""
        self.pega = PegaServer(build_dir / "server" / "pegaflow-server", sockets, POOL_SIZE)
        self.pega.log_file = logs / "pegaflow-server.log"

    @property
    def versions(self) -> dict[str, str]:
        found = importlib.metadata.distributions(name="sglang", path=[self._installed])
        return {"sglang": next(iter(found)).version}

    def describe(self) -> str:
        """For the first line of the output."""
        self.figures |= {"routes": [route.name for route in ROUTES], "page_tokens": PAGE}
        return f"{len(ROUTES)} routes, pages of {PAGE} tokens"

    def conversations(self) -> list[Conversation]:
        """New prompts: each route has its own."""
        made = []
        for pages in (6, 12, 24):
            first = list(self.maker.tokens(pages * PAGE))
            head = first[: pages * 2 // 3 * PAGE]
            made.append(
                Conversation(
                    first,
                    first + list(self.maker.tokens(3 * PAGE)),
                    head + list(self.maker.tokens(4 * PAGE)),
                )
            )
        return made

    @contextlib.contextmanager
    def engine(self, route: Route) -> Iterator[EngineProcess]:
        """A process with the route's tree.

        Raises:
            ChildFailed: it ended, or raised.
        """
        extra: dict[str, Any] = {"pegaflow.host": self.pega.address}
        for name, value in PATIENT.items():
            extra[f"pegaflow.{name}"] = value
        try:
            with EngineProcess(
                route.kind, module=route.module, extra=extra, **route.tree
            ) as process:
                if not process.do("ready"):
                    raise ChildFailed(f"{route.name}: the engine is not served", "")
                yield process
        except EngineFailed as error:
            raise ChildFailed(f"{route.name}: an engine raised", str(error)) from error

    def loaded_bytes(self) -> int:
        return int(self.pega.metrics().total("pegaflow_load_bytes_total"))

    def diagnose(self) -> None:
        """Keeps the server's counters and log at the first failure."""
        self.diagnosis = self.diagnosis or describe(None, self.pega)

    @staticmethod
    def end() -> None:
        """Ends the process that forks engines, which waits for this one otherwise."""
        forkserver._forkserver._stop()
        resource_tracker._resource_tracker._stop()
