#!/usr/bin/env python3
"""Splits the debug information off the programs of a build, into files named by build id.

usage: debug_files.py BUILD_DIR OUT_DIR

BUILD_DIR was configured with -Dbundle=true -Ddebug_files=true. For each program and for the native
module it writes OUT_DIR/.build-id/XX/REST.debug, which gdb finds with `set debug-file-directory
OUT_DIR`, and prints the file's size. The stripped programs of the package keep their build ids.
Exit 1 if a file has no build id or no debug information.
"""

import pathlib
import re
import subprocess
import sys

import elf


def tool(*words: str | pathlib.Path) -> str:
    """The tool's output; raises if it fails."""
    return subprocess.run(
        [str(word) for word in words], check=True, capture_output=True, text=True
    ).stdout


def linked_files(build: pathlib.Path) -> list[pathlib.Path]:
    """The programs and the native module of the build."""
    names = (
        "server/pegaflow-server",
        "server/pegaflow-keeper",
        "router/pegaflow-router",
        "router/pegaflow-index",
        "perf/pegaflow-perf",
    )
    found = [build / name for name in names if (build / name).is_file()]
    return found + sorted(build.glob("pyclient/_native.*.so"))


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    build, out = map(pathlib.Path, sys.argv[1:])
    files = [path for path in linked_files(build) if elf.is_elf(path)]
    if not files:
        print(f"{build} has no programs", file=sys.stderr)
        return 1
    for path in files:
        build_id = re.search(r"Build ID: ([0-9a-f]{8,})", tool("readelf", "-n", path))
        if not build_id or ".debug_info" not in tool("readelf", "-S", "-W", path):
            print(f"{path}: no build id or no debug information", file=sys.stderr)
            return 1
        target = out / ".build-id" / build_id[1][:2] / f"{build_id[1][2:]}.debug"
        target.parent.mkdir(parents=True, exist_ok=True)
        tool("objcopy", "--only-keep-debug", "--compress-debug-sections", path, target)
        print(f"{path.name}: {target.relative_to(out)}, {target.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
