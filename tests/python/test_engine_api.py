"""The connector against the recorded releases of vLLM, and those against the installed one.

docs/testing.md describes what to do after a failure. ``PEGA_VLLM_SOURCE`` and
``PEGA_SGLANG_SOURCE`` name a package, source tree or wheel that is compared in addition.
"""

import contextlib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.engine_api import __main__ as command
from tools.engine_api import checks, sglang, source
from tools.engine_api.connector import PACKAGE, Connector

DECISIONS = source.document("vllm")
RECORDED = {version: source.load("vllm", version) for version in source.snapshots("vllm")}
CONNECTOR = Connector(DECISIONS)


def installed() -> Path:
    """The directory with the installed vLLM, which is not imported."""
    return Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent


def check_release(engine: str, path: Path) -> None:
    """Fails, with what to do, unless the release equals its snapshot."""
    version, found = source.read(engine, path)
    known = version in source.snapshots(engine)
    report = command.compare(engine, version, found, version if known else None)
    if not known:
        pytest.fail(
            f"{engine} {version} is not recorded. What it changes, and what does not fit the "
            f"connector:\n\n{report}\n\nAdapt pyclient/pegaflow/vllm, state the decisions in "
            f"tests/python/engine_api/{engine}.toml, then run\n"
            f"    python -m tools.engine_api record {engine}=={version}",
            pytrace=False,
        )
    if report:
        pytest.fail(
            f"{path} differs from the recorded {engine} {version}:\n\n{report}\n\nIt is patched, "
            "or what is recorded has changed. If it is the release as published, run\n"
            f"    python -m tools.engine_api record {engine}=={version}",
            pytrace=False,
        )


# ---- releases


GIVEN = [(e, os.environ.get(f"PEGA_{e.upper()}_SOURCE", "")) for e in command.ENGINES]


@pytest.mark.parametrize(
    ("engine", "path"), [("vllm", "installed"), *(each for each in GIVEN if each[1])]
)
def test_a_release_equals_its_snapshot(engine, path):
    check_release(engine, installed() if path == "installed" else Path(path))


@pytest.mark.parametrize("version", RECORDED)
def test_the_connector_fits_each_recorded_release(version):
    found = checks.problems(version, RECORDED[version], CONNECTOR, DECISIONS)
    assert not found, "\n" + "\n".join(found)


def test_decisions_agree_with_the_recorded_releases():
    stale = checks.stale_decisions(RECORDED, DECISIONS)
    assert not stale, "\n" + "\n".join(stale)


SGLANG = source.document("sglang")


@pytest.mark.parametrize("version", source.snapshots("sglang"))
def test_the_classes_for_sglang_fit_each_recorded_release(version):
    found = sglang.problems(version, source.load("sglang", version), SGLANG)
    assert not found, "\n" + "\n".join(found)


#: A line of a snapshot, its replacement ("" removes it), and words of the report.
SGLANG_CHANGES = {
    "a hook's parameter is renamed": (
        "UnifiedCacheLinker.lookup",
        "abstract method (self, request: str, transfers: list[PoolTransfer]) -> list[int]",
        ["linker.py: PegaLinker.lookup", "request of SGLang's"],
    ),
    "a hook gets a parameter": (
        "HiCacheStorage.batch_get_v1",
        "method (self, keys: List[str], host_indices: torch.Tensor, rank: int, extra_info=None)",
        ["hicache.py: PegaHiCache.batch_get_v1", "does not accept SGLang's"],
    ),
    "an abstract hook is added": (
        "UnifiedCacheLinker.pin",
        "abstract method (self, rid: str)",
        ["PegaLinker lacks pin, abstract in UnifiedCacheLinker"],
    ),
    "a hook is added": (
        "HiCacheStorage.batch_get_v3",
        "method (self)",
        ["unknown hook batch_get_v3 of HiCacheStorage"],
    ),
    "an inherited hook is removed": ("HiCacheStorage.get_stats", "", ["has no get_stats"]),
    "a field is removed": (
        "HiCacheStorageConfig.tp_rank",
        "",
        ["has no HiCacheStorageConfig.tp_rank"],
    ),
    "a method that is wrapped is removed": (
        "SchedulerWeightUpdaterManager.update_weights_from_disk",
        "",
        ["has no SchedulerWeightUpdaterManager.update_weights_from_disk"],
    ),
    "a base class is removed": ("UnifiedCacheLinker", "", ["has no UnifiedCacheLinker, the base"]),
}


