"""The identity of the weights that vLLM has loaded, as the connector determines it."""

import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegaflow.cli.finding import ADVICE
from pegaflow.cli.server_view import check_instances
from pegaflow.engine import loaded_weights
from pegaflow.vllm import build, weights
from pegaflow.weights import digests, hub
from pegaflow.weights.digests import DigestCache
from pegaflow.weights.files import UnknownWeights, weight_files
from pegaflow.weights.identity import identify, look_at

COMMIT, OTHER = "a" * 40, "b" * 40
FIX = "pegaflow.weights_id"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> DigestCache:
    monkeypatch.setenv("PEGAFLOW_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(digests, "_STILL_NS", 0)
    return DigestCache()


@pytest.fixture(autouse=True)
def engine(monkeypatch) -> SimpleNamespace:
    """The engine core: by default it starts after the files of the test were written."""
    started = SimpleNamespace(ns=sys.maxsize, digests_before_ns=None)

    def of(parallel: Any) -> Any:
        return loaded_weights.EngineCore("core", started.ns, started.digests_before_ns)

    monkeypatch.setattr(loaded_weights.EngineCore, "of", of)
    return started


def config(model: Any, **changes: Any) -> Any:
    """The parts of vLLM's configuration before 0.32 that weights.py reads."""
    values = {
        "revision": None,
        "load_format": "auto",
        "download_dir": None,
        "hf_config": SimpleNamespace(),
        "hf_config_path": None,
        "model_weights": "",
        "weight_transfer_config": None,
        "rank": 0,
        "world_size": 1,
    } | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            **{k: values[k] for k in ("revision", "hf_config", "hf_config_path", "model_weights")},
        ),
        load_config=SimpleNamespace(
            load_format=values["load_format"], download_dir=values["download_dir"]
        ),
        parallel_config=SimpleNamespace(rank=values["rank"], world_size=values["world_size"]),
        weight_transfer_config=values["weight_transfer_config"],
    )


def weights_id(vllm_config: Any, configured: str = "", instance: str = "engine") -> str:
    return weights.weights_id(vllm_config, configured, instance)


def model(directory: Path, content: bytes = b"weights") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(content)
    return directory


def of_files(directory: Path) -> str:
    return identify(look_at(weight_files(directory)), DigestCache())


# ---- identified and rejected weights


def test_a_configured_name_comes_first(tmp_path):
    assert weights_id(config("/no/such", load_format="dummy"), "llama-7") == "named:llama-7"


class Transfer:
    backend = "nccl"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_transfer_config": Transfer()}, "pushed into it while it runs"),
        ({"load_format": "dummy"}, "load format dummy"),
        ({"load_format": "runai_streamer"}, "load format runai_streamer"),
        ({"load_format": "tensorizer"}, "load format tensorizer"),
        ({"load_format": "sharded_state"}, "load format sharded_state"),
        ({"load_format": "bitsandbytes"}, "load format bitsandbytes"),
        ({"load_format": "pegaflow_seeded"}, "load format pegaflow_seeded"),
        ({"model_weights": "s3://bucket/model"}, "s3://bucket/model is in an object store"),
        ({"model_weights": "/elsewhere"}, "come from /elsewhere"),
        ({"hf_config": SimpleNamespace(text_model_id="meta/llama")}, "more than its own directory"),
    ],
)
def test_uncertain_weights_are_rejected_by_every_rank(tmp_path, changes, words):
    made = config(model(tmp_path), **changes)
    assert words in weights.refusal(made, "") and FIX in weights.refusal(made, "")
    assert weights.refusal(made, "a-name") == ""
    with pytest.raises(UnknownWeights, match=FIX):
        weights_id(made)


def test_a_model_in_an_object_store_is_rejected():
    assert "in an object store" in weights.refusal(config("gs://bucket/model"), "")


@pytest.mark.parametrize("load_format", ["auto", "mistral"])
def test_a_model_without_weight_files_is_rejected(tmp_path, load_format):
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(UnknownWeights, match=f"has no weight files.*{FIX}"):
        weights_id(config(tmp_path, load_format=load_format))


def test_both_sides_reject_and_the_log_names_the_option(caplog, monkeypatch):
    made = config("x", load_format="dummy")
    made.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={})
    monkeypatch.setattr(build, "unsupported", lambda *_: "")
    monkeypatch.setattr(build, "kind_of_refusal", lambda *_: "weights")
    with caplog.at_level(logging.WARNING, "vllm.pegaflow"):
        assert type(build.scheduler_side(made, None)).__name__ == "SchedulerOff"
        assert type(build.worker_side(made, None)).__name__ == "WorkerOff"
    assert len([r for r in caplog.records if FIX in r.getMessage()]) == 1


