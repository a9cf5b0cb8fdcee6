#pragma once
/// \file
/// The words by which an engine that reads another one's memory learns whether its bytes count.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/os/unique_fd.h"

namespace pegaflow {

/// One word of an array of guards, and the value that it has while the blocks that it guards may
/// be read.
struct Guard {
  std::uint32_t place = 0;
  std::uint64_t value = 0;
};

/// The guards of this process, in memory that readers map. Everything that happens after close()
/// returned, also in threads that learn of it later, is seen by no reader that still sees the guard
/// open: so blocks may be overwritten then.
///
/// Thread-bound. At its limit open() returns no guard: the blocks are then not offered.
class Guards {
 public:
  /// `count` guards, all closed. Errors: the kernel's.
  static Result<std::unique_ptr<Guards>> create(std::uint32_t count);
  /// Closes all guards: readers may keep the memory.
  ~Guards();
  Guards(const Guards&) = delete;
  Guards& operator=(const Guards&) = delete;

  /// A memfd of the array, which this object owns.
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] std::uint32_t count() const noexcept {
    return static_cast<std::uint32_t>(words_.size());
  }
  /// The array.
  [[nodiscard]] std::span<std::byte> bytes() const noexcept {
    return std::as_writable_bytes(words_);
  }

  /// Opens a free guard, with a value that no guard has had.
  [[nodiscard]] std::optional<Guard> open();
  /// Closes it. Call it once for each open().
  void close(const Guard& guard);
  /// Closes all guards. Their places are not used again.
  void close_all();

 private:
  Guards(UniqueFd fd, std::span<std::uint64_t> words);

  UniqueFd fd_;
  std::span<std::uint64_t> words_;
  std::vector<std::uint32_t> free_;
  std::uint64_t last_value_;  ///< Begins at a random number: two processes have no value in common.
};

/// The guards of another process. Thread-bound; movable.
class PeerGuards {
 public:
  /// Maps `count` guards of a memfd, which may be closed afterwards.
  /// Errors: kRefused when the memory could shrink or is smaller; the kernel's.
  static Result<PeerGuards> map(int fd, std::uint32_t count);

  PeerGuards() noexcept = default;  ///< None.
  PeerGuards(PeerGuards&& other) noexcept;
  PeerGuards& operator=(PeerGuards&& other) noexcept;
  ~PeerGuards();

  [[nodiscard]] std::size_t count() const noexcept { return words_.size(); }
  /// Whether the guard is open, and was so when all memory was read that this thread knows to have
  /// been read. False for a place that does not exist.
  [[nodiscard]] bool is_open(const Guard& guard) const;

 private:
  explicit PeerGuards(std::span<std::uint64_t> words) noexcept : words_(words) {}

  std::span<std::uint64_t> words_;  ///< Not writable.
};

}  // namespace pegaflow
