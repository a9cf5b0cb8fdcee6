"""The bundle and the wheel run without any installed part of PegaFlow, on the documented systems.

Both are made by `./dev bundle`, as by users. A plain system is emulated by a root directory with
the C library, libstdc++ and Python, and nothing else.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import pegaflow
from tests.support.child_process import ChildProcess

ROOT = Path(__file__).resolve().parents[2]
CHECK_TREE = ROOT / "tools/bundle/check_tree.py"
_spec = importlib.util.spec_from_file_location("elf", ROOT / "tools/bundle/elf.py")
elf = sys.modules["elf"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(elf)
#: A package that is built on a system newer than Debian 12 needs one as new as that.
IS_NEWER = elf.as_numbers(elf.floor_here()["GLIBCXX"]) > elf.as_numbers(elf.FLOOR["GLIBCXX"])
HERE = ["--this-system"] if IS_NEWER else []
PYTHON = Path("/usr/bin/python3").resolve()
#: Ten seconds if ccache has the objects of build/release; otherwise everything is compiled.
COMPILE_S = 900

pytestmark = pytest.mark.timeout(COMPILE_S + 60)


def run(*command: str | Path, timeout: float = 300, **options) -> subprocess.CompletedProcess:
    """The command's outcome; no variable that finds our build or a library leaks into it."""
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "LD_LIBRARY_PATH", "PEGA_BUILD_DIR", "VIRTUAL_ENV")
    }
    return subprocess.run(
        [str(word) for word in command],
        **{"env": env, "capture_output": True, "text": True, "timeout": timeout} | options,
    )


def said(done: subprocess.CompletedProcess) -> str:
    """Its output; it must have succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def bundle(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("made") / "bundle"
    said(run(ROOT / "dev", "bundle", made, timeout=COMPILE_S))
    # A reference to the build directory would now fail.
    return made.rename(tmp_path_factory.mktemp("moved") / "pegaflow")


@pytest.fixture(scope="session")
def debug_files(tmp_path_factory) -> Path:
    """The folder of the wheel's debug files, which are written when the wheel is made."""
    return tmp_path_factory.mktemp("debug")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory, debug_files) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    environment = os.environ | {"PYTHONPATH": ""}
    words = [ROOT / "dev", "bundle", "--wheel", "--debug-files", debug_files, folder]
    said(run(*words, env=environment, timeout=COMPILE_S))
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def fresh(tmp_path_factory, wheel) -> Path:
    """bin/ of an environment that has only the wheel."""
    folder = tmp_path_factory.mktemp("fresh")
    said(run(PYTHON, "-m", "venv", folder))
    said(run(folder / "bin/python", "-m", "pip", "install", "--no-index", "--no-deps", wheel))
    return folder / "bin"


# ---- common contents

#: Whether a build in this environment contains the kernels, and comes from the wheel.
PROBE_KERNELS = (
    "import pegaflow, pegaflow._native as n; print(n.HAS_CUDA_KERNELS, pegaflow.__file__)"
)


def test_a_wheel_and_a_bundle_contain_the_cuda_kernels(bundle, fresh):
    in_wheel = said(run(fresh / "python", "-c", PROBE_KERNELS))
    env = os.environ | {"PYTHONPATH": str(bundle / "python")}
    in_bundle = said(run(PYTHON, "-c", PROBE_KERNELS, env=env))

    assert in_wheel.split() == ["True", str(fresh.parent / in_wheel.split()[1])]
    assert in_bundle.split() == ["True", str(bundle / "python/pegaflow/__init__.py")]


def test_every_option_reaches_the_build_of_a_wheel(wheel):
    folder = ROOT / "build" / f"wheel-{sys.implementation.cache_tag}"
    listed = json.loads((folder / "meson-info/intro-buildoptions.json").read_text())
    options = {option["name"]: option["value"] for option in listed}

    assert options["cuda"] == "enabled"  # elsewhere it is found or not
    assert options["debug_files"] is True
    lines = os.environ.get("PEGA_DEBUG_INFO") == "lines"
    assert ("-g1" in options["cpp_args"]) == lines
    assert options["werror"] == (os.environ.get("CI") == "true")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide the CUDA toolkit")
