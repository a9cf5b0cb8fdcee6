# shellcheck shell=bash
# Sourced: how vLLM behaves in tests, the demo and `./dev run`.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 # no model hub
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_SERVER_DEV_MODE=1              # POST /reset_prefix_cache, /abort_requests, ...
export VLLM_CPU_OMP_THREADS_BIND=nobind    # two servers must not pin the same cores
# torch.compile needs headers that slim_torch.py removed; without this, log-probabilities and
# tensor parallelism would end the engine.
export TORCHDYNAMO_DISABLE=1
