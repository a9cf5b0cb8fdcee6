#!/usr/bin/env bash
# Installs vLLM for NVIDIA GPUs into the virtual environment VENV; fast when it is there already.
#   usage: install.sh VENV          (PYTHON=python3.12 for another interpreter, 3.11 to 3.14)
# It needs no GPU: only a run does, and there a driver for CUDA 13 (580 or newer).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: install.sh VENV}
python=${PYTHON:-/usr/bin/python3}

# The recipe's own hash: a change of any of these files installs again.
stamp=$(cat "$here/requirements.txt" "$here/install.sh" | sha256sum | cut -d' ' -f1)
[ "$(cat "$venv/.vllm-gpu" 2>/dev/null)" != "$stamp" ] || exit 0

# Two installers in one environment would tear each other's files.
mkdir -p "$venv"
exec 9>"$venv/.vllm-gpu.lock"
flock 9
[ "$(cat "$venv/.vllm-gpu" 2>/dev/null)" != "$stamp" ] || exit 0

printf 'setup: installing vLLM for NVIDIA GPUs and what it needs into %s: %s Python packages,\n' \
    "$venv" "$(grep -c == "$here/requirements.txt")"
printf 'setup: 4.1 GB to download, 8.5 GB on disk, some minutes (%s)\n' "$here/requirements.txt"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --no-input uv
# The list is complete and pinned: no dependency is resolved.
"$venv/bin/uv" pip install -q --no-cache --no-deps --python "$venv/bin/python" \
    -r "$here/requirements.txt" ||
    "$venv/bin/python" -m pip install -q --no-input --no-cache-dir --no-deps \
        -r "$here/requirements.txt"
"$venv/bin/python" -m pip uninstall -q -y uv
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# Without .pyc files the first starts of vLLM take minutes. Some packages hold files that no Python
# can compile; they are never imported, so a bad exit says nothing here.
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q -j 0 "$site" >/dev/null 2>&1 ||
    true

probe=$("$venv/bin/python" - 2>&1 <<'PROBE'
import torch, vllm
assert torch.version.cuda, "torch was built without CUDA"
print("setup: vLLM", vllm.__version__, "with torch", torch.__version__, "is ready")
PROBE
) || {
    printf '%s\n' "$probe" >&2
    printf 'setup: vLLM was installed into %s but cannot be imported\n' "$venv" >&2
    exit 1
}
printf '%s\n' "$probe" | tail -n 1
printf '%s\n' "$stamp" >"$venv/.vllm-gpu"
