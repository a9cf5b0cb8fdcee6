#pragma once
/// \file
/// Plans the transfers and pieces of a batch of pages. Makes no CUDA call.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/page_layout.h"
#include "transport/cuda/driver.h"
#include "transport/cuda/kernels.h"
#include "transport/device.h"

namespace pegaflow::cuda {

/// How pages get between the device and the pool.
enum class Path : std::uint8_t {
  kDirect,  ///< The copy engine moves each segment by itself.
  kStaged,  ///< A kernel gathers pages in device memory, the copy engine moves them as a whole.
};

/// The largest piece: enough for a block of threads, and small enough to spread.
inline constexpr std::uint32_t kPieceBytes = 32 * 1024;

/// Segments of at least this size are moved directly without measuring the device: a transfer costs
/// the copy engine some 0.35 us in addition to its bytes (H200), under 1 % here. [measured: 54.5 of
/// 55.5 GB/s at 1 MiB]
inline constexpr std::uint64_t kSurelyDirectBytes = 2 << 20;
/// Segments up to this size are always staged: alone on the bus a copy engine may do well with 64
/// KiB, but with both directions at once it has 0.68 of the speed, and beside a GEMM 0.88 (H200).
inline constexpr std::uint64_t kSurelyStagedBytes = 256 << 10;
/// Sizes between them are moved directly if that has this share of the speed of one large copy.
/// Direct copies leave the multiprocessors to the engine, which is worth a little speed.
inline constexpr double kDirectShare = 0.97;

/// Some complete pages of a batch, or, where a page is larger than staging allows, a part of one.
struct Slice {
  std::size_t first_copy = 0;
  std::size_t copies = 0;
  std::uint32_t first_piece = 0;
  std::uint32_t pieces = 0;        ///< Per page.
  std::uint64_t origin = 0;        ///< The page offset at which staging begins.
  std::uint64_t first_byte = 0;    ///< Within each page.
  std::uint64_t page_bytes = 0;    ///< Bytes moved per page.
  std::uint64_t staged_bytes = 0;  ///< Size in staging.
  bool ends_pages = true;          ///< The pages are complete after it.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return copies * page_bytes; }
};

/// The pages of one layout, cut for kernels and copy engines. Immutable.
class CopyPlan {
 public:
  /// `register_bytes`: the size of the ranges in which the pool is page-locked; no transfer may
  /// cross from one into the next. A power of two. `owns_slots`: the bytes between a page and the
  /// end of its slot are padding, which a transfer of several pages may overwrite.
  CopyPlan(const PageLayout& layout, std::uint64_t register_bytes, bool owns_slots);

  [[nodiscard]] std::span<const Piece> pieces() const noexcept { return pieces_; }
  /// The distance of pages in staging: the page size rounded up to the slots of the pool, so that
  /// pages in neighboring slots are one transfer.
  [[nodiscard]] std::uint64_t pitch() const noexcept { return pitch_; }
  /// The number of threads that should move one piece.
  [[nodiscard]] unsigned group() const noexcept { return group_; }
  [[nodiscard]] std::uint64_t mean_segment_bytes() const noexcept { return mean_segment_bytes_; }

  /// Returns the next part of `copies` pages, where `copy` is the first incomplete one and `piece`
  /// its first piece to move. At most `max_bytes` in staging, but at least one piece.
  [[nodiscard]] Slice next(std::size_t copy, std::uint32_t piece, std::size_t copies,
                           std::uint64_t max_bytes) const;

  /// The copy engine's transfers between staging and the pool.
  [[nodiscard]] std::vector<Transfer> staged_transfers(const Slice& slice,
                                                       std::span<const Device::Copy> copies,
                                                       std::byte* pool,
                                                       DeviceAddress staging) const;
  /// The copy engine's transfers between blocks and the pool.
  [[nodiscard]] std::vector<Transfer> direct_transfers(const Slice& slice,
                                                       std::span<const Device::Copy> copies,
                                                       std::byte* pool) const;

 private:
  void add(std::vector<Transfer>& transfers, std::byte* pool, std::uint64_t pool_offset,
           DeviceAddress device, std::uint64_t bytes) const;

  std::vector<Piece> pieces_;
  std::uint64_t page_bytes_;
  std::uint64_t pitch_;
  std::uint64_t register_bytes_;
  bool owns_slots_;
  std::uint64_t mean_segment_bytes_;
  unsigned group_ = 32;
};

}  // namespace pegaflow::cuda
