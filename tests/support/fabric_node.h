#pragma once
/// \file
/// One end of a connection between nodes, with memory whose bytes identify their place.

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <vector>

#include "tests/support/patience.h"
#include "transport/fabric.h"

namespace pegaflow::testing {

/// The byte at `offset` of memory number `seed`. Neighbors, pages and memories differ.
inline std::byte pattern_at(std::uint64_t seed, std::uint64_t offset) {
  std::uint64_t x = (offset / 8 + 1) * 0x9E3779B97F4A7C15ULL + seed * 0xD1B54A32D192ED03ULL;
  x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9ULL;
  return static_cast<std::byte>((x ^ (x >> 29)) >> (offset % 8 * 8));
}

inline void fill_pattern(std::span<std::byte> memory, std::uint64_t seed) {
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = pattern_at(seed, i);
}

/// Collects completions. Thread-safe; outlives the fabric that fills it.
class FabricInbox {
 public:
  void put(Fabric::Completion&& completion) {
    const std::lock_guard lock(mutex_);
    State& state = states_[completion.ticket];
    if (!state.completed) {
      state.completed = true;
      state.order = ++completed_;
      state.completion = completion;
    }
    if (completion.quiesced) {
      if (state.quiesced) throw std::logic_error("a batch quiesced twice");
      state.quiesced = true;
    }
    changed_.notify_all();
  }

  /// Waits until the batch has completed and quiesced, and returns its result.
  Fabric::Completion take(std::uint64_t ticket) {
    std::unique_lock lock(mutex_);
    const bool came = changed_.wait_for(lock, kHang, [&] { return states_[ticket].quiesced; });
    if (!came) throw std::runtime_error("a batch did not quiesce");
    return states_[ticket].completion;
  }
  /// 0: not yet; otherwise its position among all completed batches.
  std::uint64_t completed(std::uint64_t ticket) {
    const std::lock_guard lock(mutex_);
    return states_[ticket].order;
  }
  std::size_t quiesced() {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const auto& [ticket, state] : states_) count += state.quiesced ? 1 : 0;
    return count;
  }
  Fabric::CompletionSink sink() {
    return [this](Fabric::Completion&& completion) { put(std::move(completion)); };
  }

 private:
  struct State {
    bool completed = false;
    bool quiesced = false;
    std::uint64_t order = 0;
    Fabric::Completion completion;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, State> states_;
  std::uint64_t completed_ = 0;
};

/// A time after the end of every test.
inline TimePoint late() { return std::chrono::steady_clock::now() + 2 * kHang; }

/// Returns when the thread of the fabric has processed all events before the call, and the time as
/// well.
inline void wait_for_iterations(Fabric& fabric) {
  // Each call takes one event-loop iteration; the time is read at the end of one.
  for (int i = 0; i < 2; ++i) fabric.unregister_region(RegionId{4711});
}

/// A fabric with one region of `bytes`, filled with pattern number `seed`.
struct FabricNode {
  using Make = std::function<std::unique_ptr<Fabric>(Fabric::CompletionSink)>;

  FabricNode(const Make& make, std::size_t bytes, std::uint64_t seed)
      : memory(bytes), fabric(make(inbox.sink())) {
    fill_pattern(memory, seed);
    region = fabric->register_region(memory).value();
  }

  /// Reads and waits. Its tickets begin at a million.
  Fabric::Completion read(Fabric::PeerId peer, std::vector<Fabric::Chunk> chunks) {
    const std::uint64_t ticket = ++last_ticket;
    const Result<void> accepted = fabric->read(
        {.ticket = ticket, .peer = peer, .deadline = late(), .chunks = std::move(chunks)});
    if (!accepted) throw std::runtime_error(to_string(accepted.error()));
    return inbox.take(ticket);
  }

  FabricInbox inbox;
  std::vector<std::byte> memory;
  std::unique_ptr<Fabric> fabric;
  RegionId region{};
  std::uint64_t last_ticket = 1'000'000;
};

}  // namespace pegaflow::testing
