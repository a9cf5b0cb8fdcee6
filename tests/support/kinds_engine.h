#pragma once
/// \file
/// An engine for tests whose model has several kinds of blocks.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/block_key.h"
#include "client/cache_session.h"
#include "client/kinds.h"
#include "client/mover.h"
#include "tests/support/patience.h"
#include "tests/support/test_engine.h"

namespace pegaflow::testing {

/// Cache groups over the same tensors, as vLLM lays them out: a tensor has a stride of its own, a
/// group uses the first bytes of each block in the first of its tensors, and a block belongs to the
/// group that it was given to. Every byte can be compared with a model.
class OverlaidMemory {
 public:
  struct Group {
    std::size_t layers = 1;
    std::size_t layer_bytes = 4096;
  };
  /// The stride is the largest layer and `gap_bytes`.
  OverlaidMemory(std::vector<Group> groups, std::size_t blocks, std::size_t gap_bytes = 64);

  [[nodiscard]] PageLayout layout(std::size_t group) const;
  [[nodiscard]] std::uint64_t page_bytes(std::size_t group) const {
    return groups_[group].layers * groups_[group].layer_bytes;
  }

  /// Writes the pattern of `seed` into a block, through a group; the model expects it there.
  void fill(std::size_t group, std::uint32_t block, std::uint64_t seed);
  /// The model expects the pattern in the block, which a load is to bring.
  void expect(std::size_t group, std::uint32_t block, std::uint64_t seed);
  /// The model expects what the block has now: its content is undefined.
  void accept(std::size_t group, std::uint32_t block);
  /// The number of bytes that differ from the model: of blocks, between them and behind them.
  [[nodiscard]] std::size_t wrong_bytes() const;

 private:
  void write(std::vector<std::byte>& memory, std::size_t group, std::uint32_t block,
             const std::vector<std::byte>& page) const;
  [[nodiscard]] std::size_t at(std::size_t layer, std::uint32_t block) const {
    return (layer * blocks_ + block) * stride_;
  }

  std::vector<Group> groups_;
  std::size_t blocks_;
  std::size_t stride_ = 0;
  std::vector<std::byte> bytes_;
  std::vector<std::byte> model_;
};

/// A kind and its groups in an OverlaidMemory, by their index.
struct KindOfGroups {
  BlockRule rule = BlockRule::kPrefix;
  std::uint32_t tokens = 0;
  std::uint32_t block_tokens = 16;
  std::vector<std::size_t> groups{0};
};

/// Owns session and mover. Thread-bound. Its waits are kHang; then std::runtime_error is thrown.
class KindsEngine {
 public:
  struct Options {
    std::string socket;
    std::string instance = "engine";
    std::vector<KindOfGroups> kinds;
    std::uint32_t unit_tokens = 16;
    std::uint32_t alignment_tokens = 64;
    Mover::Options mover = patient_mover();
    LinkOptions session = patient_link();
  };
  /// Memory and device outlive the engine. Does not wait for the server.
  KindsEngine(Options options, OverlaidMemory& memory, Device& device);
  void wait_ready();

  /// The keys of the first units of prompt number `prompt`.
  [[nodiscard]] static std::vector<BlockKey> unit_keys(std::uint64_t prompt, std::size_t units);
  /// Seed of the bytes of a block of a kind, in one of its members.
  [[nodiscard]] static std::uint64_t seed_of(std::uint64_t prompt, std::size_t kind,
                                             std::size_t member, std::size_t block) {
    return (((prompt << 8 | kind) << 8 | member) << 24 | block) + 1;
  }

  /// Fills new blocks of the engine with what belongs to blocks first .. first + count of a kind,
  /// and saves them.
  Result<void> start_save(std::uint64_t prompt, const KindRange& range);
  Mover::Finished save(std::uint64_t prompt, const KindRange& range);

  Result<CacheSession::Answer> lookup(std::uint64_t prompt, std::size_t units,
                                      std::size_t local_units = 0);
  Result<CacheSession::Answer> claim(std::uint64_t prompt, std::size_t units,
                                     std::size_t local_units = 0);
  Result<CacheSession::Boundaries> boundaries(std::uint64_t prompt, std::size_t units);

  /// Starts to load ranges into new blocks.
  Result<void> start_load(const CacheSession::Answer& claim, const std::vector<KindRange>& ranges);
  /// The same, and waits for it. If it succeeds, the memory's model expects the blocks.
  Mover::Finished load(std::uint64_t prompt, const CacheSession::Answer& claim,
                       const std::vector<KindRange>& ranges);
  /// Takes over the content of the blocks of the last load: after a failure it is undefined.
  void accept_last_load();
  /// The memory's model expects the blocks of the last load.
  void expect_last_load(std::uint64_t prompt);
  /// The engine's blocks of the last load, of all ranges.
  [[nodiscard]] std::vector<std::uint32_t> last_blocks() const;

  Mover::Finished next_finished();
  [[nodiscard]] CacheSession& session() { return *session_; }
  [[nodiscard]] Mover& mover() { return *mover_; }
  [[nodiscard]] const std::vector<KindOfGroups>& kinds() const { return kinds_; }

  /// The block that is given out next. They are never given out twice.
  std::uint32_t next_block = 0;
  std::uint64_t last_job = 0;
  Id128 scheduler = Id128::random();

 private:
  std::vector<std::uint32_t> new_blocks(const KindRange& range);
  /// Calls `body(group, block of the engine, block of the cache, member)` for each of a range.
  template <typename Body>
  void for_each(const KindRange& range, const std::vector<std::uint32_t>& blocks, Body body) const;

  OverlaidMemory& memory_;
  const std::vector<KindOfGroups> kinds_;
  const std::uint32_t unit_tokens_;
  std::vector<KindRange> last_ranges_;
  std::vector<std::vector<std::uint32_t>> last_blocks_;
  std::unique_ptr<CacheSession> session_;
  std::unique_ptr<Mover> mover_;
  std::vector<Mover::Finished> finished_;
};

}  // namespace pegaflow::testing
