#!/usr/bin/env bash
# The stages of `./dev soak`: each prints its seed and counts; all run, also after one failed.
#   usage: soak.sh SEED SIM_STEPS FUZZ_MINUTES KINDS_SECONDS
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
seed=$1 steps=$2 minutes=$3 seconds=$4
failed=()

# stage NAME COMMAND...
stage() {
    local name=$1 started=$SECONDS
    shift
    printf '\n==== soak: %s\n' "$name"
    "$@" || failed+=("$name")
    printf '==== soak: %s took %d s\n' "$name" $((SECONDS - started))
}

printf 'soak: seed %s, %s steps of simulation, %s minutes a fuzz target, %s s for each shape of kinds\n' \
    "$seed" "$steps" "$minutes" "$seconds"
counts=$(mktemp)
shapes=$(mktemp)
trap 'rm -f "$counts" "$shapes"' EXIT
stage 'thread sanitizer' ./dev test --tsan --seed "$seed" --counts-file "$counts"
stage 'long simulation' env PEGA_SIM_STEPS="$steps" PEGA_TEST_NO_LIMIT=1 \
    ./dev test sim/block_store --seed "$seed" --counts-file "$counts"
stage 'many schedules of faults between nodes' env PEGA_NODES_SCHEDULES=100000 \
    PEGA_TEST_NO_LIMIT=1 ./dev test sim/nodes --seed "$seed" --counts-file "$counts"
stage 'many schedules of an SSD that fails' env PEGA_SSD_SCHEDULES=1000000 \
    PEGA_TEST_NO_LIMIT=1 ./dev test sim/ssd --seed "$seed" --counts-file "$counts"
stage 'many ends of a server with a disk, and damage to its file' env PEGA_SSD_KILLS=1000 \
    PEGA_TEST_NO_LIMIT=1 ./dev test python/ssd_kills --seed "$seed" --counts-file "$counts"
stage 'many kills of a store with a kept pool, at single instructions' env PEGA_KEPT_KILLS=20000 \
    PEGA_TEST_NO_LIMIT=1 ./dev test sim/kept_pool --seed "$seed" --counts-file "$counts"
stage 'many random calls of the index of blocks, beside a model' env PEGA_INDEX_STEPS=2500000 \
    PEGA_TEST_NO_LIMIT=1 ./dev test unit/index --seed "$seed" --counts-file "$counts"
stage 'many ends of a server with a kept pool' env PEGA_KEEP_KILLS=1000 \
    PEGA_TEST_NO_LIMIT=1 ./dev test python/keep_kills --seed "$seed" --counts-file "$counts"
stage 'many schedules of an event stream that loses batches' env PEGA_SOURCE_SCHEDULES=200000 \
    PEGA_TEST_NO_LIMIT=1 ./dev test sim/kv_source --seed "$seed" --counts-file "$counts"
stage 'many nodes and a directory' env PEGA_DIRECTORY_NODES=200 PEGA_DIRECTORY_SECONDS=120 \
    PEGA_DIRECTORY_CHURN=10 \
    PEGA_TEST_NO_LIMIT=1 ./dev test sim/directory --seed "$seed" --counts-file "$counts"
stage 'a thousand nodes and a directory' env PEGA_DIRECTORY_SCALE_NODES=1000 \
    PEGA_DIRECTORY_SCALE_SECONDS=300 PEGA_DIRECTORY_CHURN=10 \
    PEGA_TEST_NO_LIMIT=1 ./dev test sim/directory_scale --seed "$seed" --counts-file "$counts"
stage 'planted mistakes between nodes, the rare one too' env PEGA_RARE_MISTAKES=1 \
    PEGA_TEST_NO_LIMIT=1 ./dev test sim/nodes_mistakes --seed "$seed" --counts-file "$counts"
stage 'many prompts that other engines read directly' env PEGA_DIRECT_ROUNDS=100000 \
    PEGA_TEST_NO_LIMIT=1 ./dev test integration/direct --seed "$seed" --counts-file "$counts"
stage 'many outages of a network' env PEGA_TEST_HOLES=100 \
    PEGA_TEST_NO_LIMIT=1 ./dev test fault/nodes_network --seed "$seed" --counts-file "$counts"
stage 'many resets of a network that is not whole' env PEGA_TEST_PARTITIONS=100 \
    PEGA_TEST_NO_LIMIT=1 ./dev test fault/nodes_partition --seed "$seed" --counts-file "$counts"
stage "searches for restorable prefixes beside vLLM's own" env PEGA_RESTORABLE_CASES=1000000 \
    PEGA_TEST_NO_LIMIT=1 ./dev test python/restorable_vllm --seed "$seed" --counts-file "$counts"
stage 'engines and servers with several kinds of blocks, killed every 10 s' \
    env PEGA_KINDS_SOAK_SECONDS="$seconds" PEGA_KINDS_SOAK_REPORT="$shapes" PEGA_TEST_NO_LIMIT=1 \
    ./dev test python/kinds_soak --seed "$seed" --counts-file "$counts"
cat "$shapes"
stage 'many requests with several kinds of blocks' env PEGA_KINDS_REQUESTS=300 \
    PEGA_TEST_NO_LIMIT=1 ./dev test python/connector_kinds --seed "$seed" --counts-file "$counts"
stage 'accepted drafts of 500 prompts, reloaded and shifted' env PEGA_EAGLE_PROMPTS=500 \
    PEGA_TEST_NO_LIMIT=1 ./dev test python/connector_eagle_vllm --seed "$seed" --counts-file "$counts"
stage 'random steps of SGLang engines with the linker' env PEGA_SGLANG_SEQUENCES=5000 \
    PEGA_TEST_NO_LIMIT=1 ./dev test python/sglang_linker --seed "$seed" --counts-file "$counts"
stage 'long fuzzing' ./dev test fuzz --seed "$seed" --fuzz-seconds $((minutes * 60)) \
    --counts-file "$counts"

[ "${#failed[@]}" = 0 ] || printf 'failed: %s\n' "${failed[*]}"
awk '{p += $1; f += $2; s += $3} END {printf "%d passed, %d failed, %d skipped\n", p, f, s}' "$counts"
[ "${#failed[@]}" = 0 ]
