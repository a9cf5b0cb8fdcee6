#include "perf/placement/arrivals.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_map>

#include "perf/lib/random_draws.h"
#include "perf/placement/lru_blocks.h"

namespace pegaflow::perf {
namespace {

constexpr std::uint64_t kSalt = 0x706C616365;
/// A first block of more than this share of all prompts is a system prompt, which copies share.
constexpr double kSystemShare = 0.01;
constexpr std::uint32_t kGeneratedOutput = 200;

/// Spreads the requests of each time stamp: evenly until the next one, or `gap` apart.
void spread(std::vector<PlaceRequest>& requests, std::optional<double> gap) {
  for (std::size_t begin = 0; begin < requests.size();) {
    std::size_t end = begin;
    while (end < requests.size() && requests[end].at <= requests[begin].at) ++end;
    const double next = end < requests.size() ? requests[end].at : requests[begin].at;
    const double even = (next - requests[begin].at) / static_cast<double>(end - begin);
    const double step = gap ? std::min(*gap, even) : even;
    for (std::size_t i = begin; i < end; ++i) {
      requests[i].at += step * static_cast<double>(i - begin);
    }
    begin = end;
  }
}

/// Times for requests that have none: a Poisson process of the wanted load.
std::vector<Arrival> generate(const RequestTrace& trace, const ArrivalOptions& options) {
  Draws draws(options.seed);
  double tokens = 0;
  for (const Prompt& prompt : trace.requests) {
    tokens += static_cast<double>(prompt.size()) * kTraceBlockTokens;
  }
  const double prefill =
      tokens / static_cast<double>(trace.requests.size()) / options.tokens_per_second;
  const double gap = prefill / (options.load * options.nodes);
  std::vector<Arrival> arrivals;
  double at = 0;
  for (const Prompt& prompt : trace.requests) {
    at += draws.exponential(gap);
    arrivals.push_back(
        {.milliseconds = at * 1000,
         .input_tokens = static_cast<std::uint32_t>(prompt.size()) * kTraceBlockTokens,
         .output_tokens = kGeneratedOutput});
  }
  return arrivals;
}

}  // namespace

Result<std::vector<PlaceRequest>> arrivals_of(const RequestTrace& trace,
                                              const ArrivalOptions& options) {
  const bool has_times = !trace.arrivals.empty();
  const std::vector<Arrival> arrivals = has_times ? trace.arrivals : generate(trace, options);
  std::unordered_map<std::uint64_t, std::size_t> roots;
  for (const Prompt& prompt : trace.requests) ++roots[prompt.front()];
  const double common = kSystemShare * static_cast<double>(trace.requests.size());
  const double length = arrivals.back().milliseconds / 1000;

  std::vector<PlaceRequest> requests;
  requests.reserve(trace.requests.size() * options.copies);
  for (std::uint32_t copy = 0; copy < options.copies; ++copy) {
    const double offset = length * copy / options.copies;
    for (std::size_t i = 0; i < trace.requests.size(); ++i) {
      const Prompt& prompt = trace.requests[i];
      PlaceRequest request{.at = arrivals[i].milliseconds / 1000,
                           .input_tokens = arrivals[i].input_tokens,
                           .output_tokens = arrivals[i].output_tokens,
                           .chain = {}};
      if (request.input_tokens <= (prompt.size() - 1) * kTraceBlockTokens) {
        return fail(Errc::kInvalidArgument, "{}, request {}: {} tokens do not fill {} blocks of {}",
                    trace.name, i + 1, request.input_tokens, prompt.size(), kTraceBlockTokens);
      }
      // Other users begin elsewhere in the recorded time, and go round.
      if (options.copies > 1) request.at = std::fmod(request.at + offset, length);
      request.at /= options.scale;
      request.chain.reserve(prompt.size());
      const bool is_common =
          static_cast<double>(roots[prompt.front()]) > common && options.copies > 1;
      for (std::size_t k = 0; k < prompt.size(); ++k) {
        const bool shared = k == 0 && is_common;
        const std::uint64_t salt = kSalt + (shared ? 0 : copy * 0x9E3779B97F4A7C15U);
        request.chain.push_back(index::key_of(salt, prompt[k]));
      }
      requests.push_back(std::move(request));
    }
  }
  std::stable_sort(requests.begin(), requests.end(),
                   [](const PlaceRequest& a, const PlaceRequest& b) { return a.at < b.at; });
  if (has_times) {
    spread(requests, options.spread ? std::nullopt : std::optional(options.burst_gap_seconds));
  }
  return requests;
}

double shared_cache_hits(const std::vector<PlaceRequest>& requests, std::size_t blocks) {
  LruBlocks cache(blocks);
  std::vector<index::Key> evicted;
  double asked = 0;
  double found = 0;
  for (const PlaceRequest& request : requests) {
    asked += static_cast<double>(request.chain.size());
    found += static_cast<double>(cache.prefix(request.chain));
    cache.use(request.chain, 0, evicted);
    evicted.clear();
  }
  return asked > 0 ? found / asked : 0;
}

}  // namespace pegaflow::perf
