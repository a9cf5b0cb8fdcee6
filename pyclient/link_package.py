#!/usr/bin/env python3
"""Make an importable package of the sources and the native module, with links.

usage: link_package.py SOURCE_DIR NATIVE_MODULE TARGET_DIR

TARGET_DIR then mirrors SOURCE_DIR: directories are made, every file is a link, so an edited source
needs no build. Other entries of TARGET_DIR are removed. Prints nothing unless it fails.
"""

import os
import pathlib
import sys


def wanted_links(source: pathlib.Path, native: pathlib.Path) -> dict[pathlib.Path, pathlib.Path]:
    """The links to make, by their path below the target."""
    links = {
        path.relative_to(source): path
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    links[pathlib.Path(native.name)] = native
    return links


def link_all(links: dict[pathlib.Path, pathlib.Path], target: pathlib.Path) -> None:
    for name, path in links.items():
        link = target / name
        link.parent.mkdir(parents=True, exist_ok=True)
        points_to = os.path.relpath(path.resolve(), link.parent.resolve())
        if link.is_symlink() and os.readlink(link) == points_to:
            continue
        # Rename over the old link: another process may be importing the package now.
        fresh = link.with_name(f".{link.name}.{os.getpid()}")
        fresh.symlink_to(points_to)
        fresh.replace(link)


def remove_others(links: dict[pathlib.Path, pathlib.Path], target: pathlib.Path) -> None:
    for path in target.rglob("*"):
        if path.is_symlink() and path.relative_to(target) not in links:
            path.unlink()


def main(argv: list[str]) -> int:
    if len(argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, native, target = (pathlib.Path(word) for word in argv)
    links = wanted_links(source, native)
    link_all(links, target)
    remove_others(links, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
