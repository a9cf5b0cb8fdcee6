"""A C++ program is built against an installed PegaFlow with the flags of pkg-config, and runs."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.vllm_server import PegaServer

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ["PEGA_BUILD_DIR"])


def run(*command: str | Path, **options) -> subprocess.CompletedProcess:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=170, **options)


@pytest.fixture(scope="session")
def prefix(tmp_path_factory) -> Path:
    """A prefix with the files of `meson install`."""
    folder = tmp_path_factory.mktemp("installed")
    env = os.environ | {"DESTDIR": str(folder)}
    done = run("/usr/bin/meson", "install", "-C", BUILD, "--no-rebuild", "--tags", "devel", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "usr/local"


@pytest.fixture(scope="session")
def flags(prefix) -> list[str]:
    """The flags of pkg-config for our package; the compiler gets no others."""
    (package,) = prefix.rglob("pegaflow.pc")
    # Configured for another prefix than this scratch folder, as in packages.
    package.write_text(package.read_text().replace("prefix=/usr/local", f"prefix={prefix}"))
    env = os.environ | {"PKG_CONFIG_PATH": str(package.parent)}
    done = run("pkg-config", "--cflags", "--libs", "pegaflow", env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="session")
def example(flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    source = folder / "save_and_load.cpp"
    source.write_text((ROOT / "examples/save_and_load.cpp").read_text())
    command = ["g++", "-Wall", "-Wextra", "-Werror", source, *flags, "-o", folder / "program"]
    done = run(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "program"


def test_the_example_saves_finds_and_loads_with_a_real_server(example, tmp_path):
    with PegaServer(BUILD / "server/pegaflow-server", tmp_path, pool_size="64mb") as server:
        done = run(example, server.socket)

        assert done.returncode == 0, done.stdout + done.stderr
        assert server.metrics().total("pegaflow_save_bytes_total") == 8 * 2 * 64000
    assert done.stdout.splitlines() == [
        "saved 8 blocks, 1024000 bytes",
        "found 8 of 8 blocks",
        "loaded 8 blocks, each as it was saved",
    ]


def test_the_example_reports_a_missing_server(example, tmp_path):
    done = run(example, tmp_path / "absent.sock")

    assert done.returncode == 1
    assert "peer_lost: the worker is not connected" in done.stderr


def test_each_installed_header_compiles_alone_and_names_no_library_of_the_wire(prefix, flags):
    folder = prefix / "include/pegaflow"
    headers = sorted(path.relative_to(folder) for path in folder.rglob("*.h"))
    assert len(headers) >= 10

    for header in headers:
        text = f'#include "{header}"\n#include "{header}"\n'
        command = ["g++", "-Wall", "-Werror", "-fsyntax-only", "-x", "c++", "-", *flags[:-1]]
        command = [word for word in command if not str(word).startswith("-l")]
        done = run(*command, input=text, cwd=prefix)
        assert done.returncode == 0, f"{header}: {done.stderr}"
        assert "kj::" not in (folder / header).read_text()
