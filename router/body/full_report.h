#pragma once
/// \file
/// The member of a body that makes an engine announce reused blocks, too.

#include <string>
#include <string_view>

namespace pegaflow::router {

/// `body`, a JSON object, with vLLM's `"kv_cache_report_mode": "full"` in its `vllm_xargs`: the
/// events of this request then name all blocks of its prompt. A body whose `vllm_xargs` is not an
/// object stays unchanged.
std::string with_full_report(std::string_view body);

}  // namespace pegaflow::router
