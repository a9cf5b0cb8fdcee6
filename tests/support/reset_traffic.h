#pragma once
/// \file
/// Engines of several nodes that load and save while namespaces are reset, and the blocks that they
/// may find.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tests/support/nodes.h"

namespace pegaflow::testing {

/// The times of saves and of resets of nodes. Thread-safe.
///
/// Each save has a stamp, from which the bytes of its blocks follow. A save that ended before a
/// reset began is never found after that reset has ended.
class ResetHistory {
 public:
  explicit ResetHistory(std::size_t nodes) : oldest_(nodes) {}

  std::uint64_t begin_save() {
    const std::lock_guard lock(mutex_);
    ends_[++time_] = std::numeric_limits<std::uint64_t>::max();
    return time_;
  }
  void end_save(std::uint64_t stamp) {
    const std::lock_guard lock(mutex_);
    ends_[stamp] = ++time_;
  }
  std::uint64_t begin_reset() {
    const std::lock_guard lock(mutex_);
    return ++time_;
  }
  /// The reset that began at `time` is known at `node`.
  void end_reset(std::uint64_t time, std::size_t node) {
    const std::lock_guard lock(mutex_);
    oldest_[node] = std::max(oldest_[node], time);
  }
  /// All nodes know the resets that any of them knows.
  void all_agree() {
    const std::lock_guard lock(mutex_);
    std::fill(oldest_.begin(), oldest_.end(), *std::max_element(oldest_.begin(), oldest_.end()));
  }
  /// The begin of the last reset that `node` knows.
  [[nodiscard]] std::uint64_t oldest(std::size_t node) const {
    const std::lock_guard lock(mutex_);
    return oldest_[node];
  }

  /// The defect of block `number` as it is in `memory`, for a reader whose last reset was `oldest`;
  /// empty if it is valid.
  [[nodiscard]] std::string complaint(const EngineMemory& memory, std::uint32_t block,
                                      std::uint64_t number, std::uint64_t oldest) const {
    const std::lock_guard lock(mutex_);
    for (auto save = ends_.rbegin(); save != ends_.rend(); ++save) {
      if (!memory.holds(block, TestEngine::seed_of(number, save->first))) continue;
      if (save->second > oldest) return {};
      return fmt::format("block {} was saved until {}, before the reset at {}", number,
                         save->second, oldest);
    }
    return fmt::format("block {} has the bytes of no save", number);
  }

 private:
  mutable std::mutex mutex_;
  std::uint64_t time_ = 0;
  std::map<std::uint64_t, std::uint64_t> ends_;  ///< The ends of saves, by stamp.
  std::vector<std::uint64_t> oldest_;
};

/// An engine at one of the nodes, and its requests. Thread-bound.
class ResetEngine {
 public:
  static constexpr std::size_t kPiece = std::size_t{8} << 10;
  static constexpr std::size_t kBlocks = 24;

  ResetEngine(const ServerProcess& server, std::size_t node, ResetHistory& history)
      : node_(node), history_(history), at_(server, kPiece, kBlocks) {}

  /// Loads the cached part of a prefix, checks each block, and saves the rest.
  void request(std::uint64_t chain, std::size_t count) {
    const std::uint64_t oldest = history_.oldest(node_);
    const auto numbers = numbers_from(1 + chain * 100, count);
    const auto asked = at_.engine->claim(numbers);
    const CacheSession::Answer claimed = asked ? *asked : CacheSession::Answer{};
    if (claimed.blocks != 0) {
      const auto loaded = at_.engine->load(claimed.token, blocks_from(0, claimed.blocks));
      const std::set<std::uint32_t> failed(loaded.failed_blocks.begin(),
                                           loaded.failed_blocks.end());
      for (std::uint32_t i = 0; i < claimed.blocks; ++i) {
        if (failed.contains(i)) continue;
        const auto complaint = history_.complaint(at_.memory, i, numbers[i], oldest);
        if (!complaint.empty()) complaints.push_back(fmt::format("node {}: {}", node_, complaint));
        ++looked_at;
        if (i >= claimed.blocks - claimed.coming) ++from_peers;
      }
      at_.engine->session().unclaim(claimed.token);
    }
    save({numbers.begin() + static_cast<std::ptrdiff_t>(claimed.blocks), numbers.end()});
  }

  void save(const std::vector<std::uint64_t>& numbers) {
    if (numbers.empty()) return;
    at_.engine->weights = history_.begin_save();
    at_.engine->save(numbers, blocks_from(0, numbers.size()));
    history_.end_save(at_.engine->weights);
  }

  [[nodiscard]] TestEngine& engine() { return *at_.engine; }

  std::vector<std::string> complaints;
  std::size_t looked_at = 0;  ///< Blocks that were checked.
  std::size_t from_peers = 0;

 private:
  std::size_t node_;
  ResetHistory& history_;
  EngineAt at_;
};

}  // namespace pegaflow::testing
