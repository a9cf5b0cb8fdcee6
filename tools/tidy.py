#!/usr/bin/env python3
"""Run clang-tidy over PegaFlow's C++ files, leaving out those that passed before.

usage: tidy.py [--without-tests] BUILD_DIR...

The build directories are configured with clang; the first that compiles a file is used for it.
--without-tests leaves out tests/ and perf/, which are half of the files.

A file has passed before if its text, all its headers in this tree, its compile command, the
.clang-tidy file, clang-tidy itself and the installed packages are unchanged. Passes are remembered
in $XDG_CACHE_HOME/pegaflow/tidy, as ccache remembers objects: clones share them.
"""

import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = (
    "base",
    "capnp",
    "transport",
    "engine",
    "cluster",
    "directory",
    "index",
    "client",
    "server",
    "router",
    "pyclient",
    "harness",
    "perf",
    "tests",
)
JOBS = 2
FORCED_INCLUDE = re.compile(rf"-include ({ROOT}/\S+)")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def cache_folder() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "pegaflow" / "tidy"


@functools.cache
def text_of(path: pathlib.Path) -> str:
    return path.read_text(errors="replace")


def resolve(name: str, beside: pathlib.Path) -> pathlib.Path | None:
    """The file of this tree behind an include; a generated header is its schema."""
    for folder in (ROOT, beside):
        path = folder / name
        if path.is_file():
            return path
        if name.endswith(".capnp.h") and (schema := path.with_suffix("")).is_file():
            return schema
        if (template := folder / "base" / (name + ".in")).is_file():
            return template
    return None


def everything_below(source: pathlib.Path) -> list[pathlib.Path]:
    seen = {source}
    todo = [source]
    while todo:
        path = todo.pop()
        for name in INCLUDE.findall(text_of(path)):
            found = resolve(name, path.parent)
            if found and found not in seen:
                seen.add(found)
                todo.append(found)
    return sorted(seen)


def compile_commands(
    build_dirs: list[pathlib.Path], parts: set[str]
) -> dict[pathlib.Path, tuple[pathlib.Path, str]]:
    """source -> (build directory, command) for the files below ``parts`` without generated ones."""
    found: dict[pathlib.Path, tuple[pathlib.Path, str]] = {}
    for build_dir in build_dirs:
        for entry in json.loads((build_dir / "compile_commands.json").read_text()):
            path = pathlib.Path(os.path.normpath(pathlib.Path(entry["directory"], entry["file"])))
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in parts:
                found.setdefault(path, (build_dir, entry["command"]))
    return found


def generate_headers(build_dir: pathlib.Path) -> None:
    """Schemas and the like: clang-tidy has to find their headers."""
    targets = json.loads((build_dir / "meson-info" / "intro-targets.json").read_text())
    outputs = [
        os.path.relpath(name, build_dir)
        for target in targets
        if target["type"] == "custom"
        for name in target["filename"]
        if name.endswith((".h", ".c++", ".cpp"))
    ]
    if outputs:
        # As one_at_a_time of tools/setup.sh does.
        alone = ["flock", str(build_dir.parent / ".dev-lock")]
        subprocess.run([*alone, "ninja", "-C", str(build_dir), "--quiet", *outputs], check=True)


def key_of(source: pathlib.Path, command: str, world: bytes) -> str:
    total = hashlib.sha256(world)
    total.update(command.replace(str(ROOT), ".").encode())
    forced = [pathlib.Path(name) for name in FORCED_INCLUDE.findall(command)]
    for path in [*forced, *everything_below(source)]:
        total.update(f"\0{path.relative_to(ROOT)}\0{text_of(path)}".encode())
    return total.hexdigest()


def main(argv: list[str]) -> int:
    tool = str(ROOT / ".venv/bin/clang-tidy")
    if not pathlib.Path(tool).exists():
        print(f"tidy: {tool} is missing; ./dev check installs it", file=sys.stderr)
        return 1
    parts = set(OURS)
    if argv[:1] == ["--without-tests"]:
        argv = argv[1:]
        parts -= {"tests", "perf"}
    build_dirs = [pathlib.Path(word).resolve() for word in argv]
    for build_dir in build_dirs:
        generate_headers(build_dir)
    version = subprocess.run([tool, "--version"], check=True, capture_output=True).stdout
    packages = pathlib.Path("/var/lib/dpkg/status")
    world = version + (ROOT / ".clang-tidy").read_bytes()
    world += packages.read_bytes() if packages.exists() else b""

    commands = compile_commands(build_dirs, parts)
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    marks = {source: cache / key_of(source, commands[source][1], world) for source in commands}
    todo = [source for source in sorted(commands) if not marks[source].exists()]
    for source in set(commands) - set(todo):
        marks[source].touch()  # Its age is the time since its last use.
    print(f"tidy: {len(todo)} of {len(commands)} files have changed since they passed", flush=True)

    def check(source: pathlib.Path) -> tuple[pathlib.Path, subprocess.CompletedProcess, float]:
        started = time.monotonic()
        words = [tool, "-p", str(commands[source][0]), "--quiet"]
        words += ["--extra-arg=-Wno-unknown-warning-option"]
        # Of the system's library: its std::stable_sort.
        words += ["--extra-arg=-Wno-deprecated-declarations", str(source)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return source, done, time.monotonic() - started

    bad = 0
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        for number, future in enumerate(
            concurrent.futures.as_completed([pool.submit(check, source) for source in todo]), 1
        ):
            source, done, seconds = future.result()
            name = source.relative_to(ROOT)
            if done.returncode == 0:
                marks[source].touch()
                if seconds > 20 or number % 10 == 0 or sys.stdout.isatty():
                    print(f"tidy: {number}/{len(todo)} {name} {seconds:.1f} s", flush=True)
            else:
                bad += 1
                print(f"tidy: {name}\n{done.stdout}", flush=True)
                if not done.stdout.strip():
                    print(done.stderr, flush=True)
    month_ago = time.time() - 30 * 24 * 3600
    for mark in cache.iterdir():
        if mark.stat().st_mtime < month_ago:
            mark.unlink(missing_ok=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