@pytest.mark.parametrize("name", SGLANG_CHANGES)
def test_a_change_of_sglang_is_reported(name):
    line, to, words = SGLANG_CHANGES[name]
    version = source.snapshots("sglang")[-1]
    found = dict(source.load("sglang", version))
    if to:
        found[line] = to
    else:
        del found[line]

    report = command.compare("sglang", version, found)

    for each in words:
        assert each in report


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_snapshots_have_every_name_that_is_to_be_recorded(engine):
    wanted = source.parts(engine)
    names = {*wanted.classes, *wanted.families, *wanted.read, *wanted.functions}
    for version in source.snapshots(engine):
        text = source.snapshot_path(engine, version).read_text()
        found = source.parse(text)
        missing = {name for name in names if name.rpartition(".")[2] not in found}
        again = f"run python -m tools.engine_api record {engine}=={version}"
        assert not missing, again
        assert source.render(engine, version, found) == text, again


# ---- KV cache specs: the decisions and the code that implements them


def refusal(*groups: Any) -> str:
    """Of a model with these cache groups, each of one spec or of a list of them."""
    from pegaflow.vllm.support import unsupported

    config = SimpleNamespace(
        model_config=SimpleNamespace(),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(world_size=1),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"pegaflow.untested": True}),
    )
    made = []
    for number, whole in enumerate(groups):
        if isinstance(whole, list):
            specs, whole = whole, spec("UniformTypeKVCacheSpecs")
            whole.kv_cache_specs = {f"{number}.{i}": each for i, each in enumerate(specs)}
        made.append(SimpleNamespace(kv_cache_spec=whole, layer_names=[f"{number}.0"]))
    return unsupported(config, SimpleNamespace(kv_cache_groups=made))


def spec(name: str) -> Any:
    fields = {
        "block_size": 16,
        "sliding_window": 64,
        "attention_chunk_size": 64,
        "mamba_cache_mode": "align",
    }
    return type(name, (), fields)()


def test_served_and_refused_specs_are_those_of_the_support_check():
    tables = DECISIONS["specs"]
    (served, *_) = tables["served"]
    for name in tables["served"]:
        assert refusal(spec(name)) == ""
        assert refusal(spec(served), spec(name)) == ""
    for name in ("FullAttentionSpec", "MLAAttentionSpec"):
        assert refusal([spec(served), spec(name)]) == ""
    for name in tables["refused"]:
        assert name in refusal(spec(name))
        assert name in refusal([spec(served), spec(name)])
        assert name in refusal(spec(served), spec(name))


