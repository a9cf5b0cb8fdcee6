"""Checks of deploy/kubernetes/ without a cluster.

The manifests fit the schema of a Kubernetes release, the options exist, and the settings fit each
other and the image. docs/deploy.md lists what was not run.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.support.child_process import ChildProcess

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
BINARIES = Path(os.environ["PEGA_BUILD_DIR"], "server")
SCHEMA = json.loads((ROOT / "tests/support/daemonset.schema.json").read_text())
GIB = 1 << 30


def run(*words: str | Path) -> subprocess.CompletedProcess:
    command = [str(word) for word in words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def read(name: str) -> dict:
    return yaml.safe_load((FOLDER / name).read_text())


def merged(one: dict, patch: dict) -> dict:
    """As Kustomize merges: maps by key, containers by name, everything else is replaced."""
    result = dict(one)
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(one.get(key), dict):
            result[key] = merged(one[key], value)
        elif key == "containers":
            names = [each["name"] for each in one[key]]
            assert {each["name"] for each in value} <= set(names)
            by_name = {each["name"]: each for each in value}
            result[key] = [merged(each, by_name.get(each["name"], {})) for each in one[key]]
        else:
            result[key] = value
    return result


def variants() -> dict[str, dict]:
    """The manifest as it is, and with each patch of the kustomization."""
    base, kustomization = read("daemonset.yaml"), read("kustomization.yaml")
    assert kustomization["resources"] == ["daemonset.yaml"]
    patched = base
    for patch in kustomization["patches"]:
        patched = merged(patched, read(patch["path"]))
    return {"daemonset.yaml": base, "kustomization.yaml": patched}


@pytest.fixture(params=["daemonset.yaml", "kustomization.yaml"])
def manifest(request) -> dict:
    return variants()[request.param]


def problems(manifest: dict) -> list[str]:
    found = jsonschema.Draft7Validator(SCHEMA).iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in found]


def pod_of(manifest: dict) -> dict:
    return manifest["spec"]["template"]["spec"]


def container(manifest: dict, name: str) -> dict:
    pod = pod_of(manifest)
    (found,) = [
        each for each in (*pod["initContainers"], *pod["containers"]) if each["name"] == name
    ]
    return found


def size_of(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)", quantity).groups()
    return int(number) << {"Ki": 10, "Mi": 20, "Gi": 30}[unit]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_manifest_fits_the_schema(manifest):
    assert problems(manifest) == []


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (("spec", "template", "spec"), "terminationGracePeriod", 40),
        (("spec", "template", "spec", "containers", 0, "livenessProbe"), "periodSeconds", "10s"),
        (("spec", "template", "spec", "containers", 0), "arguments", []),
        (("spec",), "updateStrategy", "OnDelete"),
    ],
)
def test_a_misspelled_field_or_a_wrong_value_is_found(place, name, value):
    wrong = copy.deepcopy(read("daemonset.yaml"))
    at = wrong
    for step in place:
        at = at[step]
    at[name] = value

    assert problems(wrong)


def test_the_server_has_every_option_and_accepts_them(manifest):
    words = container(manifest, "server")["args"]
    done = run(BINARIES / "pegaflow-server", *words, "--print-options")

    assert done.returncode == 0, done.stderr
    # A child of the container's first process would end with it.
    assert option(words, "--keep") == "external"


def test_memory_is_enough_for_the_pool(manifest):
    server = container(manifest, "server")
    words, limits = server["args"], server["resources"]["limits"]
    pool = int(option(words, "--pool-size").removesuffix("gb")) * GIB
    rest = size_of(limits["memory"])

    if "--use-hugepages" in words:
        assert size_of(limits["hugepages-2Mi"]) == pool
        # Kubernetes rejects requests for huge pages that differ from the limit.
        assert server["resources"]["requests"]["hugepages-2Mi"] == limits["hugepages-2Mi"]
    else:
        assert "hugepages-2Mi" not in limits
        rest -= pool
    assert rest >= GIB
    assert "cpu" not in limits


def test_the_keeper_is_a_sidecar_that_starts_before_the_server(manifest):
    pod = pod_of(manifest)
    names = [each["name"] for each in pod["initContainers"]]

    assert names == ["directory", "keeper"]
    assert container(manifest, "keeper")["restartPolicy"] == "Always"
    assert "restartPolicy" not in container(manifest, "directory")
    # A new pod would lose the pool.
    assert manifest["spec"]["updateStrategy"]["type"] == "OnDelete"


def test_all_containers_share_the_directory_of_the_socket_and_the_image(manifest):
    pod = pod_of(manifest)
    (volume,) = pod["volumes"]
    containers = [*pod["initContainers"], *pod["containers"]]

    assert volume["hostPath"]["path"] == "/run/pegaflow"
    for each in containers:
        assert each["volumeMounts"] == [{"name": volume["name"], "mountPath": "/run/pegaflow"}]
    assert len({each["image"] for each in containers}) == 1


def test_user_directory_and_program_are_those_of_the_image(manifest):
    dockerfile = (ROOT / "deploy/container/Dockerfile").read_text()
    user, group = re.search(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE).groups()
    security = pod_of(manifest)["securityContext"]

    assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group))
    assert "PEGAFLOW_RUNTIME_DIR=/run/pegaflow" in dockerfile
    assert "PATH=/opt/pegaflow/bin" in dockerfile
    program = container(manifest, "keeper")["command"][0]
    assert program == "pegaflow-keeper"
    assert re.search(rf"for name in .*\b{program}\b", (ROOT / "dev").read_text())


def test_no_container_but_that_of_the_directory_has_a_capability_or_is_root(manifest):
    for name in ("keeper", "server"):
        security = container(manifest, name)["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["allowPrivilegeEscalation"] is False
        assert not security.keys() & {"runAsUser", "privileged"}
    assert pod_of(manifest)["securityContext"]["runAsNonRoot"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop capabilities of root")
@pytest.mark.parametrize("mode", [0o755, 0o750])
def test_the_directory_belongs_to_the_server_afterwards(manifest, short_path, mode):
    directory = Path(tempfile.mkdtemp(dir=short_path))
    directory.chmod(mode)
    its = container(manifest, "directory")
    words = [str(directory) if word == "/run/pegaflow" else word for word in its["command"]]
    kept = [f"+{name.lower()}" for name in its["securityContext"]["capabilities"]["add"]]
    bounds = ",".join(["-all", *kept])

    for _ in range(2):  # at the first start of a pod, and at a later one
        done = run("setpriv", "--bounding-set", bounds, "--inh-caps", "-all", *words)

        assert done.returncode == 0, done.stderr
        found = directory.stat()
        user = pod_of(manifest)["securityContext"]
        assert (found.st_uid, found.st_gid) == (user["runAsUser"], user["runAsGroup"])
        assert found.st_mode & 0o7777 == 0o750


def test_the_probes_ask_the_port_that_the_server_listens_on(manifest):
    server = container(manifest, "server")
    (port,) = server["ports"]

    assert option(server["args"], "--http-addr") == f"0.0.0.0:{port['containerPort']}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    annotations = manifest["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])


def test_a_start_and_an_end_have_the_time_that_the_server_needs(manifest):
    server = container(manifest, "server")
    done = run(BINARIES / "pegaflow-server", *server["args"], "--print-options")
    startup = server["startupProbe"]

    def seconds(name: str) -> int:
        return int(re.search(rf"^{name} = (\d+) ?s\b", done.stdout, re.MULTILINE)[1])

    # Waiting for memory, and then touching it at 1 GB/s at least.
    assert startup["periodSeconds"] * startup["failureThreshold"] > seconds("pool-wait") + 60
    assert pod_of(manifest)["terminationGracePeriodSeconds"] > seconds("ssd-drain") + 2


def test_the_startup_probe_of_the_keeper_succeeds_once_it_listens(manifest, short_path):
    keeper = container(manifest, "keeper")
    directory = tempfile.mkdtemp(dir=short_path)
    command = keeper["startupProbe"]["exec"]["command"]
    probe = [word.replace("/run/pegaflow", directory) for word in command]
    assert shutil.which(probe[0])

    class Keeper(ChildProcess):
        def command(self) -> list[str]:
            return [str(BINARIES / keeper["command"][0]), *keeper["command"][1:]]

        def is_ready(self) -> bool:
            return run(*probe).returncode == 0

    assert run(*probe).returncode != 0
    environment = {"PEGAFLOW_RUNTIME_DIR": directory}
    with Keeper("pegaflow-keeper", short_path / "log", environment) as started:
        assert run(*probe).returncode == 0
        assert started.stop() == 0


def test_the_index_has_options_that_exist_and_a_file_of_keys_for_its_address():
    deployment, service = yaml.safe_load_all((FOLDER / "index.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    options = [word for word in container["args"] if word.startswith("--")]
    program = BINARIES.parent / "router" / "pegaflow-index"
    assert container["command"] == [program.name]

    shown = run(program, *container["args"], "--print-options")
    assert shown.returncode == 0, shown.stderr
    assert "--api-keys-file" in options

    (port,) = container["ports"]
    assert container["args"][container["args"].index("--listen") + 1].endswith(
        f":{port['containerPort']}"
    )
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
