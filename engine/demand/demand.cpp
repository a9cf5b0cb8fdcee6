#include "engine/demand/demand.h"

#include <algorithm>
#include <utility>

#include "engine/tables/key_hash.h"

namespace pegaflow::engine {

using std::chrono::seconds;

double Demand::Window::hit_rate() const {
  return requested == 0 ? 0 : static_cast<double>(found) / static_cast<double>(requested);
}

double Demand::Window::ceiling() const {
  if (requested == 0) return 0;
  return std::clamp(1 - fresh / static_cast<double>(requested), hit_rate(), 1.0);
}

Result<void> Demand::check(std::vector<seconds> windows) {
  if (windows.empty() || windows.size() > SlidingSketch::kMaxWindows) {
    return fail(Errc::kInvalidArgument, "there are 1 to {} windows, not {}",
                SlidingSketch::kMaxWindows, windows.size());
  }
  std::sort(windows.begin(), windows.end());
  for (const seconds window : windows) {
    if (window < kMinWindow || window > kMaxWindow) {
      return fail(Errc::kInvalidArgument, "a window has {} to {} s, not {}", kMinWindow.count(),
                  kMaxWindow.count(), window.count());
    }
  }
  if (const auto twice = std::adjacent_find(windows.begin(), windows.end());
      twice != windows.end()) {
    return fail(Errc::kInvalidArgument, "there are two windows of {} s", twice->count());
  }
  return {};
}

Result<std::unique_ptr<Demand>> Demand::create(std::vector<seconds> windows, const Clock& clock) {
  PEGA_TRY(check(windows));
  std::sort(windows.begin(), windows.end());
  PEGA_TRY_LET(auto sketch, SlidingSketch::create(windows.size()));
  return std::unique_ptr<Demand>(new Demand(windows, clock, std::move(sketch)));
}

Demand::Demand(const std::vector<seconds>& windows, const Clock& clock, SlidingSketch sketch)
    : clock_(clock), begin_(clock.now() - kMinWindow), sketch_(std::move(sketch)) {
  for (const seconds window : windows) {
    Track& track = tracks_.emplace_back();
    track.length_s = static_cast<std::uint32_t>(window.count());
    track.part_s = track.length_s / kParts;
    track.part = static_cast<std::uint32_t>(kMinWindow.count()) / track.part_s;
    // The current part and the whole ones that the window covers.
    track.parts.resize((track.length_s + track.part_s - 1) / track.part_s + 1);
  }
}

std::uint32_t Demand::advance() {
  const auto now_s = static_cast<std::uint32_t>(
      std::chrono::duration_cast<seconds>(clock_.now() - begin_).count());
  for (std::size_t window = 0; window < tracks_.size(); ++window) {
    Track& track = tracks_[window];
    const std::uint32_t part = now_s / track.part_s;
    if (part == track.part) continue;
    const auto kept = static_cast<std::uint32_t>(track.parts.size());
    for (std::uint32_t i = 0; i < std::min(part - track.part, kept); ++i) {
      track.parts[(part - i) % kept] = {};
    }
    track.part = part;
    const std::uint32_t reach_s = (kept - 1) * track.part_s;
    const std::uint32_t begin_s = part * track.part_s;
    sketch_.slide(window, begin_s > reach_s ? begin_s - reach_s : 0);
  }
  return now_s;
}

void Demand::requested(SpaceId space, std::span<const BlockKey> keys, std::size_t found,
                       std::uint64_t block_bytes) {
  const std::uint32_t now_s = advance();
  SlidingSketch::Weights known{};
  SlidingSketch::Weights fresh{};
  for (std::size_t i = 0; i < found; ++i) sketch_.add(key_hash(space, keys[i]), now_s, known);
  for (std::size_t i = found; i < keys.size(); ++i) {
    sketch_.add(key_hash(space, keys[i]), now_s, fresh);
  }
  for (std::size_t window = 0; window < tracks_.size(); ++window) {
    Part& part = tracks_[window].now();
    part.requested += keys.size();
    part.found += found;
    part.fresh += fresh[window];
    part.blocks += keys.size();
    part.bytes += keys.size() * block_bytes;
  }
}

void Demand::saved(SpaceId space, std::span<const BlockKey> keys, std::uint64_t block_bytes) {
  const std::uint32_t now_s = advance();
  SlidingSketch::Weights unused{};
  for (const BlockKey& key : keys) sketch_.add(key_hash(space, key), now_s, unused);
  for (Track& track : tracks_) {
    Part& part = track.now();
    part.blocks += keys.size();
    part.bytes += keys.size() * block_bytes;
  }
}

std::vector<Demand::Window> Demand::windows() {
  advance();
  std::vector<Window> all;
  for (std::size_t i = 0; i < tracks_.size(); ++i) {
    Part sum;
    for (const Part& part : tracks_[i].parts) {
      sum.requested += part.requested;
      sum.found += part.found;
      sum.fresh += part.fresh;
      sum.blocks += part.blocks;
      sum.bytes += part.bytes;
    }
    const double distinct = sum.blocks == 0 ? 0 : sketch_.count(i);
    all.push_back({.length = seconds(tracks_[i].length_s),
                   .requested = sum.requested,
                   .found = sum.found,
                   .fresh = sum.fresh,
                   .distinct = distinct,
                   // For engines with pages of several sizes: the mean size.
                   .bytes = sum.blocks == 0 ? 0
                                            : distinct * static_cast<double>(sum.bytes) /
                                                  static_cast<double>(sum.blocks)});
  }
  return all;
}

std::uint64_t Demand::memory_bytes() const {
  std::uint64_t bytes = sketch_.memory_bytes();
  for (const Track& track : tracks_) bytes += track.parts.size() * sizeof(Part);
  return bytes;
}

}  // namespace pegaflow::engine
