#!/usr/bin/env python3
"""Copy the libraries of some programs that a plain system lacks, each finding the others.

usage: collect_libraries.py TARGET_DIR ELF_FILE...

TARGET_DIR is made anew: each library under its soname, with a RUNPATH of `$ORIGIN`, and in
TARGET_DIR/licenses the copyright file of each package of origin.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

from elf import PLAIN_SYSTEM

#: Compiled into our programs; they have no file of their own to look for.
HEADER_ONLY = ("libcli11-dev", "libexpected-dev", "nlohmann-json3-dev", "pybind11-dev")

LDD_LINE = re.compile(r"^\s+(\S+) => (.+?)(?: \(0x\w+\))?$", re.MULTILINE)


def libraries_of(files: list[str]) -> dict[str, pathlib.Path]:
    """The libraries beyond the plain system, by soname, that the files load."""
    # Sanitizers and the caller's own libraries have no place in a package.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LD_")}
    found = {}
    for file in files:
        told = subprocess.run(["ldd", file], check=True, capture_output=True, text=True, env=clean)
        for soname, path in LDD_LINE.findall(told.stdout):
            if soname in PLAIN_SYSTEM:
                continue
            if path == "not found":
                raise SystemExit(f"{file} needs {soname}, which is missing on this machine")
            found[soname] = pathlib.Path(path)
    return found


def package_of(library: pathlib.Path) -> str:
    """Name of the distribution's package."""
    # /lib is a link to /usr/lib, and dpkg may know a file by either name.
    real = str(library.resolve())
    for name in (real, real.removeprefix("/usr")):
        asked = subprocess.run(["dpkg-query", "-S", name], capture_output=True, text=True)
        if asked.returncode == 0:
            return asked.stdout.split(":")[0]
    raise SystemExit(f"no package owns {library}: its license is unknown")


def collect(target: pathlib.Path, files: list[str]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    licenses = target / "licenses"
    licenses.mkdir(parents=True)
    packages = set(HEADER_ONLY)
    for soname, path in sorted(libraries_of(files).items()):
        copy = target / soname
        shutil.copyfile(path, copy)
        # A library does not inherit the path of the program that loads it.
        subprocess.run(["patchelf", "--set-rpath", "$ORIGIN", copy], check=True)
        packages.add(package_of(path))
    for package in sorted(packages):
        text = pathlib.Path("/usr/share/doc", package, "copyright")
        shutil.copyfile(text, licenses / f"{package}.txt")


def main(argv: list[str]) -> int:
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    if shutil.which("patchelf") is None:
        print("patchelf is missing: apt-get install patchelf", file=sys.stderr)
        return 1
    collect(pathlib.Path(argv[0]), argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