# ---- files of a directory and of the hub's cache


def test_a_directory_has_the_id_of_its_files(tmp_path):
    assert weights_id(config(model(tmp_path))) == of_files(tmp_path)


def repository(cache: Path, **snapshots: bytes) -> Path:
    """A repository of the hub's cache whose main branch is the first snapshot."""
    made = hub.repository("org/name", cache)
    (made / "refs").mkdir(parents=True)
    (made / "blobs").mkdir()
    for commit, content in snapshots.items():
        directory = model(made / "snapshots" / commit, content)
        file = directory / "model.safetensors"
        blob = made / "blobs" / digests.hash_file(file)
        file.replace(blob)
        file.symlink_to(os.path.relpath(blob, directory))
    (made / "refs" / "main").write_text(next(iter(snapshots)))
    return made


class Resolved(str):
    """vLLM 0.32 has huggingface_hub's class: the requested text, and the commit."""

    resolved = OTHER


@pytest.mark.parametrize(
    ("changes", "loaded"),
    [
        ({}, COMMIT),
        ({"revision": "main"}, COMMIT),
        ({"revision": OTHER}, OTHER),
        ({"revision": Resolved("main")}, OTHER),
        ({"hf_config": SimpleNamespace(_commit_hash=OTHER)}, OTHER),
        # The configuration is from another repository, whose commit does not identify the weights.
        ({"hf_config": SimpleNamespace(_commit_hash=OTHER), "hf_config_path": "x/y"}, COMMIT),
        ({"hf_config": SimpleNamespace(_commit_hash="c" * 40)}, COMMIT),
    ],
)
def test_a_repository_is_identified_by_the_commit_that_was_loaded(tmp_path, changes, loaded):
    made = repository(tmp_path, **{COMMIT: b"one", OTHER: b"other"})
    identity = weights_id(config("org/name", download_dir=str(tmp_path), **changes))
    assert identity == of_files(made / "snapshots" / loaded)


def test_a_snapshot_and_a_copy_of_it_have_one_id(tmp_path):
    made = repository(tmp_path / "hub", **{COMMIT: b"one"})
    copy = model(tmp_path / "copy", b"one")
    by_id = weights_id(config("org/name", download_dir=str(tmp_path / "hub")))
    by_path = weights_id(config(made / "snapshots" / COMMIT))
    assert by_id == by_path == weights_id(config(copy))


def test_a_repository_that_is_not_in_the_cache_is_rejected(tmp_path):
    with pytest.raises(UnknownWeights, match=f"has no revision main.*{FIX}"):
        weights_id(config("org/name", download_dir=str(tmp_path)))


def test_a_fetch_at_this_start_is_shared_and_a_branch_that_moved_is_not(tmp_path, engine):
    made = repository(tmp_path, **{COMMIT: b"one"})
    engine.ns = time.time_ns() - 10**10  # all files were written since
    started = config("org/name", download_dir=str(tmp_path))
    assert weights_id(started) == of_files(made / "snapshots" / COMMIT)

    model(made / "snapshots" / OTHER, b"other")
    assert weights_id(started).startswith("private:")
    pinned = config("org/name", download_dir=str(tmp_path), revision=COMMIT)
    assert weights_id(pinned) == of_files(made / "snapshots" / COMMIT)


# ---- unknown or uncertain ids


def test_a_file_that_changed_since_the_engine_started_makes_the_namespace_private(
    tmp_path, engine, caplog
):
    made = config(model(tmp_path))
    engine.ns = time.time_ns() - 10**9
    with caplog.at_level(logging.WARNING, "vllm.pegaflow"):
        assert weights_id(made) == "private:engine:core"
    assert "was changed while the engine started" in caplog.text
    assert f"pegaflow weights-id {tmp_path}" in caplog.text


def test_a_file_from_the_future_is_named_as_the_reason(tmp_path, engine, caplog):
    made = config(model(tmp_path))
    engine.ns = time.time_ns() + 10**9
    ahead = time.time_ns() + 3600 * 10**9
    os.utime(tmp_path / "model.safetensors", ns=(ahead, ahead))
    with caplog.at_level(logging.WARNING, "vllm.pegaflow"):
        assert weights_id(made) == "private:engine:core"
    assert "model.safetensors is in the future" in caplog.text


