"""Options of the connector: valid values, rejections and their texts, and their documentation."""

import os
import socket
from pathlib import Path

import pytest

from pegaflow import _native
from pegaflow.engine import config
from pegaflow.engine.config import ConfigError, options_markdown, read_settings, socket_path
from pegaflow.vllm.metrics import metrics_markdown

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "connector.md"


def settings(environ: dict[str, str] | None = None, **extra):
    return read_settings({f"pegaflow.{k}": v for k, v in extra.items()}, environ or {})


def test_defaults_are_those_of_the_table():
    made = settings()
    for option in config.OPTIONS:
        assert getattr(made, option.name) == option.default


def test_each_option_accepts_its_default_and_its_bounds():
    for option in config.OPTIONS:
        values = [option.default, *(option.choices or ()), *(option.bounds or ())]
        for value in values:
            kind = type(option.default)
            if kind is tuple and value != option.default:
                assert option.read([int(value)], option.key) == (int(value),)
                continue
            assert option.read(kind(value), option.key) == kind(value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("port", 0, "a whole number between 1 and 65535"),
        ("port", "many", "a whole number between 1 and 65535"),
        ("port", 50055.5, "a whole number between 1 and 65535"),
        ("port", True, "a whole number between 1 and 65535"),
        ("port", "5_0", "a whole number between 1 and 65535"),
        ("mode", "write_only", "one of read_write, save_only"),
        ("host", 5, "a text of at most 4,096 bytes"),
        ("keep_failure_policy", "maybe", "true or false"),
        ("keep_failure_policy", 1.0, "true or false"),
        ("claim_wait_ms", -1, "a number between 0 and 100 ms"),
        ("claim_wait_ms", "1_0", "a number between 0 and 100 ms"),
        ("max_pinned_percent", 51, "a whole number between 1 and 50 %"),
        ("load_bytes_per_second", 1, "between 1,000,000 and 10,000,000,000,000 B/s"),
    ],
)
def test_invalid_values_are_rejected_by_name(name, value, words):
    with pytest.raises(ConfigError) as error:
        settings(**{name: value})
    assert str(error.value) == f"pegaflow.{name}={value!r} is not {words}" or (
        str(error.value).startswith(f"pegaflow.{name}={value!r} is not ")
        and str(error.value).endswith(words)
    )


def looped() -> list:
    """A list that contains itself."""
    made: list = []
    made.append(made)
    return made


#: By a name for the test: values that no option, or few options, take.
STRANGE = {
    "None": None,
    "true": True,
    "minus one": -1,
    "minus a half": -0.5,
    "not a number": float("nan"),
    "infinite": float("inf"),
    "minus infinite": -float("inf"),
    "a huge number": 10**400,
    "a number of 5,000 digits": 10**5000,
    "a fraction": 2.5,
    "complex": 1j,
    "empty text": "",
    "blank": " ",
    "nan as a text": "nan",
    "inf as a text": "inf",
    "digits of another script": "\u0663",
    "5,000 digits": "9" * 5000,
    "NUL": "a\0b",
    "half of a character": "\ud800",
    "a long text": "x" * 5000,
    "bytes": b"1",
    "an empty list": [],
    "a list": ["1"],
    "a list of lists": [[1]],
    "a list in itself": looped(),
    "a dict": {"a": 1},
    "an object": object(),
}


@pytest.mark.parametrize("option", config.OPTIONS, ids=lambda option: option.name)
@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
def test_a_strange_value_of_any_option_is_taken_as_it_is_or_rejected_by_name(option, value):
    try:
        made = read_settings({option.key: value}, {})
    except ConfigError as error:
        assert str(error).startswith(f"{option.key}=")
        assert str(error).endswith(f" is not {option.accepted}")
        assert len(str(error)) < 300
        return
    kept = getattr(made, option.name)
    assert type(kept) is type(option.default)
    if type(option.default) is tuple:
        assert kept == () or kept == (1,)
    else:
        assert kept == value
        assert type(value) is type(option.default) or type(value) is int, "another type"


@pytest.mark.parametrize("extra", [[], "pegaflow.port=1", None, 5])
def test_a_configuration_other_than_a_mapping_is_rejected(extra):
    with pytest.raises(ConfigError, match="kv_connector_extra_config=.* is not a mapping"):
        read_settings(extra, {})


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"PEGAFLOW_PORT": "x"}, "PEGAFLOW_PORT"),
        ({"PEGAFLOW_HOST": "x" * 5000}, "PEGAFLOW_HOST"),
        ({"PEGAFLOW_ENGINE_ENDPOINT": "x" * 5000}, "PEGAFLOW_ENGINE_ENDPOINT"),
    ],
)
def test_an_invalid_variable_is_rejected_by_its_name(environ, name):
    with pytest.raises(ConfigError, match=f"^{name}='x"):
        settings(environ)


def test_words_and_numbers_of_json_and_of_the_environment_are_accepted():
    assert settings(port="50056").port == 50056
    assert settings(keep_failure_policy="true").keep_failure_policy is True
    assert settings(keep_failure_policy=False).keep_failure_policy is False
    assert settings(claim_wait_ms=2).claim_wait_ms == 2.0


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("prot", "port"),
        ("min_load_token", "min_load_tokens"),
        ("weightsid", "weights_id"),
        ("PORT", "port"),
        ("", "port"),
    ],
)
def test_an_unknown_key_is_rejected_with_the_nearest_valid_one(wrong, right):
    with pytest.raises(ConfigError, match=f"unknown option pegaflow.{wrong}.*pegaflow.{right}$"):
        settings(**{wrong: 1})


