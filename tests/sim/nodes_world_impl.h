#pragma once
/// \file
/// Types that the files of NodesWorld share.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <kj/async.h>

#include "capnp/wire/rpc_error.h"
#include "tests/sim/nodes_world.h"

namespace pegaflow::sim {

inline constexpr std::size_t kWords = harness::SimCluster::kPageBytes / sizeof(std::uint64_t);

inline std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9ULL;
  return x ^ (x >> 29);
}

/// Word `i` of the page of `key` that was saved at `written`, which is word 0 as it is.
inline std::uint64_t word_of(const BlockKey& key, std::uint64_t written, std::size_t i) {
  if (i == 0) return written;
  return mix(key.hash() + mix(written) + (i + 1) * 0x9E3779B97F4A7C15ULL);
}

/// A page that an engine reads or writes.
struct NodesWorld::Page {
  BlockKey key;
  std::uint64_t time = 0;  ///< For a write the time of its reservation; for a read the time of the
                           ///< oldest valid save.
};

/// A process that loads and saves, with one connection.
struct NodesWorld::Engine final : kj::TaskSet::ErrorHandler {
  Engine(std::size_t of, const Id128& called) : node(of), process(called) {
    tasks = kj::heap<kj::TaskSet>(*this);
  }
  void taskFailed(kj::Exception&& exception) override {
    if (!failure) failure = error_from(exception).detail;
  }

  const std::size_t node;
  const Id128 process;
  Id128 connection;
  bool is_dead = false;
  std::map<std::uint32_t, Page> reads;  ///< Pages that it has pinned; one pin each at a time.
  std::map<std::uint32_t, std::uint32_t> pins;  ///< Number of pins by page.
  std::map<std::uint32_t, Page> writes;
  std::optional<std::string> failure;
  kj::Own<kj::TaskSet> tasks;
};

}  // namespace pegaflow::sim