# ---- the guard fails when it has to


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files of the installed vLLM that matter, which a test may change."""
    into = tmp_path_factory.mktemp("copy")
    tree = source.Tree("vllm", installed())
    source.interface(tree, source.parts("vllm"))
    package = installed() / "vllm"
    for file in (package / "__init__.py", package / "_version.py", *tree.files()):
        place = into / file.relative_to(installed())
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return into


@contextlib.contextmanager
def changed(file: Path, pattern: str, to: str) -> Iterator[None]:
    before = file.read_text() if file.exists() else None
    text, count = re.subn(pattern, to, before or "", count=1, flags=re.MULTILINE | re.DOTALL)
    assert count == 1, f"{file.name} has nothing like {pattern}"
    file.write_text(text)
    try:
        yield
    finally:
        file.unlink()
        if before is not None:
            file.write_text(before)


BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
SPECS = "v1/kv_cache_interface.py"
#: A file, a pattern, its replacement, and words of the report.
CHANGES = {
    "a hook's parameter is renamed": (
        BASE,
        r"(def update_state_after_alloc\(.*?)num_external_tokens: int",
        r"\1count: int",
        ["-KVConnectorBase_V1.update_state_after_alloc", "count", "is num_external_tokens in the"],
    ),
    "a hook's parameters change places": (
        BASE,
        r"def wait_for_layer_load\(self, layer_name: str\)",
        "def wait_for_layer_load(self, step: int, layer_name: str)",
        ["PegaKVConnector.wait_for_layer_load", "does not accept vLLM's"],
    ),
    "a hook gets keywords": (
        BASE,
        r"def on_new_request\(self, request: \"Request\"\)",
        'def on_new_request(self, request: "Request", **kwargs: int)',
        ["lacks the ** of vLLM's (self, request, **kwargs)"],
    ),
    "a method becomes a property": (
        BASE,
        r"    def has_pending_push_work",
        "    @property\n    def has_pending_push_work",
        ["vLLM has a property, the connector a method"],
    ),
    "a hook is removed": (
        BASE,
        r"    def has_pending_push_work",
        "    def renamed_push_work",
        ["PegaKVConnector.has_pending_push_work is no hook", "unknown hook renamed_push_work"],
    ),
    "a hook is added": (
        BASE,
        r"    def on_new_request",
        "    def before_request(self) -> None: ...\n\n    def on_new_request",
        ["+KVConnectorBase_V1.before_request", "unknown hook before_request"],
    ),
    "an abstract hook is added": (
        BASE,
        r"    def on_new_request",
        "    @abstractmethod\n    def before(self): ...\n\n    def on_new_request",
        ["PegaKVConnector lacks before, abstract in KVConnectorBase_V1"],
    ),
    "a hook takes the name of a method of PegaFlow's": (
        BASE,
        r"    def on_new_request",
        "    def retire(self) -> None: ...\n\n    def on_new_request",
        ["has a hook retire, the name of a method of PegaFlow's"],
    ),
    "a mixin is added": (
        BASE,
        r"^class SupportsHMA",
        "class SupportsStreams:\n    pass\n\n\nclass SupportsHMA",
        ["unknown mixin SupportsStreams"],
    ),
    "an attribute of the base class is renamed": (
        BASE,
        r"\bself\._kv_transfer_config = ",
        "self._transfer_config = ",
        ["reads self._kv_transfer_config, which the bases"],
    ),
    "a field is added to the scheduler's output": (
        "v1/core/sched/output.py",
        r"^class SchedulerOutput:\n",
        "class SchedulerOutput:\n    planned: int = 0\n",
        ["+SchedulerOutput.planned: field int = 0"],
    ),
    "an attribute that is read directly is renamed": (
        "v1/core/sched/output.py",
        r"^    total_num_scheduled_tokens:",
        "    scheduled_tokens:",
        ["has no SchedulerOutput.total_num_scheduled_tokens, which fails"],
    ),
    "an attribute that is read with a default is renamed": (
        "v1/request.py",
        r"\bself\.skip_reading_prefix_cache\b",
        "self.skip_cache",
        ["has no Request.skip_reading_prefix_cache, so the code takes its fallback"],
    ),
    "a wrapped method of the engine core is renamed": (
        "v1/engine/core.py",
        r"def _reset_caches",
        "def _empty_caches",
        ["has no EngineCore._reset_caches"],
    ),
    "a spec class is added anywhere": (
        "new_specs.py",
        r"\Z",
        "from vllm.v1.kv_cache_interface import MambaSpec\n\n\nclass RingSpec(MambaSpec): ...\n",
        ["spec class RingSpec of vLLM", "is unknown"],
    ),
    "a field is added to a served spec": (
        SPECS,
        r"(class AttentionSpec\(KVCacheSpec\):\n)",
        r"\1    rotation: int = 0\n",
        ["FullAttentionSpec of vLLM", "has a field rotation", "MLAAttentionSpec of vLLM"],
    ),
    "a field of the namespace is renamed": (
        SPECS,
        r"^    kv_quant_mode:",
        "    quant_mode:",
        ["has no KVCacheSpec.kv_quant_mode"],
    ),
    "an imported function is renamed": (
        "distributed/utils.py",
        r"^def get_pp_indices",
        "def pp_indices",
        ["vllm/ranks.py", "has no get_pp_indices"],
    ),
    "an imported function gets a parameter": (
        "distributed/utils.py",
        r"^def get_pp_indices\(",
        "def get_pp_indices(config: str, ",
        ["vllm/ranks.py", "calls get_pp_indices", "missing a required argument"],
    ),
    "an event's field is renamed": (
        "distributed/kv_events.py",
        r"(^class BlockRemoved.*?)^    medium:",
        r"\1    tier:",
        ["vllm/event_format.py", "BlockRemoved of vLLM", "has no field medium"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_reported(copy, name):
    file, pattern, to, words = CHANGES[name]
    version = source.Tree("vllm", installed()).version()

    with changed(copy / "vllm" / file, pattern, to):
        found = source.interface(source.Tree("vllm", copy), source.parts("vllm"))
        report = command.compare("vllm", version, found, version)

    for each in words:
        assert each in report


def test_an_unknown_release_is_reported_with_the_command_that_records_it(copy):
    with changed(copy / "vllm" / "_version.py", r"\Z", "\n__version__ = '99.1.0'\n"):
        text = (copy / "vllm" / "_version.py").read_text()
        (copy / "vllm" / "_version.py").write_text(re.sub(r"(?m)^__version__ = v.*$", "", text))
        with pytest.raises(pytest.fail.Exception) as failure:
            check_release("vllm", copy)
    assert "record vllm==99.1.0" in str(failure.value)


#: A line that is added to the connector, and words of the report.
ADDITIONS = {
    "request.birthday": "has no Request.birthday, which fails",
    "getattr(request, 'birthday', None)": "has no Request.birthday, so the code takes its fallback",
    "getattr(stranger, 'birthday', None)": "reads stranger.birthday by name",
    "from vllm.utils.hashing import sha256": "hashing.sha256, which is not recorded",
}


@pytest.mark.parametrize("line", ADDITIONS)
def test_a_new_dependency_of_the_connector_is_reported(tmp_path, line):
    shutil.copytree(PACKAGE, tmp_path / "pegaflow", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "pegaflow" / "vllm" / "keys.py"
    file.write_text(f"{file.read_text()}\n\ndef added(request, stranger):\n    {line}\n")
    version = source.snapshots("vllm")[-1]

    connector = Connector(DECISIONS, tmp_path / "pegaflow")
    found = checks.problems(version, RECORDED[version], connector, DECISIONS)

    assert len(found) == 1
    assert ADDITIONS[line] in found[0]


@pytest.mark.parametrize(
    ("table", "name", "words"),
    [
        ("since", "Request.session_id", "a release before 99 has it"),
        ("until", "Request.request_id", "a release after 0 has it"),
    ],
)
def test_a_decision_that_a_release_contradicts_is_reported(table, name, words):
    limits = {"since": "99", "until": "0"}
    decisions = {**DECISIONS, table: {**DECISIONS[table], name: limits[table]}}
    assert checks.stale_decisions(RECORDED, decisions) == [f"[{table}] {name}: {words}"]


# ---- reading sources


PACKAGE_FILES = {
    "__init__.py": "",
    "_version.py": "__version__ = version = '1.2.3'\n",
    "a.py": """