def test_a_bundle_is_rejected_if_nvcc_is_missing_and_cannot_be_installed(tmp_path):
    clone = tmp_path / "clone"
    said(run("git", "clone", "-q", "--shared", ROOT, clone))
    hide = "for d in /usr/local/cuda*; do [ ! -d $d ] || mount -t tmpfs none $d; done; exec $@"
    words = ["unshare", "-m", "sh", "-c", hide, "-", clone / "dev", "bundle", tmp_path / "made"]
    env = {"PATH": "/usr/bin:/bin", "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0"}

    done = run(*words, env=env)

    assert done.returncode == 1
    assert "pass --without-kernels" in done.stderr
    assert not (tmp_path / "made").exists()


def test_the_programs_of_a_wheel_are_stripped_and_it_is_smaller_than_15_mb(wheel, fresh):
    package = next((fresh.parent / "lib").glob("python3*/site-packages/pegaflow"))
    files = [path for path in package.rglob("*") if elf.is_elf(path)]

    names = {
        "pegaflow-server",
        "pegaflow-keeper",
        "pegaflow-router",
        "pegaflow-index",
        "pegaflow-perf",
    }
    assert names <= {path.name for path in files}
    for path in files:
        sections = said(run("readelf", "-S", "-W", path))
        assert ".debug_info" not in sections, path
        assert ".symtab" not in sections, path
    assert wheel.stat().st_size < 15e6  # OpenSSL, for TLS to a directory, is 3 MB of it


def test_debug_files_match_the_programs_of_their_wheel(wheel, debug_files):
    with zipfile.ZipFile(wheel) as archive:
        for name in ("server", "keeper", "router", "index", "perf"):
            program = f"pegaflow/bin/pegaflow-{name}"
            extracted = Path(archive.extract(program, debug_files / "unpacked"))
            notes = said(run("readelf", "-n", extracted))
            build_id = re.search(r"Build ID: ([0-9a-f]+)", notes)[1]
            debug = debug_files / ".build-id" / build_id[:2] / f"{build_id[2:]}.debug"
            assert ".debug_info" in said(run("readelf", "-S", "-W", debug)), name


# ---- the bundle


def test_a_bundle_needs_no_library_that_a_plain_system_lacks_and_no_newer_glibc(bundle):
    printed = said(run(CHECK_TREE, bundle, *HERE))

    assert re.search(r"need glibc 2\.\d+ and .*, 0 problems", printed)
    assert ("This system is newer" in printed) == IS_NEWER


def test_the_check_of_a_bundle_reports_a_limit_to_systems_as_new_as_this(bundle):
    printed = said(run(CHECK_TREE, bundle, "--glibc", "2.30", "--this-system"))

    assert ", 0 problems\n" in printed
    assert "these run here and on newer ones" in printed


def test_the_check_of_a_bundle_names_a_symbol_that_is_too_new(bundle):
    done = run(CHECK_TREE, bundle, "--glibc", "2.30")

    assert done.returncode == 1
    assert re.search(
        r"bin/pegaflow-server: needs GLIBC_2\.3\d, newer than GLIBC_2\.30", done.stdout
    )


def test_the_check_of_a_bundle_names_a_library_that_is_missing(bundle, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged, symlinks=True)
    (lost,) = (damaged / "python/pegaflow/lib").glob("libfmt.so.*")
    lost.unlink()

    done = run(CHECK_TREE, damaged)

    assert done.returncode == 1
    assert f"needs {lost.name}, which is neither in the bundle nor on a plain system" in done.stdout


def test_the_check_of_a_bundle_names_a_path_of_the_machine_that_built_it(tmp_path):
    shutil.copy(PYTHON, tmp_path / "program")
    said(run("patchelf", "--set-rpath", "/opt/somewhere", tmp_path / "program"))

    done = run(CHECK_TREE, tmp_path)

    assert done.returncode == 1
    assert "program: looks for libraries in /opt/somewhere" in done.stdout


