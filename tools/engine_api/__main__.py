"""Notices what a new release of vLLM, or of SGLang, changes for PegaFlow.

usage: python -m tools.engine_api diff RELEASE [--against VERSION] [--version VERSION]
       python -m tools.engine_api record RELEASE... [--version VERSION]

RELEASE is a version of vLLM (0.34.0), a version of another engine (sglang==0.5.24), or a path: an
installed or unpacked package, a source tree, a wheel, or a source archive. Versions are downloaded
from PyPI with pip, which may take minutes; nothing is installed or imported. A clone does not name
its version: state it with --version.

diff prints the changes since the newest recorded release and what does not fit PegaFlow's classes
for it; it exits with 1 if there is anything. record writes the snapshot in
tests/python/engine_api/ that tests/python/test_engine_api.py compares.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.engine_api import checks, sglang, source
from tools.engine_api.connector import Connector

ENGINES = ("vllm", "sglang")


def fetch(engine: str, version: str, into: Path) -> Path:
    """The wheel of a release, downloaded from PyPI.

    Raises:
        SourceError: pip could not download it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(into), f"{engine}=={version}"]
    if subprocess.run(command).returncode != 0:
        raise source.SourceError(f"pip could not download {engine} {version}")
    (wheel,) = into.glob("*.whl")
    return wheel


def obtain(release: str, stated: str) -> tuple[str, str, source.Interface]:
    """Engine, version and interface of a release as the command line names it.

    Raises:
        SourceError: there is none.
    """
    path = Path(release)
    if path.exists():
        for engine in ENGINES:
            # vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl
            if path.name.startswith(f"{engine}-") if path.is_file() else _contains(path, engine):
                return engine, *source.read(engine, path, stated)
        raise source.SourceError(f"{release} has none of the packages {', '.join(ENGINES)}")
    engine, _, version = release.rpartition("==")
    engine = engine or "vllm"
    if engine not in ENGINES or not version[:1].isdigit():
        raise source.SourceError(f"{release} is neither a path nor a version")
    with tempfile.TemporaryDirectory(prefix="pega-api-") as scratch:
        return engine, *source.read(engine, fetch(engine, version, Path(scratch)))


def _contains(path: Path, engine: str) -> bool:
    try:
        source.Tree(engine, path)
    except source.SourceError:
        return False  # perhaps the other engine
    return True


def record(releases: list[str], stated: str) -> int:
    for release in releases:
        engine, version, found = obtain(release, stated)
        path = source.snapshot_path(engine, version)
        path.write_text(source.render(engine, version, found))
        print(f"{path.name}: {len(found)} names")
    return 0


def diff(release: str, stated: str, against: str | None) -> int:
    engine, version, found = obtain(release, stated)
    report = compare(engine, version, found, against)
    print(report or f"{engine} {version}: nothing changed")
    return 1 if report else 0


def compare(engine: str, version: str, found: source.Interface, against: str | None = None) -> str:
    """The changes since a recorded release, and the problems of PegaFlow's classes, as text."""
    against = against or source.snapshots(engine)[-1]
    old, new, complaints = source.load(engine, against), found, []
    if engine == "vllm":
        decisions = source.document(engine)
        connector = Connector(decisions)
        old, new = (checks.relevant(each, connector, decisions) for each in (old, new))
        complaints = checks.problems(version, found, connector, decisions)
    else:
        complaints = sglang.problems(version, found, source.document(engine))
    changes = checks.difference(f"{engine} {against}", old, f"{engine} {version}", new)
    return "\n".join(filter(None, [changes, *complaints]))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.engine_api",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--version", default="", help="of a tree that does not name it")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("diff", parents=[common], help="print what a release changes")
    one.add_argument("release")
    one.add_argument("--against", metavar="VERSION", help="the recorded release to compare with")
    many = commands.add_parser("record", parents=[common], help="write the snapshots of releases")
    many.add_argument("releases", nargs="+", metavar="release")
    arguments = parser.parse_args()
    try:
        if arguments.command == "record":
            return record(arguments.releases, arguments.version)
        return diff(arguments.release, arguments.version, arguments.against)
    except source.SourceError as error:
        print(f"engine_api: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
