"""Where the two vLLMs of --pd --direct run: on the CPU, or on the GPUs that NVIDIA's driver lists.

    python3 -m demo.device OPTIONS OF THE DEMO

prints ``cpu`` or ``cuda`` for ./dev, which installs another vLLM for each. Needs the standard
library only, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

DEVICES = ("auto", "cpu", "cuda")

#: The lane by which the decode engine reads the prefill engine's memory, as its worker logs it.
LANES = {"cpu": "process_vm_readv", "cuda": "cuda"}

#: FlashAttention, and bfloat16, need it.
NEEDED_CAPABILITY = (8, 0)

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader")


class NoGpu(RuntimeError):
    """The machine has no GPU for the demo; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi."""

    index: str
    uuid: str
    capability: tuple[int, int]

    def has_name(self, name: str) -> bool:
        """Whether ``name`` stands for it in CUDA_VISIBLE_DEVICES."""
        return name == self.index or (name.startswith("GPU-") and self.uuid.startswith(name))


def query_driver() -> str:
    """The lines of nvidia-smi about the GPUs: index, UUID, compute capability.

    Raises:
        NoGpu: there is no nvidia-smi, or it failed.
    """
    try:
        done = subprocess.run(
            _QUERY, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except FileNotFoundError:
        raise NoGpu("nvidia-smi, which NVIDIA's driver installs, is not in PATH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoGpu(f"nvidia-smi failed: {error}") from error
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise NoGpu(f"nvidia-smi failed: {''.join(last) or f'status {done.returncode}'}")
    return done.stdout


def find_gpus(
    environment: Mapping[str, str] = os.environ, query: Callable[[], str] = query_driver
) -> list[str]:
    """The usable GPUs, by the names that CUDA_VISIBLE_DEVICES takes; at least one.

    If that variable is set, they are those that it names, in its order.

    Raises:
        NoGpu: there is none.
    """
    listed = _parse_lines(query())
    if not listed:
        raise NoGpu("nvidia-smi lists no GPU")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [gpu.index for gpu in listed] if visible is None else _names(visible)
    named: list[tuple[str, Gpu]] = []
    for name in names:
        found = [gpu for gpu in listed if gpu.has_name(name)]
        # CUDA ends at the first name that stands for no GPU, or for several.
        if len(found) != 1 or found[0] in [gpu for _, gpu in named]:
            break
        named.append((name, found[0]))
    if not named:
        raise NoGpu(f"CUDA_VISIBLE_DEVICES is {visible!r}, which names no GPU of nvidia-smi")
    usable = [name for name, gpu in named if gpu.capability >= NEEDED_CAPABILITY]
    if not usable:
        major, minor = max(gpu.capability for _, gpu in named)
        raise NoGpu(
            f"the best GPU has compute capability {major}.{minor}, and FlashAttention needs "
            f"{NEEDED_CAPABILITY[0]}.{NEEDED_CAPABILITY[1]}"
        )
    return usable


def _parse_lines(text: str) -> list[Gpu]:
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit():
            major, _, minor = fields[2].partition(".")
            capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
            gpus.append(Gpu(fields[0], fields[1], capability))
    return gpus


def _names(visible: str) -> list[str]:
    return [name for part in visible.split(",") if (name := part.strip())]


def engine_environments(
    gpus: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], dict[str, str]]:
    """The variables of the prefill and the decode engine: the first GPU and the second.

    With one GPU both get it.
    """
    # nvidia-smi counts by the bus, CUDA by speed; names of the user keep the user's order.
    order = {} if "CUDA_VISIBLE_DEVICES" in environment else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    prefill, decode = gpus[0], gpus[1 % len(gpus)]
    return (
        order | {"CUDA_VISIBLE_DEVICES": prefill},
        order | {"CUDA_VISIBLE_DEVICES": decode},
    )


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where the engines run, and the reason."""

    #: Names for CUDA_VISIBLE_DEVICES; none: on the CPU.
    gpus: tuple[str, ...]
    reason: str

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


def choose(
    wanted: str,
    environment: Mapping[str, str] = os.environ,
    query: Callable[[], str] = query_driver,
) -> Choice:
    """The place for ``--device wanted``.

    Raises:
        NoGpu: ``cuda`` is wanted and there is no GPU.
    """
    if wanted == "cpu":
        return Choice((), "--device cpu")
    try:
        gpus = tuple(find_gpus(environment, query))
    except NoGpu as reason:
        if wanted == "cuda":
            raise NoGpu(f"--device cuda: {reason}; --device cpu needs no GPU") from None
        return Choice((), str(reason))
    return Choice(gpus, f"GPU {gpus[0]} and GPU {gpus[1]}" if len(gpus) > 1 else f"GPU {gpus[0]}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--pd", action="store_true")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--device", default="auto")
    options, _ = parser.parse_known_args(arguments)
    if not (options.pd and options.direct) or options.device not in DEVICES:
        print("cpu")  # The demo rejects what does not fit.
        return 0
    try:
        print(choose(options.device).device)
    except NoGpu as reason:
        print(f"demo: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