def test_each_library_of_a_bundle_comes_with_its_license(bundle):
    libraries = bundle / "python/pegaflow/lib"
    licenses = [path.read_text() for path in (libraries / "licenses").iterdir()]

    assert len(licenses) >= 9  # fmt, spdlog, Cap'n Proto, prometheus, xxHash and four of headers
    assert all("opyright" in text for text in licenses)
    assert (bundle / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_a_folder_with_other_files_is_not_overwritten(tmp_path):
    (tmp_path / "mine").write_text("keep me")

    done = run(ROOT / "dev", "bundle", tmp_path)

    assert done.returncode == 1
    assert "holds other files" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_bundle_replaces_a_former_one(bundle, tmp_path):
    former = tmp_path / "former"
    shutil.copytree(bundle, former, symlinks=True)
    (former / "python/pegaflow/gone.py").write_text("")

    said(run(ROOT / "dev", "bundle", former))

    assert not (former / "python/pegaflow/gone.py").exists()
    assert (former / "bin/pegaflow-server").resolve().is_file()


# ---- a plain system

#: Programs that our shell scripts may call; every distribution has them.
COMMANDS = ("dirname", "env", "find", "readlink", "sed")


def copy_into(root: Path, path: Path) -> None:
    """Copies the file to its own place below the root, with the libraries that it links."""
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def loaded_by(path: Path) -> set[Path]:
    told = run("ldd", path).stdout
    return {Path(name) for name in re.findall(r"(/\S+) \(0x", told)}


@pytest.fixture(scope="session")
def plain_system(tmp_path_factory, bundle) -> Path:
    """A root directory with Python and its files, libstdc++, and a bundle in /opt/pegaflow."""
    root = tmp_path_factory.mktemp("root")
    copy_into(root, PYTHON)
    library = Path(sysconfig.get_path("stdlib"))
    stdlib = Path(
        said(run(PYTHON, "-Ic", "import os; print(os.path.dirname(os.__file__))")).strip()
    )
    assert library.name == stdlib.name
    ignored = shutil.ignore_patterns("test", "__pycache__", "config-*", "*-packages", "idlelib")
    shutil.copytree(stdlib, root / stdlib.relative_to("/"), ignore=ignored)
    system = loaded_by(PYTHON)
    for module in (root / stdlib.relative_to("/") / "lib-dynload").glob("*.so"):
        system |= loaded_by(module)
    system |= {
        path for path in loaded_by(bundle / "bin/pegaflow-server") if bundle not in path.parents
    }
    for path in system:
        copy_into(root, path)
    for name in ("/bin/sh", *map("/usr/bin/{}".format, COMMANDS)):
        for path in {Path(name), *loaded_by(Path(name))}:
            copy_into(root, path)
    assert not [path for path in root.rglob("*") if re.match("lib(capnp|kj|fmt)", path.name)]
    shutil.copytree(bundle, root / "opt/pegaflow", symlinks=True)
    for name in ("proc", "tmp", "run", "dev"):
        (root / name).mkdir()
    return root


def inside(root: Path, *command: str) -> list[str]:
    """The command line that runs a command with the root as its /."""
    mounts = f'mount --rbind /proc "{root}/proc" && mount --rbind /dev "{root}/dev" && exec "$@"'
    clean = ("env", "-i", "PATH=/usr/bin:/bin")
    return ["unshare", "-m", "sh", "-c", mounts, "-", "chroot", str(root), *clean, *command]


class PlainServer(ChildProcess):
    """pegaflow-server of the bundle on the plain system."""

    def __init__(self, root: Path, log: Path) -> None:
        super().__init__("pegaflow-server", log)
        self.root = root

    def command(self) -> list[str]:
        words = "--addr unix:/run/p.sock --http-addr 127.0.0.1:0 --pool-size 64mb"
        server = "/opt/pegaflow/bin/pegaflow-server"
        return inside(self.root, server, *words.split(), "--ready-file", "/run/ready.json")

    def is_ready(self) -> bool:
        return (self.root / "run/ready.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the root directory")
def test_on_a_plain_system_the_server_serves_and_the_doctor_finds_it(plain_system, tmp_path):
    with PlainServer(plain_system, tmp_path / "log") as server:
        ask = inside(plain_system, "/opt/pegaflow/bin/pegaflow", "doctor", "--help")
        assert "doctor" in said(run(*ask))
        probe = (
            "import json, pegaflow._native, urllib.request as u;"
            "a = json.load(open('/run/ready.json'))['http'];"
            "print(u.urlopen(f'http://{a}/health').status)"
        )
        env = "PYTHONPATH=/opt/pegaflow/python"
        ask = inside(plain_system, "/usr/bin/env", env, str(PYTHON), "-c", probe)
        assert said(run(*ask)).strip() == "200"
        status = server.stop()

    assert status == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the root directory")
def test_on_a_plain_system_programs_that_are_not_bundled_would_not_start(plain_system):
    """Proves that the plain system lacks the libraries that a bundle has to bring."""
    build = Path(os.environ["PEGA_BUILD_DIR"])
    shutil.copy(build / "server/pegaflow-server", plain_system / "tmp/server")

    done = run(*inside(plain_system, "/tmp/server", "--version"))

    assert done.returncode == 127
    assert "cannot open shared object file" in done.stderr


# ---- the wheel


def test_the_wheel_is_tagged_with_its_glibc_and_auditwheel_finds_no_library_outside(
    wheel,
):
    tools = ROOT / f"build/wheel-tools-{sys.implementation.cache_tag}/bin"
    path = f"{tools}:{os.environ['PATH']}"
    shown = said(run(tools / "auditwheel", "show", wheel, env={"PATH": path}))

    tag = re.search(r'following platform\s+tag: "manylinux_2_(\d+)_x86_64"', shown)
    assert tag, shown
    limit = elf.floor_here()["GLIBC"] if IS_NEWER else "2.35"
    assert elf.as_numbers(f"2.{tag[1]}") <= elf.as_numbers(limit)
    assert f"manylinux_2_{tag[1]}_x86_64" in wheel.name


def test_the_wheel_holds_one_folder_with_programs_libraries_and_licenses(wheel):
    names = zipfile.ZipFile(wheel).namelist()

    programs = ("server", "keeper", "perf")
    assert {f"pegaflow/bin/pegaflow-{name}" for name in programs} <= set(names)
    assert [name for name in names if name.startswith("pegaflow/lib/licenses/")]
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    # auditwheel would have added a second copy of a library if it had not found ours.
    assert {name.split("/")[0] for name in names} == {
        "pegaflow",
        f"pegaflow-{pegaflow.__version__}.dist-info",
    }


def test_the_commands_of_a_fresh_environment_are_the_programs(fresh):
    assert said(run(fresh / "pegaflow", "--version")).split()[-1] == pegaflow.__version__
    for name in ("pegaflow-server", "pegaflow-keeper"):
        assert pegaflow.__version__ in said(run(fresh / name, "--version"))
    assert "usage" in said(run(fresh / "pegaflow-perf", "--help")).lower()
    assert " 0 problems\n" in said(run(CHECK_TREE, fresh.parent / "lib", *HERE))


def test_the_server_of_a_fresh_environment_is_the_process_that_was_started(fresh, tmp_path):
    ready = tmp_path / "ready.json"
    words = [fresh / "pegaflow-server", "--addr", f"unix:{tmp_path}/p.sock", "--ready-file", ready]
    words += ["--http-addr", "127.0.0.1:0", "--pool-size", "64mb"]

    class Server(ChildProcess):
        def command(self) -> list[str]:
            return [str(word) for word in words]

        def is_ready(self) -> bool:
            return ready.exists()

    with Server("pegaflow-server", tmp_path / "log", {"PYTHONPATH": ""}) as server:
        assert Path(os.readlink(f"/proc/{server.pid}/exe")).name == "pegaflow-server"
        assert json.loads(ready.read_text())["http"]
        assert server.stop() == 0  # by a SIGTERM to the process that was started


def test_the_server_of_a_fresh_environment_finds_the_keeper_of_its_package(fresh, tmp_path):
    ready = tmp_path / "ready.json"
    address = ["--addr", f"unix:{tmp_path}/p.sock"]
    words = [fresh / "pegaflow-server", *address, "--ready-file", ready, "--keep", "yes"]
    words += ["--http-addr", "127.0.0.1:0", "--pool-size", "64mb"]

    class Server(ChildProcess):
        def command(self) -> list[str]:
            return [str(word) for word in words]

        def is_ready(self) -> bool:
            return ready.exists()

    with Server("pegaflow-server", tmp_path / "log", {"PYTHONPATH": ""}) as server:
        assert server.stop() == 0

    assert "released the pool of 64 MiB" in said(
        run(fresh / "pegaflow-server", "--release", *address)
    )


def test_vllm_imports_the_connector_of_the_wheel(fresh):
    """The fresh environment uses vLLM's packages of .venv; PegaFlow is the wheel's."""
    lent = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
    probe = "import pegaflow.connector as c, pegaflow; print(c.PegaKVConnector, pegaflow.__file__)"
    code = f"import sys; sys.path.append({str(lent)!r}); {probe}"

    printed = said(run(fresh / "python", "-c", code))

    assert "PegaKVConnector" in printed
    assert str(fresh.parent) in printed
