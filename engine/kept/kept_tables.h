#pragma once
/// \file
/// The tables of the block store in memory that outlives its process.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/os/unique_fd.h"
#include "engine/kept/kept_extent.h"
#include "engine/tables/block_row.h"

namespace pegaflow::engine {

/// One memfd with the rows of all frames, a proof for each row, the extents, the checksums of
/// pages, the memory of the eviction policies and two records that describe the rest. Another
/// process that holds its descriptor and that of the pool continues with both after this one has
/// died at any instruction.
///
/// Nothing is flushed: the stores of a dead process are in memory, in program order. A row counts
/// only while its proof is that of its content: the proof is cleared before a member that it covers
/// changes, and set after the last one has. Costs memory only for what was touched. Thread-bound.
class KeptTables {
 public:
  /// The meaning of the bytes: raised with each change to Block, KeptExtent or the header.
  static constexpr std::uint32_t kFormat = 3;

  struct Layout {
    Id128 pool;  ///< The name of the pool, drawn with its memory.
    std::uint64_t pool_bytes = 0;
    std::uint32_t numa_nodes = 1;
    bool operator==(const Layout&) const = default;
  };

  /// Errors: kOutOfCapacity, kIo.
  static Result<KeptTables> create(const Layout& layout, const Clock& clock);
  /// Maps the tables of another process.
  /// Errors: kRefused when they have another format or layout, kCorrupt when they are no tables,
  /// kIo.
  static Result<KeptTables> open(UniqueFd fd);

  KeptTables(KeptTables&& other) noexcept;
  KeptTables& operator=(KeptTables&& other) noexcept;
  ~KeptTables();

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] Layout layout() const noexcept;
  /// When the tables were made: seconds in rows count from here.
  [[nodiscard]] TimePoint made() const noexcept;

  [[nodiscard]] std::span<Block> rows() const noexcept;
  [[nodiscard]] std::span<std::uint64_t> proofs() const noexcept;
  /// By number of the page; see ChecksumTable.
  [[nodiscard]] std::span<std::uint64_t> checksums() const noexcept;
  /// By first unit.
  [[nodiscard]] std::span<KeptExtent> extents() const noexcept;
  /// The memory of the eviction policy of a shape, with what a former process left there. Nothing
  /// proves it: it only decides which block leaves.
  [[nodiscard]] std::span<std::byte> policy(std::uint32_t shape) const noexcept;
  static constexpr std::uint32_t kPolicies = 512;
  /// Makes it all zero.
  void forget_policy(std::uint32_t shape) const noexcept;
  /// The counter of BlockRows, and the count of page checksums.
  [[nodiscard]] std::uint32_t& uses() const noexcept;
  [[nodiscard]] std::uint64_t& checksum_count() const noexcept;

  /// Whether all processes that may access the pool are known to the holder of the descriptors:
  /// without that no other process may use them. False at first.
  void set_usable(bool is_usable) noexcept;
  [[nodiscard]] bool is_usable() const noexcept;

  /// The bytes of the pool that lie on huge pages, as its maker found.
  void set_huge_bytes(std::uint64_t bytes) noexcept;
  [[nodiscard]] std::uint64_t huge_bytes() const noexcept;

  void set_extent(std::uint32_t unit, const KeptExtent& extent) noexcept;
  void clear_extent(std::uint32_t unit) noexcept;

  enum class Record : std::uint8_t {
    kNames,  ///< Shapes and namespaces, with the generations whose blocks may be found.
    kDisks,  ///< The files whose reads may write to the pool.
  };
  static constexpr std::size_t kMaxRecordBytes = std::size_t{32} << 20;
  /// Replaces a record: a process that dies meanwhile leaves the former one.
  /// Errors: kOutOfCapacity above kMaxRecordBytes.
  Result<void> write(Record record, std::span<const std::byte> bytes);
  /// No value if none was ever written whole.
  [[nodiscard]] std::optional<std::vector<std::byte>> read(Record record) const;

 private:
  struct Header;
  struct Sections;
  struct RecordHead;

  KeptTables(UniqueFd fd, std::span<std::byte> bytes) noexcept;
  static Result<KeptTables> map(UniqueFd fd, std::uint64_t size);
  [[nodiscard]] Header& header() const noexcept;
  [[nodiscard]] std::span<std::byte> slot(Record record, unsigned number) const noexcept;
  /// The number of the slot with the newest whole record; no value if none is whole.
  [[nodiscard]] std::optional<unsigned> newest(Record record) const;

  UniqueFd fd_;
  std::span<std::byte> bytes_;
};

/// The proof of a sealed row of an extent: never 0. Covers what does not change while it is sealed.
[[nodiscard]] std::uint64_t row_proof(const Block& block, std::uint32_t row,
                                      std::uint64_t extent_serial) noexcept;

}  // namespace pegaflow::engine
