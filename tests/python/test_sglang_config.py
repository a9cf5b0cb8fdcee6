"""The options of PegaFlow inside SGLang: values, texts, and the table of docs/sglang.md."""

import json
import time
from types import SimpleNamespace

import pytest

from pegaflow.cli import server_view
from pegaflow.engine import loaded_weights
from pegaflow.engine.config import ConfigError, options_markdown
from pegaflow.sglang import identity, settings
from tests.support.vllm_server import REPOSITORY

BEGIN, END = "<!-- options: made from sglang/settings.py -->", "<!-- end of options -->"


def test_the_page_has_the_table_of_options():
    page = (REPOSITORY / "docs" / "sglang.md").read_text()
    _, _, rest = page.partition(BEGIN + "\n")
    table, _, _ = rest.partition("\n" + END)
    assert table == options_markdown(settings.SGLANG_OPTIONS)


def test_defaults_and_the_environment():
    assert settings.read({}, {}).port == 50055
    assert settings.read(None, {}).pin_s == 10.0
    made = settings.read({"pegaflow.port": "50056", "interface_v1": 1}, {"PEGAFLOW_HOST": "h"})
    assert (made.host, made.port, made.host_source) == ("h", 50056, "PEGAFLOW_HOST")
    made = settings.read({"pegaflow.host": "x"}, {"PEGAFLOW_ENGINE_ENDPOINT": "unix:/run/x.sock"})
    assert (made.host, made.host_source) == ("unix:/run/x.sock", "PEGAFLOW_ENGINE_ENDPOINT")


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"pegaflow.prot": 1}, "unknown option pegaflow.prot; the nearest is pegaflow.port"),
        ({"pegaflow_port": 1}, "unknown option pegaflow_port; the nearest is pegaflow.port"),
        ({"pegaflow.mode": "save_only"}, "unknown option pegaflow.mode"),
        ({"pegaflow.max_pins": 0}, "pegaflow.max_pins=0 is not a whole number between 1 and 65536"),
        ({"pegaflow.verify": 1}, "pegaflow.verify=1 is not one of off, sample, all"),
        ([], "the extra configuration [] is not a mapping"),
    ],
)
def test_an_invalid_option_is_named_with_what_it_takes(extra, text):
    with pytest.raises(ConfigError) as error:
        settings.read(extra, {})
    assert text in str(error.value)


def test_the_address_survives_another_invalid_option():
    extra = {"pegaflow.host": "unix:/run/x.sock", "pegaflow.prot": 1}
    assert settings.read(settings.address_only(extra), {}).host == "unix:/run/x.sock"
    assert settings.address_only("text") == {}


def test_ranks_have_names_of_their_own():
    assert settings.instance("linker", 3, {"PEGAFLOW_INSTANCE_ID": "one"}) == "one-linker-3"
    assert settings.instance("linker", 0, {}) != settings.instance("linker", 0, {})


def test_engines_are_counted_by_their_program_and_named_in_the_fix():
    refused = {
        "side": "worker",
        "build": "pegaflow 0.1.0, sglang 0.5.23",
        "reason": "model",
        "detail": "the pool draft was not tested",
    }
    instances = [
        {"instance": "a", "build": "pegaflow 0.1.0, sglang 0.5.23"},
        {"instance": "b", "build": "", "not_served": [refused]},
        {"instance": "c", "build": "pegaflow 0.1.0, vllm 0.33.0"},
        {"instance": "d"},
    ]
    assert server_view.programs(instances) == {"sglang 0.5.23": 2, "vllm 0.33.0": 1}
    (finding,) = server_view.check_declined(instances)
    assert "docs/sglang.md" in finding.fix


@pytest.fixture
def factors(tmp_path, monkeypatch):
    """The factors of an engine whose model has these weights, with options of SGLang's."""
    monkeypatch.setenv("PEGAFLOW_CACHE_DIR", str(tmp_path / "cache"))
    # The files are younger than this process, which an engine would have to notice.
    core = loaded_weights.EngineCore("core", time.time_ns() + 10**12, None)
    monkeypatch.setattr(loaded_weights.EngineCore, "of", lambda parallel: core)

    def made(name: str, weights: bytes, **options: object) -> dict[str, str]:
        place = tmp_path / name
        place.mkdir()
        config = {"architectures": ["A"], "_name_or_path": name}
        (place / "config.json").write_text(json.dumps(config))
        (place / "model.safetensors").write_bytes(weights)
        args = SimpleNamespace(model_path=str(place), load_format="auto", **options)
        return dict(identity.of_engine(args, "", f"instance {name}", identity.Ranks()))

    return made


def test_equal_files_and_options_are_one_namespace(factors):
    first = factors("first", b"weights", dtype="bfloat16")
    assert first == factors("copy", b"weights", dtype="bfloat16")
    assert first["weights"].startswith("sha256:")
    other = factors("other", b"trained again", dtype="bfloat16")
    assert {name for name in first if first[name] != other[name]} == {"weights"}
    half = factors("half", b"weights", dtype="float16")
    assert {name for name in first if first[name] != half[name]} == {"options"}


def test_engines_with_adapters_share_nothing(factors):
    assert factors("lora", b"weights", enable_lora=True)["weights"].startswith("private:")


def test_a_draft_model_is_named_too(factors, tmp_path):
    draft = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(tmp_path / "d")}
    factors("d", b"draft")
    made = factors("target", b"weights", **draft)
    assert made["draft_weights"].startswith("sha256:")
    assert made["draft_weights"] != made["weights"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"load_format": "dummy"}, "with load format dummy"),
        ({"load_format": "remote"}, "does not read files that can be identified"),
        ({"model_path": "s3://bucket/model"}, "is not read from files of this machine"),
        ({"model_path": "/not/there"}, "is neither a path nor a repository"),
    ],
    ids=["dummy", "format", "store", "missing"],
)
def test_weights_that_cannot_be_identified_are_refused_with_the_fix(options, text):
    args = SimpleNamespace(**{"model_path": "org/model", "load_format": "auto"} | options)
    with pytest.raises(identity.Refused) as error:
        identity.of_engine(args, "", "instance", identity.Ranks())
    assert text in str(error.value) and "pegaflow.weights_id" in str(error.value)
    assert error.value.kind == "weights"


def test_ranks_have_shares_of_their_own_but_for_equal_pages():
    def factor(rank: int, replicated: bool) -> str:
        ranks = identity.Ranks(tp_rank=rank, tp_size=2, is_mla=replicated)
        return dict(identity.of_pool([], "kv", "pages", ranks, replicated))["layers"]

    assert factor(0, False) != factor(1, False)
    assert factor(0, True) == factor(1, True)
