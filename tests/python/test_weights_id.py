"""The id of weights, from files: equal ids mean equal weights, in any place and any form."""

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pegaflow.cli import weights_id as command
from pegaflow.weights import digests, hub
from pegaflow.weights.digests import DigestCache
from pegaflow.weights.files import UnknownWeights, weight_files
from pegaflow.weights.identity import identify, look_at

LAYERS = 6
#: One tensor's bytes; several of them exceed any sample of a file's edges.
TENSOR = 40_000
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def cache_directory(tmp_path_factory, monkeypatch) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PEGAFLOW_CACHE_DIR", str(directory))
    return directory


Tensors = dict[str, bytes]


def base_model(chance: random.Random) -> Tensors:
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    names += [f"model.layers.{i}.{part}.weight" for i in range(LAYERS) for part in PARTS]
    return {name: chance.randbytes(TENSOR) for name in names}


def write(directory: Path, tensors: Tensors, shards: int = 1) -> Path:
    """The tensors as safetensors files, each a dictionary by name."""
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        file = file if shards > 1 else "model.safetensors"
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        header, at = {}, 0
        for name in mine:
            size = len(tensors[name])
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + b"".join(tensors[name] for name in mine)
        (directory / file).write_bytes(content)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def hub_snapshot(cache: Path, name: str, model: Path) -> Path:
    """A model in the cache layout of huggingface_hub."""
    repository = hub.repository(name, cache)
    commit = "c0ffee" + "0" * 34
    snapshot = repository / "snapshots" / commit
    for directory in (repository / "blobs", repository / "refs", snapshot):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for file in model.iterdir():
        large = file.suffix == ".safetensors"
        blob = repository / "blobs" / (digests.hash_file(file) if large else "1" * 40)
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def id_of(model: Path, load_format: str = "auto") -> str:
    return identify(look_at(weight_files(model, load_format)), DigestCache())


# ---- equal ids, equal weights


def some_rows(name: str, chance: random.Random) -> bool:
    return name == "model.embed_tokens.weight"


#: The tensors that each usual kind of training changes, as (name, chance) -> whether.
KINDS: dict[str, Callable[[str, random.Random], bool]] = {
    "all linear layers": lambda name, _: "_proj" in name,
    "q and v": lambda name, _: "q_proj" in name or "v_proj" in name,
    "q and k": lambda name, _: "q_proj" in name or "k_proj" in name,
    "MLP only": lambda name, _: any(part in name for part in ("gate", "up_proj", "down_proj")),
    "o and down": lambda name, _: "o_proj" in name or "down_proj" in name,
    "top layers": lambda name, _: any(f".{i}." in name for i in range(LAYERS - 2, LAYERS)),
    "some tensors": lambda name, chance: chance.random() < 0.1,
    "rows of the embedding": some_rows,
}


def fine_tune(base: Tensors, kind: str, chance: random.Random) -> Tensors:
    made = dict(base)
    for name, content in base.items():
        if KINDS[kind](name, chance):
            row = chance.randrange(TENSOR - 64)
            made[name] = content[:row] + chance.randbytes(chance.randrange(1, 64)) + content[row:]
            made[name] = made[name][:TENSOR]
    return made


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fine_tune_has_another_id_than_its_base(tmp_path, seed, kind, shards):
    chance = random.Random(f"{seed}/{kind}/{shards}")
    base = base_model(chance)
    tuned = fine_tune(base, kind, chance)
    tuned["model.layers.5.down_proj.weight"] = tuned["model.layers.5.down_proj.weight"][::-1]

    first = write(tmp_path / "base", base, shards)
    second = write(tmp_path / "tuned", tuned, shards)

    assert id_of(first) != id_of(second)


