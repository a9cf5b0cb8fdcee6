"""The libraries and versions that a bundle may need, and those that its ELF files do need."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess

#: Libraries that every Linux with glibc has: a part of auditwheel's manylinux list.
PLAIN_SYSTEM = frozenset(
    (
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
        "libc.so.6",
        "libdl.so.2",
        "libgcc_s.so.1",
        "libm.so.6",
        "libpthread.so.0",
        "libresolv.so.2",  # of glibc, and bound to its version
        "librt.so.1",
        "libstdc++.so.6",
    )
)

#: The newest symbol versions that a bundle may need: those of Ubuntu 22.04, on which vLLM's images
#: are built. auditwheel's manylinux_2_35 has the same numbers.
FLOOR = {"GLIBC": "2.35", "GLIBCXX": "3.4.30", "CXXABI": "1.3.13", "GCC": "12.0.0"}

_NEEDED = re.compile(r"^\s+NEEDED\s+(\S+)$", re.MULTILINE)
_RUNPATH = re.compile(r"^\s+(?:RUNPATH|RPATH)\s+(\S+)$", re.MULTILINE)
_VERSIONS = re.compile(r"^\s+0x\w+ 0x\w+ \d+ ([A-Z]+)_([0-9.]+)$", re.MULTILINE)
_DEFINITIONS = re.compile(r"^\d+ 0x\w+ 0x\w+ ([A-Z]+)_([0-9.]+)\s*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Elf:
    """One program or library."""

    path: pathlib.Path
    needed: list[str]
    runpath: list[str]
    versions: dict[str, str]  # the newest of each family, as {"GLIBC": "2.34"}


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def is_elf(path: pathlib.Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def newest_of(found: list[tuple[str, str]]) -> dict[str, str]:
    """The newest version of each family."""
    newest: dict[str, str] = {}
    for family, version in found:
        if as_numbers(version) > as_numbers(newest.get(family, "0")):
            newest[family] = version
    return newest


def floor_here() -> dict[str, str]:
    """FLOOR, or the versions of this system's C and C++ library if these are newer."""
    here = [("GLIBC", os.confstr("CS_GNU_LIBC_VERSION").split()[1])]
    for library in ("libstdc++.so.6", "libgcc_s.so.1"):
        path = _output("gcc", f"-print-file-name={library}").strip()
        here += _DEFINITIONS.findall(_output("objdump", "-p", path))
    return newest_of([*FLOOR.items(), *((name, at) for name, at in here if name in FLOOR)])


def _output(*command: str | pathlib.Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_elf(path: pathlib.Path) -> Elf:
    """The output of ``objdump`` about one file."""
    text = _output("objdump", "-p", path)
    _, _, references = text.partition("Version References:")
    versions = newest_of(_VERSIONS.findall(references))
    runpath = [entry for found in _RUNPATH.findall(text) for entry in found.split(":")]
    return Elf(path, _NEEDED.findall(text), runpath, versions)
