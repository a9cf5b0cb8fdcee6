"""Fake models whose KV is that of numbered heads, the same with any number of ranks."""

from typing import Any

import numpy as np

from tests.python.fake_model import FakeModel

#: A model of each number of KV heads whose cells of one head are whole slots of the pool.
FIELDS: dict[int, dict[str, int]] = {
    heads: {"num_attention_heads": 4, "num_key_value_heads": heads, "head_dim": 128 // heads}
    for heads in (2, 4)
}


class FourHeads(FakeModel):
    """A head's KV depends on the tokens and on its number in the model, not on its rank."""

    heads = 4

    def __init__(self, kv_cache_config: Any, content: int = 0) -> None:
        super().__init__(kv_cache_config)
        stage, self.first_head = divmod(content, self.heads)
        self._content = np.uint64(stage << 48)


class TwoHeads(FourHeads):
    heads = 2


class ShiftedHeads(FourHeads):
    """A planted mistake: each head computes what the next one should."""

    def __init__(self, kv_cache_config: Any, content: int = 0) -> None:
        super().__init__(kv_cache_config, content)
        self.first_head += 1
