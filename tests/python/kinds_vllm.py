"""A real vLLM with the real plans and geometry, and a dictionary instead of a server.

``python -m tests.python.kinds_vllm MODEL DTYPE plain|memory REQUEST...`` answers prompts one after
another in one process, each with vLLM's own cache empty, and prints a line of JSON for each: its
tokens, those that were loaded, and the number of blocks of each kind in the store. A REQUEST is
``LENGTH:TOKENS`` for a new prompt, or ``of I HEAD TAIL`` (with commas) for the first HEAD tokens of
request I and its answer, and TAIL others; HEAD 0 means all of them.
"""

import ctypes
import json
import random
import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pegaflow.engine.layout import Geometry
from pegaflow.vllm.build import read_geometries
from tests.python.kinds_engine import KindsConnector, Load, Save, Store

BLOCK = 32
INTERVAL = 256


class MemoryConnector(KindsConnector):
    """Both sides in one process."""

    scheduler: "MemoryConnector"
    worker: "MemoryConnector"

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.places: list[Geometry] = []
        self.received: set[str] = set()
        self.copied: list[Save] = []
        if role == KVConnectorRole.SCHEDULER:
            self.store = Store(self.kinds)
            MemoryConnector.scheduler = self
        else:
            MemoryConnector.worker = self

    # ---- scheduler

    def has_pending_push_work(self) -> bool:
        return bool(self.saves)

    def update_connector_output(self, connector_output: Any) -> None:
        for save in self.copied:
            self.pool.free_blocks(save.pinned)
        self.copied.clear()

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.places = read_geometries(self._kv_cache_config, kv_caches)

    def start_load_kv(self, *arguments: Any, **more: Any) -> None:
        side = MemoryConnector.scheduler
        for load in side.loads:
            self._write(load)
            self.received.add(load.request.request_id)
            side.hits[load.request.request_id] = (load.local, load.tokens - load.local)
            side.requests[load.request.request_id][2].loaded(load.tokens)
        side.loads.clear()
        assert not side.refused

    def wait_for_layer_load(self, *arguments: Any, **more: Any) -> None:
        return None

    save_kv_layer = wait_for_layer_load

    def wait_for_save(self) -> None:
        side = MemoryConnector.scheduler
        for save in side.saves:
            members = self.kinds.kinds[save.what.kind].members
            pages = [
                self._page(group, block)
                for group, block in zip(members, save.what.ids, strict=True)
            ]
            content = [b"".join(ctypes.string_at(*piece) for piece in page) for page in pages]
            side.store.blocks[save.what.kind].setdefault(save.key, content)
        side.copied += side.saves
        side.saves.clear()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        self.wait_for_save()
        received, self.received = self.received, set()
        return None, received or None

    def _page(self, group: int, block: int) -> list[tuple[int, int]]:
        """Addresses and sizes of a block's pieces."""
        return [
            (piece.address + block * piece.stride, piece.size)
            for piece in self.places[group].segments
        ]

    def _write(self, load: Load) -> None:
        for one, contents in zip(load.ranges, load.contents, strict=True):
            ids = iter(one.blocks)
            for content in contents:
                for member, group in enumerate(self.kinds.kinds[one.kind].members):
                    offset = 0
                    for address, size in self._page(group, next(ids)):
                        part = content[member][offset : offset + size]
                        ctypes.memmove(address, part, size)
                        offset += size
                    assert offset == len(content[member])


def patch_granite() -> None:
    """vLLM's scan on a CPU returns no states inside of a chunk, and so cannot keep them there."""
    import dataclasses

    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    original = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        return dataclasses.replace(
            spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None
        )

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec


def main(model: str, dtype: str, mode: str, *requests: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    patch_granite()
    more: dict[str, Any] = {}
    if dtype == "float32" and "granite" not in model:
        more["block_size"] = BLOCK
    if mode == "memory":
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector="MemoryConnector",
            kv_connector_module_path="tests.python.kinds_vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"interval": INTERVAL, "room": 10_000},
        )
    llm = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=96 << 20,
        max_num_batched_tokens=1024,
        enable_prefix_caching=True,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        **more,
    )
    draw = random.Random(5)
    texts: list[list[int]] = []
    for line in requests:
        if line.startswith("of,"):
            _, index, head, tail = line.split(",")
            prompt = texts[int(index)][: int(head) or None]
            prompt = prompt + [draw.randrange(3, 2048) for _ in range(int(tail))]
        else:
            prompt = [draw.randrange(3, 2048) for _ in range(int(line))]
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        answer = list(output.outputs[0].token_ids)
        texts.append(prompt + answer)
        told = {"prompt": prompt, "answer": answer}
        if mode == "memory":
            import tests.python.kinds_vllm as module

            side = module.MemoryConnector.scheduler
            # An engine without requests makes no more steps; these blocks are pinned.
            module.MemoryConnector.worker.wait_for_save()
            side.update_connector_output(None)
            (told["loaded"],) = [loaded for _, loaded in side.hits.values()]
            told["local"] = [local for local, _ in side.hits.values()][0]
            side.hits.clear()
            told["stored"] = {
                kind.rule.label: count
                for kind, count in zip(side.kinds.kinds, side.store.counts(), strict=True)
            }
        print("RESULT " + json.dumps(told), flush=True)
        assert llm.reset_prefix_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
