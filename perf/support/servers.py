"""Servers for a benchmark, and the arguments that all benchmarks take."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from perf.support.figure import note
from tests.support.vllm_server import REPOSITORY, PegaServer, VllmOptions, VllmServer, ensure_model


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with --json, --seed and --build-dir."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="print one JSON object per figure")
    made.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    made.add_argument("--build-dir", type=Path, default=REPOSITORY / "build" / "release")
    return made


class Servers:
    """One pegaflow-server, and vLLMs with and without the connector, in one directory."""

    def __init__(
        self, build_dir: Path, directory: Path, pool_size: str, plain: VllmOptions
    ) -> None:
        self.pega = PegaServer(build_dir / "server" / "pegaflow-server", directory, pool_size)
        self.plain = VllmServer(plain, directory / "plain")
        connected = dataclasses.replace(
            plain, connector=self.pega.address, python_path=[build_dir / "python"]
        )
        self.connected = VllmServer(connected, directory / "pega")


@contextlib.contextmanager
def servers(build_dir: Path, pool_size: str, plain: VllmOptions | None = None) -> Iterator[Servers]:
    """Servers that are not started yet; those that were started are stopped at the end.

    ``plain`` has the options of the vLLM without the connector; the other one has the same and the
    connector. When an error ends the run, the logs are kept and their directory is printed.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    directory = Path(tempfile.mkdtemp(prefix="pega-perf-"))
    made = Servers(build_dir, directory, pool_size, plain or VllmOptions(ensure_model()))
    try:
        yield made
    except Exception:
        note(f"the servers' logs are in {directory}")
        raise
    else:
        shutil.rmtree(directory)
    finally:
        for child in (made.connected, made.plain, made.pega):
            child.stop()
