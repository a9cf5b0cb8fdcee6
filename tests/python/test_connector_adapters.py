"""Blocks of an adapter are named by the content of its files, if that content is certain."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from pegaflow.vllm.adapters import AdapterFiles, Adapters, salt
from pegaflow.weights.digests import DigestCache
from tests.python.harness import WEIGHTS, Engine, train, vllm_config
from tests.python.test_connector_engine import KINDS

HASH = bytes(range(32))
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def digests_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setenv("PEGAFLOW_CACHE_DIR", str(tmp_path / "cache"))


def key(lora: LoRARequest, adapters: Adapters | None = None) -> bytes:
    """The key of this adapter's blocks in an engine; empty if none."""
    adapters = adapters or Adapters()
    adapters.look_again()  # like the connector, for each new request
    known = adapters.wait(lora, WAIT_S)
    adapter = adapters.of(SimpleNamespace(lora_request=lora))
    return adapter.key(HASH) if known and adapter.digest else b""


def reason(lora: LoRARequest, adapters: Adapters) -> str:
    return adapters.of(SimpleNamespace(lora_request=lora)).refused


def load(lora: LoRARequest, then: Any = lambda: None) -> None:
    """Loads an adapter like vLLM's engine core for a client's request."""
    core = object.__new__(EngineCore)
    core.model_executor = SimpleNamespace(add_lora=lambda request: then() or True)
    assert core.add_lora(lora)


# ---- the files


