"""Importing costs an engine nothing: no thread, no descriptor, no module of vLLM's."""

import json
import subprocess
import sys

# In a process of its own: pytest has threads and descriptors already.
PROBE = """
import json, os

def look():
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                              if os.path.exists(f"/proc/self/fd/{n}")),
    }

before = look()
import pegaflow
import pegaflow._native
after = look()
import sys
heavy = [name for name in ("vllm", "torch", "numpy", "asyncio", "socket") if name in sys.modules]
print(json.dumps({"before": before, "after": after, "heavy": heavy}))
"""


def test_importing_starts_no_thread_and_opens_no_socket():
    printed = subprocess.run(
        [sys.executable, "-c", PROBE], check=True, capture_output=True, text=True, timeout=60
    )
    seen = json.loads(printed.stdout)
    assert seen["after"] == seen["before"]
    assert seen["heavy"] == []
    assert printed.stderr == ""


def test_the_version_is_that_of_the_build():
    import pegaflow
    from pegaflow import _native

    assert pegaflow.__version__ == _native.__version__
    assert pegaflow.__version__.count(".") == 2
