"""What changes a request's KV beside its tokens: images, an adapter, a salt.

The fake models compute from these, so that a block of a request with other inputs is detected by
the request that reads it. A salt changes no KV in vLLM, but it keeps the blocks of tenants apart.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.python.harness import WEIGHTS


class Image(NamedTuple):
    """An image whose embeddings take the place of ``tokens`` tokens of the prompt."""

    content: str
    first: int
    tokens: int = 50


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of one request. Immutable."""

    salt: str | None = None
    lora: LoRARequest | None = None
    images: tuple[Image, ...] = ()

    @property
    def seed(self) -> int:
        """The fake model's seed; 0 for a request of text alone."""
        if self.salt is None and self.lora is None:
            return 0
        weights = (Path(self.lora.lora_path) / WEIGHTS).read_text() if self.lora else None
        return zlib.crc32(f"{self.salt}/{weights}".encode())

    def seen(self, tokens: Sequence[int]) -> list[int]:
        """The tokens with what the model sees in place of images."""
        made = list(tokens)
        for image in self.images:
            embedding = zlib.crc32(image.content.encode())
            for position in range(image.first, image.first + image.tokens):
                made[position] = embedding + position - image.first
        return made

    def of_request(self) -> dict[str, Any]:
        """Arguments of vLLM's Request."""
        features = [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=f"hash of {image.content} in {image.tokens}",
                mm_position=PlaceholderRange(offset=image.first, length=image.tokens),
            )
            for image in self.images
        ]
        return {
            "cache_salt": self.salt,
            "lora_request": self.lora,
            "mm_features": features or None,
        }


PLAIN = Inputs()


def allow_images(scheduler: Any, tokens: int = 100_000) -> None:
    """Gives a scheduler the encoder budget that one of a text model does not have."""
    scheduler.max_num_encoder_input_tokens = tokens
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=tokens)