def test_random_models_have_equal_ids_only_if_their_weights_are_equal(tmp_path, seed):
    chance = random.Random(seed)
    base = base_model(chance)
    models: list[Tensors] = [base]
    ids = [id_of(write(tmp_path / "0", base, 3))]
    kinds = ["nothing", *(chance.choice([*KINDS, "nothing"]) for _ in range(38))]
    for i, kind in enumerate(kinds, 1):
        parent = chance.choice(models)  # any model so far
        tensors = dict(parent) if kind == "nothing" else fine_tune(parent, kind, chance)
        made = id_of(write(tmp_path / str(i), tensors, 3))
        for other, its in zip(models, ids, strict=True):
            assert (other == tensors) == (its == made), (i, kind)
        models.append(tensors)
        ids.append(made)
    assert len(set(ids)) < len(ids), "no two were equal, so half of the property was not checked"


def test_equal_files_have_one_id_wherever_they_lie(tmp_path, seed):
    model = write(tmp_path / "local", base_model(random.Random(seed)), 4)
    copy = shutil.copytree(model, tmp_path / "copy")
    snapshot = hub_snapshot(tmp_path / "hub", "org/name", model)
    links = tmp_path / "links"
    links.mkdir()
    for file in model.iterdir():
        (links / file.name).symlink_to(file)

    assert id_of(model).startswith("sha256:")
    assert {id_of(copy), id_of(snapshot), id_of(links)} == {id_of(model)}


