#pragma once
/// \file
/// The copies of some pages of one kind: one batch of the device for each of its members.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "client/mover/kind_table.h"
#include "transport/device.h"

namespace pegaflow {

/// A job of the mover, as the device's batches lead back to it.
struct BatchOwner {
  Device::Direction direction = Device::Direction::kSave;
  std::uint64_t job = 0;   ///< Its ticket.
  std::size_t part = 0;    ///< Its index in a load.
  std::size_t member = 0;  ///< Its index in the part's kind.
  bool is_mark = false;    ///< It has no pages, and completes when those of its save are final.
};

/// The batches that the device has, by ticket.
using Batches = std::unordered_map<std::uint64_t, BatchOwner>;

/// Keeps the batches of one piece of work until the last of them has completed. After the first
/// that fails the others are cancelled. Bound to the mover's thread.
class PageCopies {
 public:
  struct Page {
    std::size_t place = 0;          ///< Its first block is blocks[place x blocks_per_key()].
    std::uint64_t pool_offset = 0;  ///< Where the page of the kind begins, or a peer's block.
    bool checksum = false;
  };

  PageCopies() = default;
  /// Prepares the batches; the first has this ticket, and the others draw theirs from
  /// `last_ticket`. `blocks` are key-major: those of all members for the first key, then for the
  /// next one.
  PageCopies(const KindPages& kind, std::span<const std::uint32_t> blocks,
             std::span<const Page> pages, std::uint64_t ticket, std::uint64_t& last_ticket);

  /// Hands the batches to the device, and enters them in `batches`, up to the first that the device
  /// rejects; its error is then error(). `owner` is that of the first member. `peer`: the device's
  /// name for the engine in whose memory the pages are; 0: they are in the pool. `guards`: as
  /// Device::Batch, with the first member's batch.
  void submit(Device& device, Device::Event after, BatchOwner owner, Batches& batches,
              std::uint64_t peer = 0, std::vector<std::uint32_t> guards = {});
  /// Cancels the batches that are in flight.
  void cancel(Device& device) const;
  /// Takes the completion of a member's batch. Stops on one that does not fit it.
  void take(std::size_t member, Device::Completion&& completion, Device& device);

  [[nodiscard]] std::size_t in_flight() const noexcept { return in_flight_; }
  [[nodiscard]] std::size_t pages() const noexcept { return pages_; }
  [[nodiscard]] bool wants_checksums() const noexcept { return wants_checksums_; }
  [[nodiscard]] std::vector<std::uint64_t> tickets() const;
  /// Pages of which every member's part is copied, counted from the first.
  [[nodiscard]] std::size_t good_pages() const noexcept;
  [[nodiscard]] std::uint64_t bytes_copied() const noexcept;
  /// One for each page, from its members' (checksum_of_parts()); empty if none was requested.
  [[nodiscard]] std::vector<std::uint64_t> checksums() const;
  /// The same for each cell of each page, and for each page that is not cut into cells.
  [[nodiscard]] std::vector<std::uint64_t> checksums_of_shards() const;
  /// The values of the guards, as in the completion of the first member's batch.
  [[nodiscard]] const std::vector<std::uint64_t>& guards() const noexcept { return guards_; }
  /// Why not all pages were copied.
  [[nodiscard]] const std::optional<Error>& error() const noexcept { return error_; }

 private:
  struct Part {
    std::uint64_t ticket = 0;
    std::size_t layout = 0;
    std::uint64_t page_bytes = 0;
    std::vector<Device::Copy> copies;  ///< Until the device has them.
    std::size_t copied = 0;
    std::vector<std::uint64_t> checksums;
    bool in_flight = false;
  };

  void fail_with(Error error, Device& device);
  /// The checksums of a page's members, in `of_parts`.
  void read_parts(std::size_t page, std::vector<std::uint64_t>& of_parts) const;

  std::vector<Part> parts_;  ///< By member.
  std::size_t pages_ = 0;
  bool is_cut_ = false;  ///< The parts are cells.
  bool wants_checksums_ = false;
  std::size_t in_flight_ = 0;
  std::vector<std::uint64_t> guards_;
  std::optional<Error> error_;
};

}  // namespace pegaflow
