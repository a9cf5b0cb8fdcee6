"""``vllm`` whose engine and workers are forks of its first process, which has imported all modules.

On the CPU vLLM starts a new interpreter for each of its processes, and the imports take 10 s of CPU
time in each of them. The arguments are those of the command ``vllm``.
"""

import multiprocessing
import sys
from typing import Any

import vllm.utils.system_utils
from vllm.entrypoints.cli.main import main


def _fork() -> Any:
    return multiprocessing.get_context("fork")


vllm.utils.system_utils.get_mp_context = _fork
# Modules that were imported above have the function under its name already.
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("vllm.") and "get_mp_context" in vars(module):
        module.get_mp_context = _fork  # type: ignore[attr-defined]

if __name__ == "__main__":
    sys.exit(main())
