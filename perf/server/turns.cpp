#include "perf/server/turns.h"

#include <cmath>
#include <cstdlib>
#include <map>

namespace pegaflow::perf {
namespace {

/// Cumulative counts by upper edge in seconds.
std::map<double, double> buckets(const harness::ServerProcess::Metrics& metrics,
                                 std::string_view histogram) {
  std::map<double, double> counts;
  const std::string prefix = fmt::format("{}_bucket{{le=\"", histogram);
  for (auto it = metrics.lower_bound(prefix); it != metrics.end() && it->first.starts_with(prefix);
       ++it) {
    counts[std::strtod(it->first.c_str() + prefix.size(), nullptr)] = it->second;
  }
  return counts;
}

}  // namespace

Result<Turns> turns_between(const harness::ServerProcess::Metrics& before,
                            const harness::ServerProcess::Metrics& after,
                            std::string_view histogram, std::string_view longest_gauge) {
  constexpr double kLimit = 500e-6;
  const std::map<double, double> old_counts = buckets(before, histogram);
  Turns turns;
  double below = 0;
  double up_to_limit = -1;
  for (const auto& [edge, count] : buckets(after, histogram)) {
    const auto old = old_counts.find(edge);
    const double cumulative = count - (old == old_counts.end() ? 0 : old->second);
    if (cumulative > below) turns.longest_seconds = edge;
    if (std::abs(edge - kLimit) < 1e-9) up_to_limit = cumulative;
    below = cumulative;
  }
  if (up_to_limit < 0) {
    return fail(Errc::kInternal, "the histogram {} has no bucket that ends at 500 us", histogram);
  }
  if (below <= 0)
    return fail(Errc::kInternal, "no event-loop iteration was counted in {}", histogram);
  turns.count = static_cast<std::uint64_t>(below);
  turns.above_500us = static_cast<std::uint64_t>(below - up_to_limit);
  const auto longest_before = before.find(longest_gauge);
  const auto longest_after = after.find(longest_gauge);
  if (longest_before != before.end() && longest_after != after.end() &&
      longest_after->second > longest_before->second) {
    turns.longest_seconds = longest_after->second;
  }
  return turns;
}

}  // namespace pegaflow::perf