def test_every_byte_of_every_file_is_in_the_key(tmp_path):
    size = 300_000
    first = key(train(tmp_path / "a", "w" * size, name="x", number=1))
    assert len(first) == 32 and first != HASH
    assert key(train(tmp_path / "b", "w" * size, name="x", number=1)) == first
    middle = "w" * (size // 2) + "v" + "w" * (size // 2 - 1)
    assert key(train(tmp_path / "c", middle, name="x", number=1)) != first

    other = train(tmp_path / "d", "w" * size, name="x", number=1)
    (tmp_path / "d" / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 2}')
    wait_stable(tmp_path / "d")
    assert key(other) != first
    more = train(tmp_path / "e", "w" * size, name="x", number=1)
    (tmp_path / "e" / "new_embeddings.bin").write_text("e")
    wait_stable(tmp_path / "e")
    assert key(more) != first
    assert key(LoRARequest("x", 1, str(tmp_path / "a"), is_3d_lora_weight=True)) != first
    assert key(LoRARequest("x", 1, str(tmp_path / "a")), Adapters("torch.float16")) != first


@pytest.mark.parametrize(
    "options",
    [
        {"lora_dtype": "bfloat16"},
        {"lora_target_modules": ["q_proj"]},
        {"lora_target_modules": ["k_proj", "q_proj"]},
        {"enable_tower_connector_lora": True},
        {"enable_mixed_moe_lora_format": True},
        {"enable_moe_shared_loras": True},
    ],
)
def test_options_that_change_which_weights_apply_are_in_the_key(tmp_path, options):
    lora = train(tmp_path / "a", "weights", name="x", number=1)

    def made(**options: Any) -> bytes:
        config = vllm_config("unix:/nowhere.sock", enable_lora=True, **options)
        return key(lora, Adapters(salt(config)))

    assert made(**options) not in (b"", made(), made(lora_target_modules=["o_proj"]))
    assert made(**options) == made(**{name: _reversed(value) for name, value in options.items()})


def _reversed(value: Any) -> Any:
    return value[::-1] if isinstance(value, list) else value


def test_the_keys_of_engines_without_these_options_are_unchanged():
    assert salt(vllm_config("unix:/nowhere.sock", enable_lora=True)) == "torch.float32"
    assert salt(SimpleNamespace(lora_config=None)) == ""


def wait_stable(directory: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    wake = threading.Event()
    while not AdapterFiles(str(directory)).is_stable(time.time_ns()):
        assert not wake.wait(0.005)
        assert time.monotonic() < deadline


def test_two_adapters_of_one_name_have_keys_of_their_own(tmp_path):
    adapters = Adapters()
    one = train(tmp_path / "a", "one", name="x", number=1)
    two = train(tmp_path / "b", "two", name="x", number=2)
    assert key(one, adapters) != key(two, adapters)


def test_a_key_is_as_long_as_vllms_hash(tmp_path):
    adapters = Adapters()
    lora = train(tmp_path / "a", "one", name="x", number=1)
    assert adapters.wait(lora, WAIT_S)
    adapter = adapters.of(SimpleNamespace(lora_request=lora))
    assert len(adapter.key(HASH[:16])) == 16
    assert adapter.key(HASH[:16]) != adapter.key(HASH[:15] + b"\0")


@pytest.mark.parametrize("path", ["", "not/there", "org/name/more"])
def test_an_adapter_without_files_is_rejected(tmp_path, monkeypatch, path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    adapters = Adapters()
    lora = LoRARequest("x", 1, path or str(tmp_path))
    assert key(lora, adapters) == b""
    assert reason(lora, adapters)


# ---- the adapter that the engine has loaded


def test_files_that_change_after_the_load_are_rejected_permanently(tmp_path):
    adapters = Adapters()
    lora = train(tmp_path / "a", "monday", name="x", number=1)
    load(lora)
    train(tmp_path / "a", "tuesday", name="x", number=1)

    assert key(lora, adapters) == b""
    assert "changed" in reason(lora, adapters)

    # Unchanged again, but vLLM may have read them in between.
    train(tmp_path / "a", "monday", name="x", number=1)
    assert key(lora, adapters) == b""


def test_files_that_change_while_requests_run_are_detected(tmp_path):
    adapters = Adapters()
    lora = train(tmp_path / "a", "monday", name="x", number=1)
    assert key(lora, adapters)
    adapter = adapters.of(SimpleNamespace(lora_request=lora))
    adapters.look_again()
    assert adapters.is_known(adapter)
    train(tmp_path / "a", "tuesday", name="x", number=1)
    adapters.look_again()
    assert not adapters.is_known(adapter)


def test_files_that_change_during_the_load_are_rejected(tmp_path):
    adapters = Adapters()
    lora = train(tmp_path / "a", "monday", name="x", number=1)
    load(lora, lambda: (tmp_path / "a" / WEIGHTS).write_text("tuesday") and None)
    assert key(lora, adapters) == b""


def test_files_written_at_the_moment_of_the_load_are_rejected(tmp_path, monkeypatch):
    adapters = Adapters()
    lora = train(tmp_path / "a", "monday", name="x", number=1)
    now = (tmp_path / "a" / WEIGHTS).stat().st_ctime_ns + 1
    clock = SimpleNamespace(time_ns=lambda: now, monotonic=time.monotonic)
    monkeypatch.setattr("pegaflow.vllm.adapters.time", clock)
    assert key(lora, adapters) == b""
    assert "written while it was loaded" in reason(lora, adapters)


def test_files_with_times_in_the_future_are_rejected_with_that_reason(tmp_path):
    adapters = Adapters()
    lora = train(tmp_path / "a", "monday", name="x", number=1)
    now = time.time_ns() + 60_000_000_000
    os.utime(tmp_path / "a" / WEIGHTS, ns=(now, now))
    assert key(lora, adapters) == b""
    assert "in the future" in reason(lora, adapters)


@pytest.mark.parametrize(("part_ns", "wait_ns"), [(0, 2_000_000_000), (1_000_000, 20_000_000)])
def test_files_are_trusted_once_their_file_system_would_show_a_change(tmp_path, part_ns, wait_ns):
    """A file system whose stamps have whole seconds shows the next change a second later."""
    train(tmp_path / "a", "monday", name="x", number=1)
    changed = (time.time_ns() // 10**9 + 60) * 10**9 + part_ns
    os.utime(tmp_path / "a" / WEIGHTS, ns=(changed, changed))
    files = AdapterFiles(str(tmp_path / "a"))
    assert not files.is_stable(changed + wait_ns)
    assert files.is_stable(changed + wait_ns + 1)


def test_an_adapter_loaded_again_unchanged_keeps_its_key(tmp_path):
    adapters = Adapters()
    lora = train(tmp_path / "a", "monday", name="x", number=1)
    load(lora)
    first = key(lora, adapters)
    for again in (
        LoRARequest("x", 1, str(tmp_path / "a"), load_inplace=True),
        LoRARequest("x", 2, str(tmp_path / "a")),
    ):
        load(again)
        assert key(again, adapters) == first != b""


@pytest.mark.parametrize("how", ["in place", "under a new id"])
def test_an_adapter_that_is_retrained_and_reloaded_has_no_key(tmp_path, how):
    # vLLM's own cache has blocks of the former adapter under the same hashes.
    adapters = Adapters()
    lora = train(tmp_path / "a", "monday", name="x", number=1)
    load(lora)
    assert key(lora, adapters)
    inplace = {"load_inplace": True} if how == "in place" else {}
    again = train(tmp_path / "a", "tuesday", name="x", number=1 if inplace else 2, **inplace)
    load(again)
    assert key(again, adapters) == b""
    # From a new path it has a key, and so it has in another engine.
    moved = train(tmp_path / "b", "tuesday", name="x", number=3)
    load(moved)
    assert key(moved, adapters) == key(again) != b""


def test_an_adapter_that_replaces_another_ends_the_other_one(tmp_path):
    adapters = Adapters()
    one = train(tmp_path / "a", "one", name="x", number=1)
    load(one)
    running = adapters.of(SimpleNamespace(lora_request=one))
    assert adapters.wait(one, WAIT_S)

    two = train(tmp_path / "b", "two", name="x", number=1, load_inplace=True)
    load(two)

    assert not adapters.is_known(running), "its request continues with the new weights"
    assert key(two, adapters)


def test_two_adapters_with_one_id_have_no_keys(tmp_path):
    adapters = Adapters()
    one = train(tmp_path / "a", "one", name="x", number=1)
    two = train(tmp_path / "b", "two", name="y", number=1)
    assert key(one, adapters)
    assert key(two, adapters) == b""
    assert key(one, adapters) == b""


# ---- the hub


def hub_adapter(cache: Path, commit: str, weights: str) -> None:
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / commit
    train_at = repository / "blobs-of-the-test" / commit
    train_at.mkdir(parents=True)
    train(train_at, weights, name="x", number=1)
    snapshot.mkdir(parents=True)
    for file in train_at.iterdir():
        (snapshot / file.name).symlink_to(file)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    wait_ref(repository / "refs" / "main")


def wait_ref(ref: Path) -> None:
    wake = threading.Event()
    while time.time_ns() < ref.stat().st_ctime_ns + 100_000_000:
        assert not wake.wait(0.02)


def test_a_repository_is_its_snapshot_until_its_branch_moves(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub_adapter(tmp_path, "a" * 40, "one")
    adapters = Adapters()
    lora = LoRARequest("x", 1, "org/name")
    load(lora)
    first = key(lora, adapters)
    assert first

    hub_adapter(tmp_path, "b" * 40, "two")
    assert key(lora, adapters) == b""
    assert key(lora) not in (b"", first)


def downloads(cache: Path, *commits: str) -> Any:
    """A load of org/name by vLLM's workers that is not in the cache."""

    def download() -> None:
        for commit in commits:
            hub_adapter(cache, commit * 40, commit)

    return download


def test_an_adapter_that_vllm_downloads_is_cached_from_its_load_on(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    adapters = Adapters()
    lora = LoRARequest("x", 1, "org/name")
    load(lora, downloads(tmp_path, "a"))
    first = key(lora, adapters)
    assert first
    assert key(lora) == first, "an engine that finds it in the cache has another key"

    hub_adapter(tmp_path, "b" * 40, "b")
    assert key(lora, adapters) == b""


def test_files_of_a_recent_download_are_those_of_the_load(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("tests.python.test_connector_adapters.wait_ref", lambda ref: None)
    adapters = Adapters()
    lora = LoRARequest("x", 1, "org/name")
    load(lora, downloads(tmp_path, "a"))
    assert key(lora, adapters)


def test_an_adapter_whose_branch_moves_in_its_first_load_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    adapters = Adapters()
    lora = LoRARequest("x", 1, "org/name")
    load(lora, downloads(tmp_path, "a", "b"))  # one worker has read a, another one b
    assert key(lora, adapters) == b""
    assert "moved" in reason(lora, adapters)


def test_a_failed_download_is_retried(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    adapters = Adapters()
    lora = LoRARequest("x", 1, "org/name")
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    load(lora)
    load(lora, lambda: snapshot.mkdir(parents=True))
    snapshot.rmdir()
    load(lora, downloads(tmp_path, "a"))
    assert key(lora, adapters)


# ---- in an engine


def test_a_retrained_adapter_gets_no_block_of_the_former_one(pega, prompt, tmp_path):
    tokens = prompt(100)
    monday = train(tmp_path / "x", "monday", name="x", number=1)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        assert engine.ask("cold", tokens, lora=monday).loaded == 0
        engine.reset_local()
        assert engine.ask("again", tokens, lora=monday).loaded == 96
    with Engine(pega.address) as engine:
        engine.wait_ready()
        assert engine.ask("restarted", tokens, lora=monday).loaded == 96
    tuesday = train(tmp_path / "x", "tuesday", name="x", number=1)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        # ask() checks the answer, and the fake model each block that it reads.
        assert engine.ask("other weights", tokens, lora=tuesday).loaded == 0
        engine.reset_local()
        assert engine.ask("its own", tokens, lora=tuesday).loaded == 96


def test_an_adapter_that_is_retrained_during_an_engines_run_is_not_cached(pega, prompt, tmp_path):
    tokens = prompt(100)
    monday = train(tmp_path / "x", "monday", name="x", number=1)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        engine.ask("cold", tokens, lora=monday)
        engine.reset_local()
        tuesday = train(tmp_path / "x", "tuesday", name="x", number=1)
        assert engine.ask("loaded again", tokens, lora=tuesday).loaded == 0
        engine.reset_local()
        assert engine.ask("again", tokens, lora=tuesday).loaded == 0
        assert engine.stats["misses{adapter}"] == 2
        assert engine.ask("the base model", tokens).loaded == 0
        engine.reset_local()
        assert engine.ask("the base model again", tokens).loaded == 96


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_files_replaced_between_a_steps_plan_and_its_end_name_no_block(
    pega, prompt, tmp_path, kind, tokens
):
    """The workers may read the files at any time in a step, even after its plan was made.

    With one token the blocks are collected when the request ends, else in the next step.
    """
    words = prompt(100)
    lora = train(tmp_path / "x", "monday", name="x", number=1)

    def replace(output: Any) -> None:
        if output.scheduled_new_reqs:
            train(tmp_path / "x", "tuesday", name="x", number=1)

    with Engine(pega.address, **KINDS[kind]) as engine:
        engine.wait_ready()
        engine.on_schedule = replace
        assert engine.ask("cold", words, tokens, lora=lora).loaded == 0
        engine.run()
        assert engine.stats["saves"] == 0
    train(tmp_path / "x", "monday", name="x", number=1)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        assert engine.ask("of monday", words, lora=lora).loaded == 0


def test_the_end_of_a_request_checks_the_files_again(pega, prompt, tmp_path):
    words = prompt(100)
    lora = train(tmp_path / "x", "monday", name="x", number=1)

    with Engine(pega.address) as engine:
        engine.wait_ready()
        adapters = engine.connector._scheduler._adapters

        def replace(output: Any) -> None:
            if output.scheduled_new_reqs:
                # Like another request of the adapter, in the plan of this step.
                assert adapters.is_known(adapters.of(SimpleNamespace(lora_request=lora)))
                train(tmp_path / "x", "tuesday", name="x", number=1)

        engine.on_schedule = replace
        engine.ask("cold", words, 1, lora=lora)
        engine.run()
        assert engine.stats["saves"] == 0
    train(tmp_path / "x", "monday", name="x", number=1)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        assert engine.ask("of monday", words, lora=lora).loaded == 0


class DeadDisk:
    """Files that respond until the test blocks them, and then with their state of that time."""

    def __init__(self, monkeypatch: Any) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        real = AdapterFiles

        def look(path: str) -> AdapterFiles:
            made = real(path)
            self.asked.set()
            assert self.answers.wait(WAIT_S)
            return made

        monkeypatch.setattr("pegaflow.vllm.adapters.AdapterFiles", look)


@pytest.mark.parametrize("length", [11, 100])
def test_a_disk_that_does_not_respond_stops_no_engine(pega, prompt, tmp_path, monkeypatch, length):
    words, others = prompt(length), prompt(100)
    lora = train(tmp_path / "x", "monday", name="x", number=1)
    params = {"pegaflow": {"save_tail": True}}
    disk = DeadDisk(monkeypatch)
    with Engine(pega.address, extra={"pegaflow.min_load_tokens": 1}) as engine:
        engine.wait_ready()
        adapters = engine.connector._scheduler._adapters
        assert adapters.wait(lora, WAIT_S)
        adapters.looks.patience_s = 0.05
        adapters.wait = lambda lora, timeout_s: False  # the harness waits for the files
        disk.answers.clear()
        disk.asked.clear()
        try:
            # The files are unknown, so nothing is saved, however the request ends.
            assert engine.ask("dead", words, 1, lora=lora, params=params).loaded == 0
            assert disk.asked.is_set()
            engine.reset_local()
            assert engine.ask("dead too", words, lora=lora).loaded == 0
            engine.reset_local()
            assert engine.stats["saves"] == 0
            assert engine.stats["misses{adapter}"] == 2
            assert engine.ask("the base model", others).loaded == 0
            engine.reset_local()
            assert engine.ask("the base model again", others).loaded == 96
        finally:
            disk.answers.set()
        adapters.looks.patience_s = WAIT_S
        assert engine.ask("alive", prompt(100), lora=lora).loaded == 0
        engine.run(lambda: adapters.is_known(adapters.of(SimpleNamespace(lora_request=lora))))


def test_an_earlier_check_does_not_cover_later_computation(tmp_path, monkeypatch):
    adapters = Adapters()
    lora = train(tmp_path / "a", "monday", name="x", number=1)
    assert key(lora, adapters)
    adapter = adapters.of(SimpleNamespace(lora_request=lora))
    adapters.looks.patience_s = 0.05
    disk = DeadDisk(monkeypatch)
    disk.answers.clear()
    adapters.look_again()
    assert not adapters.is_known(adapter)
    assert disk.asked.wait(WAIT_S)

    train(tmp_path / "a", "tuesday", name="x", number=1)
    adapters.looks.patience_s = WAIT_S
    disk.answers.set()
    while not adapter.refused:
        adapters.look_again()
        assert not adapters.is_known(adapter)


class SlowCache(DigestCache):
    """A slow disk."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def get(self, *args: Any, **kwargs: Any) -> str | None:
        assert self.may_go_on.wait(WAIT_S)
        return super().get(*args, **kwargs)


def test_the_engine_does_not_wait_for_a_digest(pega, prompt, tmp_path):
    tokens = prompt(100)
    lora = train(tmp_path / "x", "monday", name="x", number=1)
    with Engine(pega.address) as engine:
        engine.wait_ready()
        side = engine.connector._scheduler
        side._adapters = Adapters(cache=SlowCache())
        side._adapters.looks.patience_s = WAIT_S
        side._adapters.wait = lambda lora, timeout_s: False  # only the harness of other tests waits
        assert engine.ask("early", tokens, lora=lora).loaded == 0
        assert engine.stats["misses{adapter}"] == 1
        assert engine.stats["saves"] == 0
        engine.reset_local()

        side._adapters._cache.may_go_on.set()
        assert Adapters.wait(side._adapters, lora, WAIT_S)
        assert engine.ask("saved", tokens, lora=lora).loaded == 0
        engine.reset_local()
        assert engine.ask("again", tokens, lora=lora).loaded == 96
