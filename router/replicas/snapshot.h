#pragma once
/// \file
/// The knowledge of a router for one that starts: the learned texts, in sealed parts.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "router/replicas/replica_set.h"

namespace pegaflow::router {

/// The path of a snapshot. The query is the nonce, 32 hexadecimal digits of the requester, which
/// every part's seal covers.
inline constexpr std::string_view kSnapshotPath = "/index/snapshot";
/// The nonce in a target; empty when it has another form.
[[nodiscard]] std::string_view nonce_of(std::string_view target);

/// Writes the texts that are known at its creation, the least recently used first, so that the
/// reader's order of use is the same; texts that are forgotten meanwhile are left out. Then the
/// blocks of each engine's rank whose events are trusted, with their place in its stream. Each part
/// is `length (4 bytes) | message`. Thread-bound.
class SnapshotWriter {
 public:
  /// The size at which a part ends; one text may exceed it.
  static constexpr std::size_t kPartBytes = std::size_t{128} << 10U;
  /// Cells of the index that one part visits.
  static constexpr std::size_t kCells = std::size_t{96} << 10U;

  /// `replicas` outlives the object.
  SnapshotWriter(ReplicaSet& replicas, std::string_view nonce);
  /// The next part; empty after the last one.
  [[nodiscard]] std::string next();

 private:
  /// The rank whose blocks are being written.
  struct Open {
    SharedName engine = 0;
    index::Source::Position place{};
    std::uint64_t forgotten = 0;  ///< Source::Stats::forgotten when it began.
    std::size_t cell = 1;
  };

  void add_texts(std::string& records);
  void add_blocks(std::string& records);

  ReplicaSet& replicas_;
  const std::string purpose_;
  const std::vector<std::uint32_t> ends_;
  std::size_t at_ = 0;
  std::vector<SharedName> engines_;  ///< Those that wait.
  std::optional<Open> open_;
  std::uint64_t texts_ = 0;
  std::uint64_t parts_ = 0;
  bool has_ended_ = false;
};

/// Learns the texts of a snapshot, as its bytes come, and replaces the blocks of engines of which
/// this router knows less. Thread-bound; holds one part at most, and kMaxBlocks of one engine.
class SnapshotReader {
 public:
  static constexpr std::size_t kMaxBlocks = std::size_t{1} << 20U;

  /// `replicas` outlives the object. Only parts of the incarnation `from` are used.
  SnapshotReader(ReplicaSet& replicas, std::string_view nonce, const Id128& from);
  /// Takes further bytes.
  /// Errors: kCorrupt for anything but the next part; what was learned before stays.
  Result<void> feed(std::string_view bytes, TimePoint now);
  [[nodiscard]] bool is_complete() const noexcept { return is_complete_; }
  [[nodiscard]] std::uint64_t texts() const noexcept { return texts_; }
  /// Ranks whose blocks were taken.
  [[nodiscard]] std::uint64_t engines() const noexcept { return engines_; }

 private:
  Result<void> use(std::string_view message, TimePoint now);
  void take(const SharedBlocks& blocks, TimePoint now);

  ReplicaSet& replicas_;
  const std::string purpose_;
  const Id128 from_;
  std::string unread_;
  std::uint64_t parts_ = 0;
  std::uint64_t texts_ = 0;
  std::uint64_t engines_ = 0;
  SharedName engine_ = 0;  ///< The one that has keys_.
  std::vector<index::Key> keys_;
  bool is_too_long_ = false;  ///< More blocks than kMaxBlocks: none is taken.
  bool is_complete_ = false;
};

}  // namespace pegaflow::router