def test_a_file_that_is_replaced_while_it_is_identified_has_no_id(tmp_path, engine, monkeypatch):
    made = config(model(tmp_path))
    engine.ns = time.time_ns() + 10**7
    threading.Event().wait(0.05)  # until the engine has started, by the clock of the files

    def replace(*arguments: Any) -> str:
        result = identify(*arguments)
        model(tmp_path, b"others!")
        return result

    monkeypatch.setattr(loaded_weights, "identify", replace)
    assert weights_id(made).startswith("private:")


def by_link(root: Path) -> None:
    (root / "new").symlink_to("v2")
    (root / "new").replace(root / "current")


def by_link_above(root: Path) -> None:
    (root / "new").symlink_to("other")
    (root / "new").replace(root / "models")


def by_name(root: Path) -> None:
    (root / "v1").rename(root / "old")
    (root / "v2").rename(root / "v1")


def by_name_above(root: Path) -> None:
    (root / "all").rename(root / "old")
    (root / "other").rename(root / "all")


def by_name_and_an_entry(root: Path) -> None:
    by_name(root)
    (root / "v1" / "deployed").touch()


@pytest.mark.parametrize(
    ("switch", "inside", "model_path"),
    [
        (by_link, "", "current"),
        (by_link_above, "", "models/v1"),
        (by_name, "all", "all/v1"),
        (by_name, "all", "all/current"),
        (by_name, "all", "all/v1/model.safetensors"),
        (by_name_above, "", "all/v1"),
        (by_name_and_an_entry, "all", "all/v1"),
    ],
)
def test_a_path_that_leads_elsewhere_since_the_engine_started_makes_the_namespace_private(
    tmp_path, engine, switch, inside, model_path
):
    root = tmp_path / "root"
    first, other = (root if "/" not in model_path else root / name for name in ("all", "other"))
    model(first / "v1", b"loaded")
    model(first / "v2", b"others")
    model(other / "v1", b"others")
    (first / "current").symlink_to("v1")
    (root / "models").symlink_to("all")
    engine.ns = after_the_files()
    made = config(root / model_path)
    before = weights_id(made)

    switch(root / inside)
    assert before.startswith("sha256:")
    assert weights_id(made) == "private:engine:core"


def after_the_files() -> int:
    """A time between all stamps so far and all later ones."""
    now = time.time_ns() + 10**7
    threading.Event().wait(0.05)
    return now


def test_other_files_beside_a_model_do_not_make_its_namespace_private(tmp_path, engine):
    model(tmp_path / "all" / "v1")
    (tmp_path / "all" / "current").symlink_to("v1")
    (tmp_path / "link").symlink_to("all")
    # ".." behind a link is not the directory that has the link.
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "up").symlink_to("../link/current/../v1")
    engine.ns = after_the_files()
    (tmp_path / "all" / "another").mkdir()
    (tmp_path / "links" / "file").touch()
    (tmp_path / "links" / "file").unlink()
    for path in ("all/v1", "link/current", "links/up", "link/current/../v1/model.safetensors"):
        assert weights_id(config(tmp_path / path)) == of_files(tmp_path / "all" / "v1"), path


def background() -> threading.Thread | None:
    return next((t for t in threading.enumerate() if t.name == "pega-weights"), None)