def test_one_changed_byte_anywhere_changes_the_id(tmp_path, seed):
    chance = random.Random(seed)
    model = write(tmp_path / "m", base_model(chance))
    file = model / "model.safetensors"
    ids = {id_of(model)}
    content = file.read_bytes()
    for at in (0, 8, len(content) // 2, len(content) - 1, chance.randrange(len(content))):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        ids.add(id_of(model))
    assert len(ids) >= 5


# ---- the files that are loaded


def touch(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(name.encode())
    return directory


@pytest.mark.parametrize(
    ("there", "load_format", "loaded"),
    [
        (["model.safetensors", "pytorch_model.bin", "x.pt"], "auto", ["model.safetensors"]),
        (["pytorch_model.bin", "training_args.bin", "x.pt"], "auto", ["pytorch_model.bin"]),
        (["x.pt", "optimizer.pt"], "auto", ["x.pt"]),
        (["model.safetensors", "consolidated.safetensors"], "auto", ["consolidated.safetensors"]),
        (
            ["model.safetensors", "consolidated.safetensors"],
            "mistral",
            ["consolidated.safetensors"],
        ),
        (["model.safetensors", "x.pt"], "pt", ["x.pt"]),
        (["s-10.safetensors", "s-2.safetensors"], "auto", ["s-2.safetensors", "s-10.safetensors"]),
        (["model.safetensors", "original/consolidated.pth"], "auto", ["model.safetensors"]),
    ],
)
def test_the_files_are_those_that_vllm_loads(tmp_path, there, load_format, loaded):
    touch(tmp_path, *there)
    assert [file.name for file in weight_files(tmp_path, load_format)] == loaded


def index(directory: Path, *files: str) -> None:
    text = json.dumps({"weight_map": {f"w{i}": file for i, file in enumerate(files)}})
    (directory / "model.safetensors.index.json").write_text(text)


def test_an_index_determines_the_loaded_files(tmp_path):
    touch(
        tmp_path, "a-1.safetensors", "a-2.safetensors", "adapter.safetensors", "sub/b.safetensors"
    )
    index(tmp_path, "a-1.safetensors", "a-2.safetensors", "sub/b.safetensors")
    names = [str(file.relative_to(tmp_path)) for file in weight_files(tmp_path)]
    assert names == ["a-1.safetensors", "a-2.safetensors", "sub/b.safetensors"]


def test_a_missing_file_of_an_index_is_an_error(tmp_path):
    touch(tmp_path, "a-1.safetensors")
    index(tmp_path, "a-1.safetensors", "a-2.safetensors")
    with pytest.raises(UnknownWeights, match=r"names .*a-2.safetensors, which is missing"):
        weight_files(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_an_error(tmp_path, text):
    touch(tmp_path, "a-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UnknownWeights, match="is not an index of weights"):
        weight_files(tmp_path)


def test_a_gguf_file_is_a_model_with_all_its_parts(tmp_path):
    touch(tmp_path, "m.gguf", "s-00001-of-00002.gguf", "s-00002-of-00002.gguf")
    assert weight_files(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]
    parts = weight_files(tmp_path / "s-00001-of-00002.gguf")
    assert [part.name for part in parts] == ["s-00001-of-00002.gguf", "s-00002-of-00002.gguf"]
    parts[1].unlink()
    with pytest.raises(UnknownWeights, match=r"s-00002-of-00002.gguf is missing"):
        weight_files(parts[0])


def test_a_snapshot_with_both_kinds_of_files_is_identified_by_both(tmp_path):
    """vLLM loads one of them, depending on a response of the hub."""
    touch(tmp_path, "model.safetensors", "consolidated.safetensors")
    names = [file.name for file in weight_files(tmp_path, of_hub=True)]
    assert names == ["consolidated.safetensors", "model.safetensors"]


def test_a_directory_without_weights_is_an_error(tmp_path):
    touch(tmp_path, "config.json", "params.json", ".model.safetensors")
    with pytest.raises(UnknownWeights, match="has no weight files"):
        weight_files(tmp_path)


def test_loops_of_links_and_unreadable_files_are_errors(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(UnknownWeights, match="cannot be read"):
        id_of(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(UnknownWeights, match="is not a regular file"):
        id_of(tmp_path)


@contextlib.contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Root may read everything."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


@pytest.mark.parametrize("closed", ["model.safetensors", "."])
def test_a_file_without_permission_is_an_error(tmp_path, closed):
    touch(tmp_path, "model.safetensors")
    (tmp_path / closed).chmod(0)
    with as_an_ordinary_user(), pytest.raises(UnknownWeights, match="Permission denied"):
        id_of(tmp_path)
    (tmp_path / closed).chmod(0o700)
    assert id_of(tmp_path)


# ---- digests on disk


@pytest.fixture
def old_file(tmp_path, monkeypatch) -> Path:
    """A file that counts as old enough for its digest to be kept."""
    monkeypatch.setattr(digests, "_STILL_NS", 0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


def read_count(monkeypatch) -> list[Path]:
    read = []
    hash_file = digests.hash_file

    def counted(path: Path, *rest: object) -> str:
        read.append(path)
        return hash_file(path, *rest)

    monkeypatch.setattr("pegaflow.weights.identity.hash_file", counted)
    return read


def test_a_file_is_read_once(old_file, monkeypatch):
    read = read_count(monkeypatch)
    assert id_of(old_file.parent) == id_of(old_file.parent)
    assert read == [old_file]


def test_a_file_with_the_size_and_time_of_the_old_one_is_read_again(old_file, monkeypatch):
    first = id_of(old_file.parent)
    before = old_file.stat()
    old_file.write_bytes(b"WEIGHTS")
    os.utime(old_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert id_of(old_file.parent) != first

    second = id_of(old_file.parent)
    other = old_file.with_name("other")
    other.write_bytes(b"wEiGhTs")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(old_file)
    assert id_of(old_file.parent) not in (first, second)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: "",
        lambda entry: entry[: len(entry) // 2],
        lambda entry: "[]",
        lambda entry: entry.replace('"sha256": "', '"sha256": "zz'),
        lambda entry: entry.replace('"version": 1', '"version": 2'),
        lambda entry: entry.replace('"size": 7', '"size": 8'),
    ],
)
def test_a_damaged_entry_is_ignored_and_replaced(old_file, cache_directory, monkeypatch, damage):
    first = id_of(old_file.parent)
    (entry,) = cache_directory.rglob("*.json")
    kept = entry.read_text()
    assert damage(kept) != kept
    entry.write_text(damage(kept))

    read = read_count(monkeypatch)
    assert id_of(old_file.parent) == first
    assert id_of(old_file.parent) == first
    assert len(read) == 1


def test_a_directory_that_cannot_be_written_costs_the_digest_only(old_file, monkeypatch):
    monkeypatch.setenv("PEGAFLOW_CACHE_DIR", "/dev/null/cache")
    read = read_count(monkeypatch)
    assert id_of(old_file.parent) == id_of(old_file.parent)
    assert len(read) == 2


@pytest.mark.parametrize(
    "environ",
    [
        {"PEGAFLOW_CACHE_DIR": "~no-such-user/cache"},
        {"XDG_CACHE_HOME": "~no-such-user/cache"},
    ],
)
def test_a_cache_below_a_missing_home_costs_the_digest_only(old_file, monkeypatch, environ):
    monkeypatch.delenv("PEGAFLOW_CACHE_DIR")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(old_file.parent)
    read = read_count(monkeypatch)
    assert id_of(old_file.parent) == id_of(old_file.parent)
    assert len(read) == 2
    assert os.listdir() == [old_file.name]


def test_a_user_without_a_home_has_no_caches(monkeypatch):
    """As in a container with an arbitrary user id: neither HOME nor an entry in passwd."""
    code = (
        "import os; os.environ.clear(); os.setuid(54321)\n"
        "from pegaflow.weights import digests, hub\n"
        "assert not digests.DigestCache().put(digests.Path('/x'), digests.Stamp(1, 0, 0, 1, 1),"
        " 'a' * 64)\n"
        "print(digests.cache_directory(), hub.cache_directory())"
    )
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert made.stdout == "/dev/null/pegaflow ~/.cache/huggingface/hub\n", made.stderr


class Image:
    """Replaces os.stat() for files in a read-only image that was built with one time for all."""

    def __init__(self, real: os.stat_result, at_ns: int) -> None:
        self._real = real
        self.st_mtime_ns = self.st_ctime_ns = at_ns

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


@pytest.mark.parametrize(("at_ns", "reads"), [(1_700_000_000 * 10**9, 2), (17 * 10**17 + 1, 1)])
def test_the_fixed_stamp_of_an_image_is_not_trusted(
    old_file, cache_directory, monkeypatch, at_ns, reads
):
    stamp_of = digests._stamp
    monkeypatch.setattr(
        digests, "_stamp", lambda status, path: stamp_of(Image(status, at_ns), path)
    )
    read = read_count(monkeypatch)
    first = id_of(old_file.parent)
    inode = old_file.stat().st_ino
    with old_file.open("r+b") as file:  # Another image, with the file at the same place.
        file.write(b"WEIGHTS")
    assert old_file.stat().st_ino == inode
    assert (id_of(old_file.parent) != first) == (reads == 2)
    assert len(read) == reads
    assert bool(list(cache_directory.rglob("*.json"))) == (reads == 1)


def test_an_existing_entry_with_such_a_stamp_is_not_used(old_file):
    cache, stamp = DigestCache(), digests.stamp(old_file)
    assert cache.put(old_file, stamp, "a" * 64)
    entry = cache._entry(old_file)
    whole = dataclasses.replace(stamp, mtime_ns=10**18, ctime_ns=10**18)
    kept = json.loads(entry.read_text()) | dataclasses.asdict(whole)
    entry.write_text(json.dumps(kept))
    assert cache.get(old_file, whole) is None


def test_a_small_weight_file_of_the_hub_has_the_id_of_its_content(tmp_path):
    """It is named by Git's object id, which is not a SHA-256."""
    model = tmp_path / "m"
    model.mkdir()
    (model / "pytorch_model.bin").write_bytes(b"weights")
    assert id_of(hub_snapshot(tmp_path / "hub", "org/name", model)) == id_of(model)


def test_a_file_system_without_locks_costs_another_hash_only(old_file, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(digests.fcntl, "flock", no_locks)
    read = read_count(monkeypatch)
    assert id_of(old_file.parent) == id_of(old_file.parent)
    assert read == [old_file]


def test_the_digest_of_a_file_that_was_just_written_is_not_kept(tmp_path, cache_directory):
    write(tmp_path, {"w": b"x" * 100})
    id_of(tmp_path)
    assert not list(cache_directory.rglob("*.json"))


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"w" * (16 << 20))
    changes = iter([lambda: path.write_bytes(b"v" * (16 << 20))])
    with pytest.raises(digests.FileChanged):
        digests.hash_file(path, lambda count: next(changes, lambda: None)())


def test_a_file_that_is_replaced_after_it_was_listed_is_an_error(old_file):
    cache = DigestCache()
    files = look_at([old_file])
    old_file.write_bytes(b"others!")
    with pytest.raises(UnknownWeights, match="was changed"):
        identify(files, cache)


def test_concurrent_processes_read_each_file_once_and_agree(tmp_path, cache_directory):
    model = write(tmp_path / "m", {f"t{i}": bytes([i]) * (3 << 20) for i in range(4)}, 4)
    for file in model.iterdir():
        os.utime(file)
    code = (
        "import sys; from pathlib import Path\n"
        "from pegaflow.weights import digests, identity, files\n"
        "digests._STILL_NS = 0; read = []\n"
        "hashed = identity.hash_file\n"
        "identity.hash_file = lambda path, *rest: (read.append(path), hashed(path, *rest))[1]\n"
        "made = identity.identify(identity.look_at(files.weight_files(Path(sys.argv[1]))),"
        " digests.DigestCache())\n"
        "print(made, len(read))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=60)[0].split() for process in running]
    assert len({made for made, _ in outputs}) == 1
    assert sum(int(count) for _, count in outputs) == 4


def test_threads_that_write_one_entry_leave_a_complete_one(old_file, cache_directory):
    cache, stamp = DigestCache(), digests.stamp(old_file)
    digest = digests.hash_file(old_file)

    def put() -> None:
        for _ in range(50):
            assert cache.put(old_file, stamp, digest)
            assert cache.get(old_file, stamp) == digest

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(cache_directory.rglob("*.json"))) == 1
    assert not list(cache_directory.rglob("tmp*"))


# ---- the command


def pegaflow(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pegaflow", "weights-id", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environ,
    )


def test_the_command_prints_the_id_of_a_directory_and_of_a_repository(tmp_path, seed):
    model = write(tmp_path / "m", base_model(random.Random(seed)), 2)
    hub_snapshot(tmp_path / "hub", "org/name", model)

    local = pegaflow(str(model))
    fetched = pegaflow("org/name", HF_HUB_CACHE=str(tmp_path / "hub"))

    assert local.stdout == fetched.stdout == id_of(model) + "\n"
    assert "hashing 2 files" in local.stderr
    assert fetched.stderr == "", "its blobs are named by their digests"
    home = pegaflow("org/name", HF_HUB_CACHE="", HF_HOME=str(tmp_path))
    assert home.stdout == local.stdout


def test_the_command_names_missing_files(tmp_path):
    missing = pegaflow("org/name", HF_HUB_CACHE=str(tmp_path))
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "has no revision main" in missing.stderr
    assert "has no weight files" in pegaflow(str(tmp_path)).stderr
    assert "neither a directory nor a file" in pegaflow("/no/such").stderr


def test_the_command_shows_its_progress(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "_PROGRESS_EVERY_S", 0)
    model = write(tmp_path / "m", {"w": b"x" * (9 << 20)})
    options = argparse.Namespace(
        model=str(model), revision="main", load_format="auto", download_dir=None
    )
    assert command.run(options) == 0
    assert "4 MiB of 9 MiB" in capsys.readouterr().err
