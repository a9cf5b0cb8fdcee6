"""Checks of deploy/ that need neither Docker nor systemd as the first process.

Options exist, names match each other, commands run. tools/deploy/boot_unit.sh boots the unit, and
docs/deploy.md lists what was not run.
"""

import json
import os
import re
import select
import shutil
import signal
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from tests.support.child_process import ChildProcess
from tests.support.disk_server import BLOCKS, DiskEngine
from tests.support.vllm_server import PegaServer

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = ROOT / "deploy/systemd"
CONTAINER = ROOT / "deploy/container"
SERVER = Path(os.environ["PEGA_BUILD_DIR"], "server/pegaflow-server")
INDEX = SERVER.parents[1] / "router" / "pegaflow-index"
KEEPER = SERVER.with_name("pegaflow-keeper")


def run(*words: str | Path, **options) -> subprocess.CompletedProcess:
    command = [str(word) for word in words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.fixture(scope="session")
def flags() -> set[str]:
    """The server's options."""
    return set(re.findall(r"--[a-z-]+", run(SERVER, "--help").stdout))


# ---- systemd


class Unit(ConfigParser):
    optionxform = staticmethod(str)


def unit_of(name: str) -> Unit:
    parsed = Unit(interpolation=None, strict=False, delimiters="=")
    assert parsed.read(SYSTEMD / name)
    return parsed


def with_programs_of_the_build(path: Path) -> str:
    text = path.read_text().replace("/opt/pegaflow/bin/pegaflow-index", str(INDEX))
    return text.replace("/opt/pegaflow/bin", str(SERVER.parent))


@pytest.fixture
def unit() -> Unit:
    return unit_of("pegaflow-server.service")


def test_the_unit_starts_a_server_that_accepts_its_options(unit, flags):
    program, *words = unit["Service"]["ExecStart"].split()

    assert program == "/opt/pegaflow/bin/pegaflow-server"
    assert {word for word in words if word.startswith("--")} <= flags
    assert words == ["--config", "/etc/pegaflow/server.conf"]


def test_the_server_accepts_the_options_of_the_example_file():
    done = run(SERVER, "--config", SYSTEMD / "server.conf", "--print-options")

    assert done.returncode == 0, done.stderr
    assert "30 GiB" in done.stdout or "30gb" in done.stdout


def test_the_index_accepts_its_unit_and_the_options_of_its_example_file():
    unit = unit_of("pegaflow-index.service")
    assert unit["Service"]["ExecStart"].split()[1:] == ["--config", "/etc/pegaflow/index.conf"]
    assert f"u {unit['Service']['User']} " in (SYSTEMD / "pegaflow.sysusers").read_text()

    done = run(INDEX, "--config", SYSTEMD / "index.conf", "--print-options")

    assert done.returncode == 0, done.stderr
    assert "http://127.0.0.1:8000" in done.stdout


def test_the_example_file_with_an_unknown_option_is_rejected(tmp_path):
    wrong = tmp_path / "server.conf"
    wrong.write_text((SYSTEMD / "server.conf").read_text() + "pool-seize = 1gb\n")

    assert run(SERVER, "--config", wrong, "--print-options").returncode != 0


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize(
    "drop_ins",
    [[], ["rdma.conf"], ["ssd.conf"], ["keep.conf"], ["rdma.conf", "ssd.conf", "keep.conf"]],
)
def test_systemd_accepts_every_line_of_the_units(tmp_path, drop_ins):
    units = ["pegaflow-server.service", "pegaflow-keeper.service", "pegaflow-index.service"]
    for name in units:
        (tmp_path / name).write_text(with_programs_of_the_build(SYSTEMD / name))

    folder = tmp_path / "pegaflow-server.service.d"
    folder.mkdir()
    for name in drop_ins:
        (folder / name).write_text(with_programs_of_the_build(SYSTEMD / name))

    # Man pages and users are those of the machine that runs the unit.
    done = run("systemd-analyze", "verify", "--man=no", *[tmp_path / name for name in units])

    lines = done.stderr.splitlines()
    names = [*units, *drop_ins]
    mine = [line for line in lines if any(name in line for name in names)]
    assert mine == []


def test_the_unit_and_the_other_files_name_the_same_user_and_directory(unit):
    service = unit["Service"]

    assert f"u {service['User']} " in (SYSTEMD / "pegaflow.sysusers").read_text()
    assert f"socket-group = {service['Group']}" in (SYSTEMD / "server.conf").read_text()
    assert service["Environment"] == f"PEGAFLOW_RUNTIME_DIR=/run/{service['RuntimeDirectory']}"


def test_the_unit_of_the_keeper_runs_beside_that_of_the_server(unit, flags):
    keeper, drop_in = unit_of("pegaflow-keeper.service"), unit_of("keep.conf")
    shared = ("User", "Group", "RuntimeDirectory", "RuntimeDirectoryMode", "Environment")

    assert keeper["Service"]["ExecStart"] == "/opt/pegaflow/bin/pegaflow-keeper"
    for name in (*shared, "RuntimeDirectoryPreserve"):
        assert keeper["Service"][name] == unit["Service"][name]
    # More likely to be killed than the server: while it lives, killing that one frees nothing.
    assert int(keeper["Service"]["OOMScoreAdjust"]) > int(unit["Service"]["OOMScoreAdjust"])
    words = drop_in["Service"]["ExecStart"].split()
    assert words == [*unit["Service"]["ExecStart"].split(), "--keep", "external"]
    assert "--keep" in flags
    # Both have the default --addr.
    assert "addr" not in re.findall(r"^([a-z-]+) =", (SYSTEMD / "server.conf").read_text(), re.M)


#: Runs in a mount namespace of its own, with a service manager that is not the first process.
MANAGER = """
set -eu
mount --make-rprivate /
mount -t tmpfs none /run
mkdir -p /run/systemd/system
install -d -m 700 /run/user
export XDG_RUNTIME_DIR=/run/user XDG_CONFIG_HOME=$1
/lib/systemd/systemd --user --log-target=console 2>"$1/log" &
manager=$!
trap 'kill -TERM $manager; wait $manager' EXIT
until systemctl --user is-active --quiet default.target; do
    kill -0 $manager
done
shift
"$@"
"""


@pytest.mark.skipif(not Path("/lib/systemd/systemd").exists(), reason="systemd is not installed")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a mount namespace")
def test_a_restart_of_the_unit_keeps_the_pool_and_a_stop_frees_it(short_path):
    config = short_path / "config"
    units = config / "systemd/user"
    (units / "pegaflow-server.service.d").mkdir(parents=True)
    for name in ("pegaflow-server.service", "pegaflow-keeper.service"):
        # The dependencies, the restarts and the programs: a user's manager has no other users and
        # makes no sandbox.
        lines = with_programs_of_the_build(SYSTEMD / name).splitlines()
        wanted = ("[Unit]", "[Service]", "StopWhenUnneeded", "Type", "ExecStart", "Restart")
        kept = [line for line in lines if line.startswith(wanted)]
        kept.append(f"Environment=PEGAFLOW_RUNTIME_DIR={short_path}")
        (units / name).write_text("\n".join(kept) + "\n")
    drop_in = with_programs_of_the_build(SYSTEMD / "keep.conf")
    server_conf = short_path / "server.conf"
    server_conf.write_text("pool-size = 64mb\nhttp-addr = 127.0.0.1:0\n")
    (units / "pegaflow-server.service.d/keep.conf").write_text(
        drop_in.replace("/etc/pegaflow/server.conf", f"{server_conf} --ready-file {short_path}/r")
    )
    script = short_path / "look.sh"
    script.write_text(LOOK)

    done = run("unshare", "-m", "bash", "-c", MANAGER, "-", config, "bash", script, short_path)

    assert done.returncode == 0, done.stdout + done.stderr + (config / "log").read_text()
    keepers = dict(line.split() for line in done.stdout.splitlines())
    first = keepers.pop("started")
    assert keepers.pop("restarted") == keepers.pop("killed") == first
    assert keepers.pop("stopped") == "0"
    assert keepers.pop("again") not in ("0", first)
    assert not keepers


#: Prints the keeper's pid after each step.
LOOK = """
set -eu
of() { systemctl --user show -P MainPID "pegaflow-$1"; }
# A server that is ready has the pool of that keeper, or a new one.
serves() {
    until [ -s "$ready" ]; do
        if systemctl --user is-failed --quiet pegaflow-server; then exit 1; fi
    done
}
ready=$1/r
systemctl --user start pegaflow-server
serves
echo "started $(of keeper)"
systemctl --user restart pegaflow-server
serves
echo "restarted $(of keeper)"
former=$(of server)
rm "$ready"
kill -KILL "$former"
serves
echo "killed $(of keeper)"
systemctl --user stop pegaflow-server
# A unit that is being stopped is not active either, and still has its process.
until [ "$(systemctl --user show -P ActiveState pegaflow-keeper)" = inactive ]; do
    if systemctl --user is-failed --quiet pegaflow-keeper; then exit 1; fi
done
echo "stopped $(of keeper)"
systemctl --user start pegaflow-server
serves
echo "again $(of keeper)"
systemctl --user stop pegaflow-server
"""


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_the_unit_allows_io_uring(unit):
    assert unit["Service"]["SystemCallFilter"] == "@system-service"

    def calls(group: str) -> list[str]:
        return run("systemd-analyze", "syscall-filter", group).stdout.split()

    assert "@aio" in calls("@system-service")
    assert {"io_uring_setup", "io_uring_enter", "io_uring_register"} <= set(calls("@aio"))


def test_the_drop_in_of_the_disks_fits_the_example_file_and_the_time_of_a_stop(tmp_path):
    drop_in = unit_of("ssd.conf")
    (path,) = {drop_in["Unit"]["RequiresMountsFor"], drop_in["Service"]["ReadWritePaths"]}
    # The command of docs/deploy.md.
    text = (SYSTEMD / "server.conf").read_text().replace("\n#ssd-", "\nssd-")
    with_disks = tmp_path / "server.conf"
    with_disks.write_text(text)

    done = run(SERVER, "--config", with_disks, "--print-options")

    assert done.returncode == 0, done.stderr
    assert f"ssd-cache-path = {path}" in done.stdout
    assert int(drop_in["Service"]["TimeoutStopSec"]) > drain_s(done.stdout)


def drain_s(printed: str) -> int:
    """Seconds for which a server that is stopped writes and flushes."""
    return int(re.search(r"^ssd-drain = (\d+) ?s\b", printed, re.MULTILINE)[1]) + 2


# ---- containers


def merged(one: dict, other: dict) -> dict:
    """As `docker compose -f` merges two services: a command is replaced, volumes are appended."""
    return {**one, **other, "volumes": one["volumes"] + other["volumes"]}


@pytest.fixture
def with_disks(services) -> dict:
    """The server of both compose files."""
    other = yaml.safe_load((CONTAINER / "compose.ssd.yaml").read_text())["services"]
    assert other.keys() == {"pegaflow"}
    return merged(services["pegaflow"], other["pegaflow"])


def test_the_compose_file_of_the_disks_mounts_the_path_and_waits_for_the_writes(
    services, with_disks, dockerfile
):
    words = with_disks["command"]
    done = run(SERVER, *words, "--print-options")

    assert done.returncode == 0, done.stderr
    (mount,) = [each for each in with_disks["volumes"] if isinstance(each, dict)]
    assert mount["type"] == "bind"
    assert words[words.index("--ssd-cache-path") + 1] == mount["target"]
    assert words[: len(services["pegaflow"]["command"])] == services["pegaflow"]["command"]
    assert int(with_disks["stop_grace_period"].removesuffix("s")) > drain_s(done.stdout)
    (user,) = re.findall(r"^USER (\d+):", dockerfile, re.MULTILINE)
    assert f"-o {user} -g {user}" in (CONTAINER / "compose.ssd.yaml").read_text()


def test_the_compose_file_of_the_keeper_shares_image_and_directory_with_the_server(services):
    both = yaml.safe_load((CONTAINER / "compose.keep.yaml").read_text())["services"]
    keeper, server = both.pop("keeper"), {**services["pegaflow"], **both.pop("pegaflow")}
    assert not both
    words = server["command"]

    assert run(SERVER, *words, "--print-options").returncode == 0
    assert words == [*services["pegaflow"]["command"], "--keep", "external"]
    assert server["depends_on"] == ["keeper"]
    for setting in ("build", "volumes"):
        assert keeper[setting] == server[setting]
    (program,) = keeper["entrypoint"]
    assert KEEPER.name == program
    assert run(KEEPER, "--version").returncode == 0
    assert keeper["oom_score_adj"] > server["oom_score_adj"]


#: A program as the first process of a PID namespace, as in a container.
CONTAINED = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


class ContainedKeeper(ChildProcess):
    def __init__(self, directory: Path) -> None:
        super().__init__("pegaflow-keeper", directory / "keeper.log")
        self.socket = directory / "pega.keeper"
        self._address = f"unix:{directory}/pega.sock"

    def command(self) -> list[str]:
        return [*CONTAINED, str(KEEPER), "--addr", self._address]

    def is_ready(self) -> bool:
        return self.socket.exists()


class ContainedServer(PegaServer):
    def command(self) -> list[str]:
        return [*CONTAINED, *super().command()]

    def kill(self) -> int | None:
        """Ends the program itself first: unshare does not wait for it."""
        (pid,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        program = os.pidfd_open(int(pid))
        try:
            signal.pidfd_send_signal(program, signal.SIGKILL)
            assert select.select([program], [], [], 30)[0]
        finally:
            os.close(program)
        return super().kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a PID namespace")
def test_a_keeper_in_another_container_passes_the_pool_to_the_next_server(short_path):
    directory = short_path / "apart"
    directory.mkdir()
    words = ["--keep", "external"]
    with (
        ContainedKeeper(directory) as keeper,
        ContainedServer(SERVER, directory, pool_size="64mb", arguments=words) as server,
        DiskEngine(server) as engine,
    ):
        engine.save_to_pool()
        saved = engine.memory.copy()
        server.kill()
        server.start()
        engine.wait_ready()

        assert engine.load() == BLOCKS
        assert (engine.memory == saved).all()
        page = server.metrics()
        assert page.total("pegaflow_adopted_blocks") == BLOCKS
        assert page.total("pegaflow_former_clients") == 0
        # unshare does not pass a SIGTERM on.
        server.kill()
        keeper.kill()


@pytest.fixture
def services() -> dict:
    return yaml.safe_load((CONTAINER / "compose.yaml").read_text())["services"]


@pytest.fixture
def dockerfile() -> str:
    """Its instructions, one in each line."""
    lines = (CONTAINER / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return text.replace("\\\n", " ")


def test_the_compose_file_uses_existing_options_of_the_server(services, flags):
    words = services["pegaflow"]["command"]

    assert {word for word in words if word.startswith("--")} <= flags
    assert run(SERVER, *words, "--print-options").returncode == 0


def test_the_compose_file_shares_the_directory_of_the_socket(services):
    mounts = [set(service["volumes"]) for service in services.values()]

    assert "pegaflow-run:/run/pegaflow" in set.intersection(*mounts)


def test_the_compose_file_keeps_digests_of_weights_in_a_volume(services):
    vllm = services["vllm"]
    directory = vllm["environment"]["PEGAFLOW_CACHE_DIR"]

    (volume,) = [one for one in vllm["volumes"] if one.endswith(f":{directory}")]
    declared = yaml.safe_load((CONTAINER / "compose.yaml").read_text())["volumes"]
    assert volume.partition(":")[0] in declared


def test_the_connector_accepts_the_configuration_of_the_compose_file(services):
    from pegaflow.engine.config import read_settings, socket_path

    (word,) = [word for word in services["vllm"]["command"] if "kv-transfer-config" in word]
    config = json.loads(word.removeprefix("--kv-transfer-config="))

    assert config["kv_connector_module_path"] == "pegaflow.connector"
    settings = read_settings(config["kv_connector_extra_config"], {})
    assert socket_path(settings) == "/run/pegaflow/50055.sock"


def test_the_compose_file_builds_stages_that_the_dockerfile_has(services, dockerfile):
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))

    for service in services.values():
        build = service["build"]
        assert build["target"] in stages
        assert (CONTAINER / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
    assert set(re.findall(r"--from=(\w+)", dockerfile)) <= stages


def test_the_image_of_vllm_is_a_release_and_not_latest(dockerfile):
    (stage,) = re.findall(r"^FROM (\S+) AS vllm$", dockerfile, re.MULTILINE)
    name, value = re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.MULTILINE)[0]

    # An ARG after a FROM is not visible to another FROM.
    assert dockerfile.index(f"ARG {name}=") < dockerfile.index("FROM ")
    image, tag = stage.replace("${" + name + "}", value).split(":")
    assert image == "vllm/vllm-openai"
    assert re.fullmatch(r"v\d+\.\d+\.\d+", tag)


def test_the_build_stage_of_the_dockerfile_has_nvcc_of_the_pinned_packages(dockerfile):
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", dockerfile, re.M | re.S))

    assert "COPY tools/bundle/requirements-nvcc.txt" in stages["nvcc"]
    source, target = re.search(r"COPY --from=nvcc (\S+) (\S+)", stages["build"]).groups()
    assert re.search(r"--target (\S+)", stages["nvcc"])[1] in source
    assert target == "/usr/local/cuda"  # where meson looks
    assert "--without-kernels" not in dockerfile


def test_the_dockerfile_calls_existing_subcommands_of_dev_and_programs_of_a_bundle(dockerfile):
    for subcommand in re.findall(r"\./dev (\w+)", dockerfile):
        assert run(ROOT / "dev", subcommand, "--help").returncode == 0
    for body in re.findall(r"^RUN (.*)$", dockerfile, re.MULTILINE):
        assert run("sh", "-n", "-c", body).returncode == 0
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)
    (words,) = re.findall(r"^CMD (.*)$", dockerfile, re.MULTILINE)
    assert json.loads(entry) == ["pegaflow-server"]
    assert run(SERVER, *json.loads(words), "--print-options").returncode == 0


def test_the_health_check_of_the_image_detects_whether_the_server_serves(dockerfile, tmp_path):
    (text,) = re.findall(r"^HEALTHCHECK .*?CMD (.*)$", dockerfile, re.MULTILINE)
    shell, option, command = json.loads(text)
    assert "127.0.0.1/9091" in command

    with PegaServer(SERVER, tmp_path, pool_size="64mb") as server:
        here = command.replace("127.0.0.1/9091", server.http.replace(":", "/"))
        assert run(shell, option, here).returncode == 0

    assert run(shell, option, here).returncode != 0