def test_weights_that_take_long_are_hashed_in_the_background_for_the_next_start(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(loaded_weights, "AT_START_BYTES", 3)
    made = config(model(tmp_path))
    with caplog.at_level(logging.INFO, "vllm.pegaflow"):
        first = weights_id(made)
        if thread := background():
            thread.join(60)
    assert first == "private:engine:core"
    assert "the digests of 1 of its 1 files" in caplog.text
    assert f"pegaflow weights-id {tmp_path}" in caplog.text
    assert "have an id, from the next start on" in caplog.text

    assert weights_id(made) == of_files(tmp_path)


def test_only_one_rank_hashes_and_logs_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(loaded_weights, "AT_START_BYTES", 3)
    with caplog.at_level(logging.INFO, "vllm.pegaflow"):
        other = weights_id(config(model(tmp_path), rank=1, world_size=2))
    assert other == "private:engine:core"
    assert caplog.text == ""
    assert background() is None


def test_ranks_agree_although_a_digest_appears_between_them(tmp_path, monkeypatch, engine):
    """The first rank did not have the digest, so the second must not use it either."""
    monkeypatch.setattr(loaded_weights, "AT_START_BYTES", 3)
    engine.digests_before_ns = time.time_ns()
    made = model(tmp_path)
    first = weights_id(config(made, rank=1, world_size=2))
    of_files(made)  # keeps the digest
    second = weights_id(config(made, rank=1, world_size=2))
    assert first == second == "private:engine:core"

    engine.digests_before_ns = time.time_ns()
    assert weights_id(config(made, rank=1, world_size=2)) == of_files(made)


def test_the_engine_core_is_named_by_its_process(monkeypatch):
    monkeypatch.undo()
    alone = loaded_weights.EngineCore.of(SimpleNamespace(world_size=1))
    several = loaded_weights.EngineCore.of(SimpleNamespace(world_size=2))
    assert alone.name == loaded_weights.EngineCore.of(SimpleNamespace(world_size=1)).name
    assert alone.name != several.name, "the ranks of an engine are named by their parent"
    assert alone.digests_before_ns is None
    assert several.digests_before_ns == several.started_ns <= alone.started_ns < time.time_ns()


def test_doctor_names_the_command_for_an_engine_without_an_id():
    engine = {
        "instance": "e",
        "state": "connected",
        "namespace": "n",
        "factors": [{"name": "weights", "value": "private:e:core"}],
    }
    _, advice = check_instances([engine])
    assert advice.status == ADVICE
    assert "pegaflow weights-id" in advice.fix


# ---- the processor of images, audio and video


def with_images(path: Any, **changes: Any) -> Any:
    made = config(path, **changes)
    made.model_config.multimodal_config = SimpleNamespace()
    return made


def processor_id(vllm_config: Any) -> str:
    return weights.processor_id(vllm_config, "engine")


def with_processor(directory: Path, mean: float, name: str = "preprocessor_config.json") -> Path:
    (model(directory) / name).write_text(f'{{"image_mean": [{mean}, 0.5, 0.5]}}')
    return directory


@pytest.mark.parametrize(
    "name",
    ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"],
)
def test_a_processor_that_was_changed_is_another_factor(tmp_path, name):
    made = with_images(with_processor(tmp_path, 0.1, name))
    first, weights_before = processor_id(made), weights_id(made)
    assert len(first) == 64
    with_processor(tmp_path, 0.2, name)
    assert processor_id(made) not in ("", first)
    assert weights_id(made) == weights_before
    with_processor(tmp_path, 0.1, name)
    assert processor_id(made) == first, "neither the place nor the time is part of it"


def test_models_of_text_and_models_without_such_files_have_no_processor(tmp_path):
    made = config(with_processor(tmp_path / "text", 0.1))
    made.model_config.multimodal_config = None
    assert processor_id(made) == ""
    assert processor_id(with_images(model(tmp_path / "none"))) == ""
    assert processor_id(with_images("org/elsewhere")) == ""


def test_a_processor_is_that_of_the_snapshot_that_was_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_hub_cache", lambda: tmp_path)
    made = repository(tmp_path, **{COMMIT: b"one", OTHER: b"one"})
    for commit, mean in ((COMMIT, 0.1), (OTHER, 0.2)):
        with_processor(made / "snapshots" / commit, mean)
    by_name, by_commit = (
        processor_id(with_images("org/name", revision=revision)) for revision in (None, OTHER)
    )
    assert by_name == processor_id(with_images(with_processor(tmp_path / "copy", 0.1)))
    assert by_commit == processor_id(with_images(with_processor(tmp_path / "copy", 0.2)))


def test_a_processor_that_changed_since_the_engine_started_makes_the_namespace_private(
    tmp_path, engine
):
    made = with_images(with_processor(tmp_path, 0.1))
    engine.ns = after_the_files()
    first = processor_id(made)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert len(first) == 64
    assert processor_id(made) == "private:engine:core"


def test_a_processor_that_cannot_be_read_makes_the_namespace_private(tmp_path):
    made = with_images(model(tmp_path))
    (tmp_path / "preprocessor_config.json").mkdir()
    assert processor_id(made) == "private:engine:core"


def test_a_processor_that_was_downloaded_at_this_start_is_shared(tmp_path, monkeypatch, engine):
    monkeypatch.setattr(weights, "_hub_cache", lambda: tmp_path)
    made = repository(tmp_path, **{COMMIT: b"one"})
    copy = with_processor(tmp_path / "copy", 0.1)
    blob = made / "blobs" / ("1" * 40)
    blob.write_bytes((copy / "preprocessor_config.json").read_bytes())
    (made / "snapshots" / COMMIT / "preprocessor_config.json").symlink_to(blob)
    expected = processor_id(with_images(copy))
    engine.ns = time.time_ns() - 10**10  # all files were written since
    assert processor_id(with_images("org/name")) == expected != ""
