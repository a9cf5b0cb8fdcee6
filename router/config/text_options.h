#pragma once
/// \file
/// Options that pegaflow-router and pegaflow-index have in common, declared once.

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/program/options.h"

namespace pegaflow::router {

/// The targets of the options by which texts and token ids become blocks. They outlive the table.
struct TextOptions {
  std::vector<std::string>& hash_seeds;
  std::vector<std::string>& render;
  Duration& render_timeout;
  std::int64_t& render_inflight;
};

/// Enters these options.
void declare_text_options(const TextOptions& options, OptionTable& table);

/// Enters --kv-events, whose target outlives the table.
void declare_event_option(std::vector<std::string>& kv_events, OptionTable& table);

}  // namespace pegaflow::router
