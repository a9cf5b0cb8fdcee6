"""The command lines of vLLM and pegaflow-server, without starting them."""

import http.server
import json
import socket
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.support import vllm_server
from tests.support.child_process import ChildFailed
from tests.support.vllm_server import (
    FORKING_VLLM,
    ModelShape,
    PegaServer,
    VllmOptions,
    VllmServer,
    ensure_hybrid,
    free_port,
)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_plain_vllm_gets_no_connector(tmp_path: Path) -> None:
    command = VllmServer(VllmOptions(Path("model")), tmp_path).command()
    assert "--kv-transfer-config" not in command
    assert option(command, "--block-size") == "32"


def test_only_tests_start_a_vllm_whose_processes_are_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = VllmServer(VllmOptions(Path("model")), tmp_path)
    assert FORKING_VLLM.is_file()
    assert server.command()[1:4] == ["-P", str(FORKING_VLLM), "serve"]
    monkeypatch.delenv("PEGA_VLLM_FORKS")
    assert [Path(word).name for word in server.command()[:2]] == ["vllm", "serve"]


def test_the_connector_gets_the_address_and_more(tmp_path: Path) -> None:
    options = VllmOptions(
        Path("model"),
        connector="unix:/x/pega.sock",
        extra_config={"pegaflow.mode": "save_only"},
        prefix_caching=False,
    )
    command = VllmServer(options, tmp_path).command()

    config = json.loads(option(command, "--kv-transfer-config"))
    assert config["kv_connector"] == "PegaKVConnector"
    assert config["kv_connector_module_path"] == "pegaflow.connector"
    assert config["kv_connector_extra_config"] == {
        "pegaflow.host": "unix:/x/pega.sock",
        "pegaflow.load_policy": "always",
        "pegaflow.mode": "save_only",
    }
    assert "--no-enable-prefix-caching" in command


def test_a_whole_transfer_config_replaces_ours(tmp_path: Path) -> None:
    options = VllmOptions(Path("model"), connector="unix:/x", kv_transfer_config={"kv_role": "a"})
    assert VllmServer(options, tmp_path).kv_transfer_config() == {"kv_role": "a"}


def test_modules_and_variables_reach_vllm(tmp_path: Path) -> None:
    options = VllmOptions(Path("model"), python_path=[Path("/build/python")])
    server = VllmServer(options, tmp_path, env={"MINE": "1"})
    assert server.env["PYTHONPATH"].split(":")[0] == "/build/python"
    assert server.env["MINE"] == "1"
    assert server.env["HF_HUB_OFFLINE"] == "1"


def test_a_path_too_long_for_a_unix_socket_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ChildFailed, match="too long a path"):
        VllmServer(VllmOptions(Path("model")), tmp_path).start()
    assert not any(long.iterdir())


def test_a_launched_server_has_its_port_and_its_own_temporary_files(tmp_path: Path) -> None:
    class Idle(VllmServer):
        def command(self) -> list[str]:
            return ["sleep", "60"]

    server = Idle(VllmOptions(Path("model")), tmp_path)
    server.launch()
    try:
        assert server.http != "127.0.0.1:0"
        assert Path(server.env["TMPDIR"]).is_dir()
    finally:
        server.kill()
    assert not Path(server.env["TMPDIR"]).exists()


def test_another_python_runs_its_own_vllm(tmp_path: Path) -> None:
    options = VllmOptions(Path("model"), python=Path("/other/bin/python"))
    command = VllmServer(options, tmp_path).command()
    assert command[:4] == ["/other/bin/python", "-m", "vllm.entrypoints.cli.main", "serve"]


def test_another_port_is_tried_if_the_first_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[str] = []

    class TakenPort(VllmServer):
        def command(self) -> list[str]:
            ports.append(option(super().command(), "--port"))
            return [sys.executable, "-c", "raise OSError('[Errno 98] Address already in use')"]

    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        with pytest.raises(ChildFailed, match="Address already in use"):
            TakenPort(VllmOptions(Path("model")), tmp_path).start()
        assert not any(Path(directory).iterdir())
    assert len(ports) == 3


def test_the_answer_of_another_program_on_the_port_is_not_that_of_vllm(tmp_path: Path) -> None:
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    server = VllmServer(VllmOptions(Path("model")), tmp_path)
    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        server._port = other.server_address[1]
        server.log_file.write_text("loading the model\n")
        before = server.is_ready()
        server.log_file.write_text("INFO:     Application startup complete.\n")
        behind = server.is_ready()
        other.shutdown()
        thread.join()
    assert (before, behind) == (False, True)


def test_a_free_port_can_be_bound() -> None:
    port = free_port()
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", port))
        assert taker.getsockname() == ("127.0.0.1", port)
    assert port != 0


def test_the_server_is_ready_when_its_ready_file_exists(tmp_path: Path) -> None:
    fake = tmp_path / "server"
    fake.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != --ready-file ]; do shift; done\n'
        'echo \'{"socket": "s", "http": "127.0.0.1:1234", "pid": 5}\' >"$2.new"\n'
        'mv "$2.new" "$2"\n'
        "exec tail -f /dev/null\n"
    )
    fake.chmod(0o755)
    with PegaServer(fake, tmp_path / "work", pool_size="64mb") as server:
        assert server.http == "127.0.0.1:1234"
        assert server.address == f"unix:{tmp_path}/work/pega.sock"
        assert option(server.command(), "--addr") == server.address
        assert option(server.command(), "--pool-size") == "64mb"
    # The file of a former run must not make the next one ready.
    fake.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ChildFailed, match="status 1"):
        server.start()


def test_the_model_of_the_demo_needs_a_page_of_one_and_a_half_mebibytes() -> None:
    assert ModelShape().kv_bytes_per_token() * 32 == 3 << 19


def test_a_model_is_kept_until_its_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = tmp_path / "tools" / "vllm-cpu" / "make_hybrid.py"
    maker.parent.mkdir(parents=True)
    common = maker.with_name("make_model.py")
    common.write_text("")
    monkeypatch.setattr(vllm_server, "REPOSITORY", tmp_path)
    monkeypatch.setattr(vllm_server, "venv_bin", lambda: Path(sys.executable).parent)

    def write_maker(weights: str) -> None:
        maker.write_text(
            "import pathlib, sys\n"
            "out = pathlib.Path(sys.argv[2])\n"
            "out.mkdir()\n"
            f"(out / 'weights').write_text(sys.argv[1] + {weights!r})\n"
        )

    write_maker(" first")
    model = ensure_hybrid("granite")
    assert (model / "weights").read_text() == "granite first"
    made = (model / "weights").stat()
    assert ensure_hybrid("granite") == model
    assert (model / "weights").stat() == made

    write_maker(" second")
    assert (ensure_hybrid("granite") / "weights").read_text() == "granite second"

    # One that was made before recipes were noted, or by another make_model.py.
    (model / "weights").write_text("old")
    common.write_text("# another tokenizer")
    assert (ensure_hybrid("granite") / "weights").read_text() == "granite second"
    (model / ".recipe").unlink()
    (model / "weights").write_text("old")
    assert (ensure_hybrid("granite") / "weights").read_text() == "granite second"
    assert [path.name for path in sorted(model.parent.iterdir())] == [".lock", "granite"]
