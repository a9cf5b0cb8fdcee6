"""The programs of an installed package: server, keeper, router, index and perf.

The programs themselves are in ``bin/`` beside this file, where a wheel may contain them; the
scripts that pip puts on PATH replace themselves by them, so signals and the process id are the
program's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def _become(name: str) -> NoReturn:
    program = Path(__file__).with_name("bin") / name
    if not program.exists():
        sys.exit(f"{program} is missing: this package was built without the programs")
    os.execv(program, [name, *sys.argv[1:]])


def server() -> NoReturn:
    """Executes pegaflow-server with this process's arguments; exits if it is not installed."""
    _become("pegaflow-server")


def keeper() -> NoReturn:
    """Executes pegaflow-keeper with this process's arguments; exits if it is not installed."""
    _become("pegaflow-keeper")


def router() -> NoReturn:
    """Executes pegaflow-router with this process's arguments; exits if it is not installed."""
    _become("pegaflow-router")


def index() -> NoReturn:
    """Executes pegaflow-index with this process's arguments; exits if it is not installed."""
    _become("pegaflow-index")


def perf() -> NoReturn:
    """Executes pegaflow-perf with this process's arguments; exits if it is not installed."""
    _become("pegaflow-perf")
