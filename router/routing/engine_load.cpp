#include "router/routing/engine_load.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>

namespace pegaflow::router {

namespace {

constexpr std::uint32_t kMaxRank = 1023;

enum class Field : std::uint8_t { kWaiting, kRunning, kUse };

struct Name {
  std::string_view text;
  Field field;
};

constexpr std::array kNames = {Name{"vllm:num_requests_waiting", Field::kWaiting},
                               Name{"vllm:num_requests_running", Field::kRunning},
                               Name{"vllm:kv_cache_usage_perc", Field::kUse},
                               Name{"sglang:num_queue_reqs", Field::kWaiting},
                               Name{"sglang:num_running_reqs", Field::kRunning},
                               Name{"sglang:token_usage", Field::kUse}};

/// The rank in `{engine="0",model_name="m"}` (vLLM) or with `dp_rank` (SGLang); 0 without one.
std::optional<std::uint32_t> rank_of(std::string_view labels) {
  for (const std::string_view label : {"engine=\"", "dp_rank=\""}) {
    const std::size_t at = labels.find(label);
    if (at == std::string_view::npos || (labels[at - 1] != '{' && labels[at - 1] != ',')) continue;
    const std::string_view digits = labels.substr(at + label.size());
    std::uint32_t rank = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
    if (error != std::errc() || end == digits.data() + digits.size() || *end != '"' ||
        rank > kMaxRank) {
      return std::nullopt;
    }
    return rank;
  }
  return 0;
}

void set(index::EngineLoad& load, Field field, double value) {
  const double count = std::clamp(value, 0.0, 1e9);
  switch (field) {
    case Field::kWaiting:
      load.waiting = static_cast<std::uint32_t>(count);
      break;
    case Field::kRunning:
      load.running = static_cast<std::uint32_t>(count);
      break;
    case Field::kUse:
      load.kv_use = std::min(1.0, count);
      break;
  }
}

void read_line(std::string_view line, std::vector<RankLoad>& loads) {
  const auto* const name = std::find_if(kNames.begin(), kNames.end(), [&](const Name& each) {
    return line.size() > each.text.size() && line.starts_with(each.text) &&
           (line[each.text.size()] == '{' || line[each.text.size()] == ' ');
  });
  if (name == kNames.end()) return;
  line.remove_prefix(name->text.size());
  // A name of a model may have any character but a quote.
  const std::size_t close = line.front() == '{' ? line.rfind('}') : 0;
  if (close == std::string_view::npos) return;
  const std::string_view labels = line.substr(0, close);
  std::string_view digits = line.substr(line.front() == '{' ? close + 1 : 0);
  digits.remove_prefix(std::min(digits.find_first_not_of(' '), digits.size()));
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const std::optional<std::uint32_t> rank = rank_of(labels);
  if (error != std::errc() || end == digits.data() || !std::isfinite(value) || !rank) return;
  auto at = std::find_if(loads.begin(), loads.end(),
                         [&](const RankLoad& each) { return each.rank == *rank; });
  if (at == loads.end()) at = loads.insert(at, RankLoad{*rank, {}});
  set(at->load, name->field, value);
}

}  // namespace

std::vector<RankLoad> read_engine_load(std::string_view page) {
  std::vector<RankLoad> loads;
  while (!page.empty()) {
    const std::size_t end = std::min(page.find('\n'), page.size());
    const std::string_view line = page.substr(0, end);
    // Most lines are comments and histograms of other names.
    if (line.starts_with("vllm:") || line.starts_with("sglang:")) read_line(line, loads);
    page.remove_prefix(std::min(end + 1, page.size()));
  }
  return loads;
}

}  // namespace pegaflow::router
