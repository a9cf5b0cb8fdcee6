"""The files that hold a model's weights: the choice that vLLM's default loader makes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

#: The patterns of each load format; the first one with a match is loaded.
_PATTERNS = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin", "*.pt"),
}
#: Load formats whose loaders read files of the model's directory. "gguf" reads one named file.
FORMATS = ("auto", "gguf", *_PATTERNS)

_INDEX = {
    "mistral": "consolidated.safetensors.index.json",
    "hf": "model.safetensors.index.json",
}
#: Files that training leaves beside the weights.
_OF_THE_TRAINING = (
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
)
_GGUF_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


class UnknownWeights(Exception):
    """The weights cannot be identified; the text names the reason and the fix."""


def weight_files(model: Path, load_format: str = "auto", *, of_hub: bool = False) -> list[Path]:
    """The files with the weights of a model, in the order in which a loader reads them.

    Args:
        model: A directory, or one file.
        load_format: vLLM's ``load_format``, one of ``FORMATS``.
        of_hub: The directory is a snapshot of the hub's cache. Whether vLLM takes Mistral's files
            then depends on the repository's own list, so both kinds count if both exist.

    Raises:
        UnknownWeights: there are none, one that an index names is missing, or the directory may
            not be read.
    """
    try:
        return _weight_files(model, load_format, of_hub)
    except OSError as error:
        raise UnknownWeights(f"{model} cannot be read: {error}") from None


def _weight_files(model: Path, load_format: str, of_hub: bool) -> list[Path]:
    if model.is_file():
        return _parts(model)
    if not model.is_dir():
        raise UnknownWeights(f"{model} is neither a directory nor a file")
    os.listdir(model)  # raises where glob would find nothing
    if load_format == "auto":
        consolidated = _loaded(model, "mistral")
        files = consolidated if consolidated and not of_hub else _loaded(model, "hf")
        files = sorted({*files, *consolidated}, key=_natural) if of_hub else files
    else:
        files = _loaded(model, load_format) if load_format in _PATTERNS else []
    if not files:
        raise UnknownWeights(f"{model} has no weight files of the load format {load_format}")
    return files


def _loaded(model: Path, load_format: str) -> list[Path]:
    for pattern in _PATTERNS[load_format]:
        files = [path for path in model.glob(pattern) if not path.name.startswith(".")]
        if not files:
            continue
        if pattern.endswith(".safetensors"):
            files = _indexed(model, load_format, files)
        else:
            files = [path for path in files if not path.name.endswith(_OF_THE_TRAINING)]
        return sorted(files, key=_natural)
    return []


def _indexed(model: Path, load_format: str, files: Iterable[Path]) -> list[Path]:
    """The files that the index names; all of them without an index."""
    index = model / _INDEX.get(load_format, _INDEX["hf"])
    if not index.is_file():
        return list(files)
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        named = {model / name for name in names}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnknownWeights(f"{index} is not an index of weights: {error!r}") from None
    if missing := sorted(str(path) for path in named if not path.is_file()):
        raise UnknownWeights(f"{index} names {missing[0]}, which is missing")
    return list(named)


def _parts(model: Path) -> list[Path]:
    """All parts of a GGUF file that was split; else the file alone."""
    if not (match := _GGUF_PART.fullmatch(model.name)):
        return [model]
    count = int(match[2])
    parts = [
        model.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    if missing := [path for path in parts if not path.is_file()]:
        raise UnknownWeights(f"{missing[0]} is missing")
    return parts


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts numbers by value, as loaders do: shard 2 before shard 10."""
    words = re.split(r"(\d+)", str(path))
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]
