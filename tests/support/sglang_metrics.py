"""SGLang's own metrics that the dashboard shows, with their labels (SGLang 0.5.23)."""

from __future__ import annotations

#: Those of every metric: the engine's name, its part of a split engine, and its ranks.
_COMMON = frozenset({"model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank"})

SGLANG_METRICS: dict[str, frozenset[str]] = {
    "sglang:prompt_tokens_total": _COMMON | {"is_streaming"},
    "sglang:cached_tokens_total": _COMMON | {"cache_source"},
    "sglang:time_to_first_token_seconds_bucket": _COMMON | {"is_streaming", "le"},
    "sglang:num_running_reqs": _COMMON,
    "sglang:num_queue_reqs": _COMMON,
    "sglang:num_aborted_requests_total": _COMMON,
}