@pytest.mark.parametrize(
    "key", ["pegaflow_port", "Pegaflow.port", "pegaflow-port", "pega_flow.port", "PEGAFLOW_PORT"]
)
def test_a_misspelled_prefix_is_rejected_with_the_nearest_valid_key(key):
    with pytest.raises(ConfigError, match=f"unknown option {key}; the nearest is pegaflow.port$"):
        read_settings({key: 1}, {})


def test_keys_of_other_connectors_are_ignored():
    others = {"connectors": [], "spec_name": "x", "port": "any", 5: 6, "pegaflows": 1}
    assert read_settings(others, {}) == read_settings({}, {})


def test_keys_of_the_older_connector_are_accepted_and_explained():
    made = settings(transfer_backend="kernel")
    assert any("pegaflow.transfer_backend has no meaning" in remark for remark in made.remarks)


def test_the_environment_overrides_the_configuration():
    environ = {"PEGAFLOW_HOST": "localhost", "PEGAFLOW_PORT": "7"}
    made = settings(environ, host="unix:/x", port=50055)
    assert (made.host, made.port) == ("localhost", 7)
    environ["PEGAFLOW_ENGINE_ENDPOINT"] = "unix:/run/other.sock"
    assert socket_path(settings(environ)) == "/run/other.sock"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]", "0.0.0.0", "http://127.0.0.1"],
)
def test_names_of_this_machine_lead_to_the_socket_of_the_port(host):
    assert socket_path(settings(host=host, port=4711)) == _native.default_socket_path(4711)


def test_the_host_name_is_this_machine_and_may_carry_the_port():
    host = f"{socket.gethostname()}:4712"
    assert socket_path(settings(host=host)) == _native.default_socket_path(4712)


@pytest.mark.parametrize("host", ["192.0.2.7", "http://192.0.2.7", "node-7.invalid"])
def test_another_machine_is_rejected_with_the_reason(host):
    with pytest.raises(
        ConfigError, match="is not this machine.*pegaflow-server on its own machine"
    ):
        socket_path(settings(host=host))


def test_a_socket_needs_an_absolute_path():
    assert socket_path(settings(host="unix:/run/x.sock")) == "/run/x.sock"
    with pytest.raises(ConfigError, match="pegaflow.host='unix:x.sock': .* absolute path"):
        socket_path(settings(host="unix:x.sock"))


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("", "pegaflow.host='' is neither an address of this machine nor unix:/PATH"),
        ("http://", "pegaflow.host='http://' is neither an address"),
        (
            "localhost:x",
            "pegaflow.host='localhost:x': port='x' is not a whole number between 1 and",
        ),
        ("localhost:0", "port='0' is not a whole number between 1 and 65535"),
        ("x" * 300, "is not this machine"),
        ("a..b", "is not this machine"),
        ("unix:/" + "x" * 107, "the path of a socket has at most 107 bytes, not 108"),
    ],
)
def test_an_impossible_host_is_rejected_by_name(host, words):
    with pytest.raises(ConfigError) as error:
        socket_path(settings(host=host))
    assert words in str(error.value)
    with pytest.raises(ConfigError, match=r"^PEGAFLOW_ENGINE_ENDPOINT="):
        socket_path(settings({"PEGAFLOW_ENGINE_ENDPOINT": host or "unix:"}))


def test_deadlines_become_seconds_of_the_native_options():
    assert settings(lookup_deadline_ms=7).link_options()["lookup_deadline"] == 0.007


def test_a_number_that_equals_a_boolean_is_shown_as_a_number():
    rows = {line.split("|")[1].strip(): line for line in options_markdown().splitlines()}
    assert "| 0 |" in rows["`pegaflow.min_load_tokens`"]
    assert "| 1 |" in rows["`pegaflow.claim_wait_ms`"]
    assert "| false |" in rows["`pegaflow.keep_failure_policy`"]
    assert "| empty |" in rows["`pegaflow.weights_id`"]
    assert "| 1,000,000,000 |" in rows["`pegaflow.load_bytes_per_second`"]


TABLES = {
    ("<!-- options: made from engine/config.py -->", "<!-- end of options -->"): (options_markdown),
    ("<!-- metrics: made from vllm/metrics.py -->", "<!-- end of metrics -->"): (metrics_markdown),
}


def with_tables(text: str) -> str:
    for (begin, end), table in TABLES.items():
        head, rest = text.split(begin)
        _, tail = rest.split(end)
        text = f"{head}{begin}\n{table()}\n{end}{tail}"
    return text


def test_the_document_lists_every_option_and_metric():
    text = DOCUMENT.read_text()
    if os.environ.get("PEGA_WRITE_DOCS"):
        DOCUMENT.write_text(with_tables(text))
    assert with_tables(text) == text, (
        "docs/connector.md is behind the code: run this test with PEGA_WRITE_DOCS=1"
    )
