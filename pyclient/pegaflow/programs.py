"""The commands ``pegaflow-server``, ``-router`` and ``-perf`` of an installed package.

The programs themselves lie in ``bin/`` beside this file, where a wheel may carry them; what pip
puts on PATH only becomes them, so signals and the process id are the program's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def _become(name: str) -> NoReturn:
    program = Path(__file__).with_name("bin") / name
    if not program.exists():
        sys.exit(f"{program} is not there: this package was built without the programs")
    os.execv(program, [name, *sys.argv[1:]])


def server() -> NoReturn:
    """Becomes pegaflow-server with this process' arguments; exits if it is not installed."""
    _become("pegaflow-server")


def router() -> NoReturn:
    """Becomes pegaflow-router with this process' arguments; exits if it is not installed."""
    _become("pegaflow-router")


def perf() -> NoReturn:
    """Becomes pegaflow-perf with this process' arguments; exits if it is not installed."""
    _become("pegaflow-perf")