from .b import Base as Renamed, helper
class Own(Renamed):
    x: 'int | None' = None
""",
    "b.py": """
from abc import abstractmethod
from typing import overload
try:
    import fast
except ImportError:
    def helper(a, *, b: "str" = "c", **more) -> "list[int]": ...
class Base:
    KIND = 1
    def __init__(self, size: int):
        self.size: int = size
        self.left, self.right = 0, 0
    @property
    def area(self) -> int: ...
    @overload
    def of(self, a: int): ...
    @abstractmethod
    def of(self, a): ...
    @classmethod
    def make(cls): ...
    async def wait(self): ...
""",
}
EXPECTED = """\
Base: class() in engine.b
Base.KIND: field = 1
Base.__init__: method (self, size: int)
Base.area: property -> int
Base.left: attribute
Base.make: classmethod (cls)
Base.of: abstract method (self, a)
Base.right: attribute
Base.size: attribute int
Base.wait: async method (self)
Missing: absent
Own: class(Renamed) in engine.a
Own.x: field int | None = None
helper: function (a, *, b: str='c', **more) -> list[int] in engine.b
"""


def make_package(above: Path) -> Path:
    (above / "engine").mkdir(parents=True)
    for name, text in PACKAGE_FILES.items():
        (above / "engine" / name).write_text(text)
    return above


@pytest.mark.parametrize("layout", [".", "python", "src"])
def test_the_interface_of_a_package(tmp_path, layout):
    make_package(tmp_path / layout)

    tree = source.Tree("engine", tmp_path)
    wanted = source.Parts((), ("engine.a.Own", "engine.a.Missing"), (), (), ("engine.a.helper",))
    found = source.interface(tree, wanted)

    assert tree.version() == "1.2.3"
    lines = source.render("engine", "1.2.3", found).splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("#")) == EXPECTED


@pytest.mark.parametrize("kind", ["zip", "gztar"])
def test_wheels_and_source_archives_are_read(tmp_path, kind):
    make_package(tmp_path / "tree" / "engine-1.2.3")
    root = tmp_path / "tree" / ("engine-1.2.3" if kind == "zip" else "")
    archive = Path(shutil.make_archive(str(tmp_path / "made"), kind, root))
    if kind == "zip":
        archive = archive.rename(tmp_path / "engine-1.2.3-py3-none-any.whl")
    (tmp_path / "into").mkdir()

    tree = source.Tree("engine", source.unpack(archive, tmp_path / "into"))

    assert tree.version() == "1.2.3"


def test_a_directory_without_the_package_is_rejected(tmp_path):
    with pytest.raises(source.SourceError, match="contains no Python package vllm"):
        source.read("vllm", tmp_path)


def test_a_name_that_two_classes_have_is_rejected(tmp_path):
    make_package(tmp_path)
    (tmp_path / "engine" / "c.py").write_text("class Base: ...\n")
    wanted = source.Parts((), ("engine.b.Base", "engine.c.Base"), (), (), ())
    with pytest.raises(source.SourceError, match="two classes are named Base"):
        source.interface(source.Tree("engine", tmp_path), wanted)


def test_the_command_reports_changes_by_its_exit_status(monkeypatch, capsys):
    version = source.Tree("vllm", installed()).version()
    others = [each for each in RECORDED if each != version]
    for arguments, status, words in (
        (["diff", str(installed()), "--against", version], 0, "nothing changed"),
        (["diff", str(installed()), "--against", others[0]], 1, f"--- vllm {others[0]}"),
        (["diff", "newest"], 2, "is neither a path nor a version"),
    ):
        monkeypatch.setattr("sys.argv", ["engine_api", *arguments])
        assert command.main() == status
        shown = capsys.readouterr()
        assert words in shown.out + shown.err


def test_the_command_records_a_release(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "DATA", tmp_path)
    monkeypatch.setattr("sys.argv", ["engine_api", "record", str(copy), "--version", "99.1.0"])

    assert command.main() == 0

    assert source.snapshots("vllm") == ["99.1.0"]
    found = source.interface(source.Tree("vllm", copy), source.parts("vllm"))
    assert source.load("vllm", "99.1.0") == found
