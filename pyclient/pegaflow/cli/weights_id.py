"""Prints the id of a model's weights, and keeps it for engines that start later.

MODEL is the argument of `vllm serve`: a directory, a .gguf file, or ORG/NAME. Of ORG/NAME the
snapshot in the local cache of the Hugging Face Hub is used (HF_HUB_CACHE, HF_HOME); nothing is
downloaded. Files without a known SHA-256 digest are read once, by one core at most. The digests are
kept in PEGAFLOW_CACHE_DIR, else in pegaflow/ of XDG_CACHE_HOME or ~/.cache. Equal ids mean equal
weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from pegaflow.cli.machine import format_bytes
from pegaflow.weights import hub
from pegaflow.weights.digests import DigestCache
from pegaflow.weights.files import FORMATS, UnknownWeights, weight_files
from pegaflow.weights.identity import WeightFile, identify, look_at

_PROGRESS_EVERY_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a directory, a file, or ORG/NAME")
    parser.add_argument(
        "--revision",
        default="main",
        help="branch, tag or commit of ORG/NAME (default: %(default)s)",
    )
    parser.add_argument(
        "--load-format",
        default="auto",
        choices=FORMATS,
        help="as vLLM's option of that name (default: %(default)s)",
    )
    parser.add_argument(
        "--download-dir", type=Path, help="as vLLM's option of that name (default: the hub's cache)"
    )


def run(options: argparse.Namespace) -> int:
    try:
        files = look_at(_files(options))
        cache = DigestCache()
        unknown = [file for file in files if file.digest(cache) is None]
        made = identify(files, cache, _progress(unknown, sys.stderr))
    except UnknownWeights as error:
        print(f"pegaflow weights-id: {error}", file=sys.stderr)
        return 1
    print(made)
    if any(file.digest(cache) is None for file in files):
        print(
            f"pegaflow weights-id: the digests are not kept: {cache.directory} cannot be written, "
            "a file changed less than 2 s ago, or its times are one whole second, as in "
            "reproducible images: name such weights with pegaflow.weights_id",
            file=sys.stderr,
        )
    return 0


def _files(options: argparse.Namespace) -> Sequence[Path]:
    """
    Raises:
        UnknownWeights: there are no weights.
    """
    path = Path(options.model)
    if path.exists() or not hub.is_repository(options.model):
        return weight_files(path, options.load_format)
    snapshot = hub.snapshot(hub.repository(options.model, options.download_dir), options.revision)
    return weight_files(snapshot, options.load_format, of_hub=True)


def _progress(unknown: Sequence[WeightFile], stream: TextIO) -> Callable[[int], None]:
    """Called with the size of each piece that was read; prints one line per second."""
    total = sum(file.stamp.size for file in unknown)
    done, began = 0, time.monotonic()
    shown = began

    def on_bytes(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if now - shown >= _PROGRESS_EVERY_S:
            shown = now
            rate = done / (now - began)
            print(
                f"{format_bytes(done)} of {format_bytes(total)}, {format_bytes(int(rate))}/s, "
                f"{max(0, total - done) / rate:.0f} s left",
                file=stream,
            )

    if unknown:
        print(f"hashing {len(unknown)} files, {format_bytes(total)}", file=stream)
    return on_bytes
