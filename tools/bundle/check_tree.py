#!/usr/bin/env python3
"""Check what a bundle needs from a system, and reject what a plain one does not have.

usage: check_tree.py DIR [--glibc VERSION] [--this-system]

Every program and library below DIR finds what it loads by a path relative to itself, or it is on
every Linux; and no symbol is newer than those of glibc 2.35 (or VERSION) and GCC 12, or with
--this-system than those of the C and C++ library here, where these are newer.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Iterator

from elf import FLOOR, PLAIN_SYSTEM, Elf, as_numbers, floor_here, is_elf, newest_of, read_elf


def inside(elf: Elf, soname: str, root: pathlib.Path) -> bool:
    """Whether the library is where the file looks for it, below the root."""
    for entry in elf.runpath:
        folder = entry.replace("$ORIGIN", str(elf.path.parent))
        candidate = pathlib.Path(os.path.normpath(folder), soname)
        if candidate.is_relative_to(root) and candidate.is_file():
            return True
    return False


def problems_of(elf: Elf, root: pathlib.Path, floor: dict[str, str]) -> Iterator[str]:
    name = elf.path.relative_to(root)
    for entry in elf.runpath:
        if not entry.startswith("$ORIGIN"):
            yield f"{name}: looks for libraries in {entry}, a path of the build machine"
    for soname in elf.needed:
        if soname not in PLAIN_SYSTEM and not inside(elf, soname, root):
            yield f"{name}: needs {soname}, which is neither in the bundle nor on a plain system"
    for family, version in elf.versions.items():
        if family in floor and as_numbers(version) > as_numbers(floor[family]):
            yield f"{name}: needs {family}_{version}, newer than {family}_{floor[family]}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--glibc", default=FLOOR["GLIBC"], help="the newest allowed (%(default)s)")
    parser.add_argument(
        "--this-system",
        action="store_true",
        help="allow the symbol versions of this system's libraries",
    )
    options = parser.parse_args(argv)
    root = options.dir.resolve()
    files = [read_elf(path) for path in sorted(root.rglob("*")) if is_elf(path)]
    if not files:
        print(f"no program and no library below {root}", file=sys.stderr)
        return 1
    promised = FLOOR | {"GLIBC": options.glibc}
    allowed = floor_here() if options.this_system else promised
    problems = [line for elf in files for line in problems_of(elf, root, allowed)]
    print("\n".join(problems), end="\n" if problems else "")
    newest = newest_of([version for elf in files for version in elf.versions.items()])
    print(
        f"{len(files)} programs and libraries: they need glibc {newest['GLIBC']} and a libstdc++ "
        f"with GLIBCXX_{newest['GLIBCXX']}, {len(problems)} problems"
    )
    if not problems and any(
        as_numbers(newest.get(family, "0")) > as_numbers(version)
        for family, version in promised.items()
    ):
        print(
            "This system is newer than Debian 12: these run here and on newer ones; made on"
            f" Debian 12 they would need glibc {promised['GLIBC']}."
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
