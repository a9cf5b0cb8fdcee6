"""The options of PegaFlow inside SGLang: values, texts, and the table of docs/sglang.md."""

import pytest

from pegaflow.cli import server_view
from pegaflow.engine.config import ConfigError, options_markdown
from pegaflow.sglang import settings
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
