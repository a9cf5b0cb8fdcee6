#include "transport/cuda/copy_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "transport/cuda/cuda_error.h"
#include "transport/cuda/page_hash.h"

namespace pegaflow::cuda {
namespace {

constexpr Log kLog{"cuda"};

/// With less staging than this, the kernels do not pay. [measured: 16 MiB reach 22 of 55 GB/s
/// beside a GEMM]
constexpr std::uint64_t kLeastStaging = 32 << 20;

/// The launch time of a flight, to estimate when polling is worthwhile.
constexpr Duration kLaunch = std::chrono::microseconds(10);

/// The weight of the last flight in the expected rate, and the bytes below which a flight is
/// ignored.
constexpr double kNewest = 0.25;
constexpr double kTellingBytes = 8 << 20;

constexpr std::size_t kSharedBytes = CopyStream::kMaxPages * sizeof(std::uint64_t);

unsigned blocks_for(std::uint64_t items, std::uint64_t items_a_block, unsigned limit) {
  return static_cast<unsigned>(
      std::clamp<std::uint64_t>((items + items_a_block - 1) / items_a_block, 1, limit));
}

}  // namespace

Result<Kernels> find_kernels(Driver& driver, Module module) {
  Kernels kernels;
  for (const auto& [name, function] : {std::pair{"pega_gather", &kernels.gather},
                                       {"pega_scatter", &kernels.scatter},
                                       {"pega_hash_sums", &kernels.hash_sums},
                                       {"pega_hash_chain", &kernels.hash_chain},
                                       {"pega_pull", &kernels.pull}}) {
    PEGA_TRY(check(driver, driver.find_function(module, name, *function),
                   fmt::format("find the kernel {}", name)));
  }
  return kernels;
}

Result<std::unique_ptr<CopyStream>> CopyStream::create(std::shared_ptr<Driver> driver,
                                                       const Options& options,
                                                       const Kernels& kernels) {
  std::unique_ptr<CopyStream> copy_stream(new CopyStream(std::move(driver), options, kernels));
  PEGA_TRY(copy_stream->make());
  return copy_stream;
}

Result<void> CopyStream::make() {
  Driver& driver = *driver_;
  PEGA_TRY(check(driver, driver.create_stream(options_.kernel_priority, kernel_stream_),
                 "create a stream"));
  PEGA_TRY(check(driver, driver.create_stream(options_.kernel_priority, copy_stream_),
                 "create a stream"));
  DeviceAddress shared_on_device = 0;
  PEGA_TRY(check(driver,
                 driver.allocate_host(kMaxFlights * kSharedBytes, shared_, shared_on_device),
                 "allocate page-locked memory"));
  slots_.resize(kMaxFlights);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.shared = shared_ + i * kSharedBytes;
    slot.shared_on_device = shared_on_device + i * kSharedBytes;
    PEGA_TRY(check(driver, driver.create_event(false, slot.middle), "create an event"));
    PEGA_TRY(check(driver, driver.create_event(false, slot.done), "create an event"));
  }
  return {};
}

CopyStream::~CopyStream() {
  if (staging_ != 0) driver_->release(staging_);
  if (sums_ != 0) driver_->release(sums_);
  for (const Slot& slot : slots_) {
    if (slot.middle != nullptr) driver_->destroy_event(slot.middle);
    if (slot.done != nullptr) driver_->destroy_event(slot.done);
  }
  if (shared_ != nullptr) driver_->release_host(shared_);
  if (copy_stream_ != nullptr) driver_->destroy_stream(copy_stream_);
  if (kernel_stream_ != nullptr) driver_->destroy_stream(kernel_stream_);
}

Result<void> CopyStream::take_staging() {
  if (staging_ != 0) return {};
  const std::uint64_t sums_bytes = options_.slice_bytes / kHashBlock * kHashLanes * 8;
  for (std::uint64_t bytes = options_.staging_bytes;; bytes /= 2) {
    const Status status = driver_->allocate(bytes, staging_);
    if (status == kSuccess) {
      ring_ = StagingRing(bytes);
      break;
    }
    staging_ = 0;
    if (status != kOutOfMemory || bytes / 2 < std::min(kLeastStaging, options_.staging_bytes)) {
      return check(*driver_, status, fmt::format("allocate {} bytes of staging on the GPU", bytes));
    }
    kLog.warn("the GPU has little memory left, copies use less staging bytes={}", bytes / 2);
  }
  return check(*driver_, driver_->allocate(sums_bytes, sums_), "allocate memory for checksums");
}

Result<std::optional<Slice>> CopyStream::queue(const Attached& attached, std::uint64_t ticket,
                                               std::span<const Device::Copy> copies,
                                               std::size_t copy, std::uint32_t piece,
                                               const Wait& wait, const PeerMapping* peer) {
  if (flights_.size() == slots_.size() || queued_bytes_ >= options_.ahead_bytes) {
    return std::nullopt;
  }
  const std::uint64_t most =
      staging_ == 0 ? options_.slice_bytes : std::min(options_.slice_bytes, ring_.size_bytes());
  const std::size_t most_pages = peer != nullptr ? kPullPages : kMaxPages;
  const Slice slice =
      attached.plan.next(copy, piece, std::min(copies.size(), copy + most_pages), most);
  const auto pages = copies.subspan(slice.first_copy, slice.copies);
  const bool wants_hash = std::any_of(pages.begin(), pages.end(),
                                      [](const Device::Copy& page) { return page.checksum; });
  bool hashed = wants_hash && kernels_.hash_chain != nullptr && slice.ends_pages &&
                slice.first_piece == 0 && slice.page_bytes >= kHashLeastBytes && peer == nullptr;
  bool staged = attached.path == Path::kStaged && peer == nullptr;
  if (hashed && !staged) {
    // Allocated late, since few batches request checksums; a full GPU computes none.
    staged = hashed = take_staging().has_value();
  }

  // On both: the batch's first slice may go directly and a later one, with checksums, be staged.
  for (const Stream stream : {copy_stream_, kernel_stream_}) PEGA_TRY(wait(stream));
  StagingRing::Range range;
  if (staged) range = ring_.take(slice.staged_bytes);
  const std::size_t slot = next_slot_;
  next_slot_ = (next_slot_ + 1) % slots_.size();
  if (peer != nullptr) {
    PEGA_TRY(queue_pull(attached, slice, slots_[slot], copies, *peer));
  } else if (staged) {
    PEGA_TRY(queue_staged(attached, slice, slots_[slot], copies, range, hashed));
  } else {
    PEGA_TRY(queue_direct(attached, slice, slots_[slot], copies));
  }
  if (flights_.empty()) oldest_since_ = clock_.now();
  const bool on_kernels =
      peer != nullptr || (staged && options_.direction == Device::Direction::kLoad);
  flights_.push_back(
      {ticket, slice, slot, staged, hashed, peer != nullptr, on_kernels, range.number});
  queued_bytes_ += slice.bytes();
  return slice;
}

Result<void> CopyStream::wait_behind(std::uint64_t range, Stream stream) {
  if (range == 0) return {};
  const auto flight = std::find_if(flights_.begin(), flights_.end(), [&](const InFlight& other) {
    return other.staged && other.range == range;
  });
  PEGA_ASSERT(flight != flights_.end(), "the staging of an ended slice is not free");
  return check(*driver_, driver_->wait(stream, slots_[flight->slot].done), "wait for an event");
}

TimePoint CopyStream::expected_end() const {
  const InFlight& oldest = flights_.front();
  const auto bytes = static_cast<double>(oldest.slice.bytes());
  const double rate = oldest.pulled ? kPulledPerNanosecond : kBytesPerNanosecond;
  return oldest_since_ + kLaunch + Duration(static_cast<std::int64_t>(bytes / rate));
}

TimePoint CopyStream::expected_last_end() const {
  const auto bytes = static_cast<double>(queued_bytes_);
  return oldest_since_ + Duration(static_cast<std::int64_t>(bytes / bytes_per_nanosecond_));
}

Stream CopyStream::last_stream() const {
  return flights_.back().on_kernels ? kernel_stream_ : copy_stream_;
}

Result<void> CopyStream::queue_staged(const Attached& attached, const Slice& slice,
                                      const Slot& slot, std::span<const Device::Copy> copies,
                                      const StagingRing::Range& range, bool hashed) {
  const DeviceAddress at = staging_ + range.begin;
  const std::vector<Transfer> transfers =
      attached.plan.staged_transfers(slice, copies, attached.pool.data(), at);

  if (options_.direction == Device::Direction::kSave) {
    PEGA_TRY(wait_behind(range.behind, kernel_stream_));
    PEGA_TRY(move_pieces(kernels_.gather, attached, slice, copies, at));
    if (hashed) PEGA_TRY(hash(attached, slice, slot, at));
    PEGA_TRY(order(slot.middle, kernel_stream_, copy_stream_));
    PEGA_TRY(
        check(*driver_,
              driver_->copy(Direction::kToHost, transfers.data(), transfers.size(), copy_stream_),
              "copy to the pool"));
    return check(*driver_, driver_->record(slot.done, copy_stream_), "record an event");
  }
  PEGA_TRY(wait_behind(range.behind, copy_stream_));
  PEGA_TRY(
      check(*driver_,
            driver_->copy(Direction::kToDevice, transfers.data(), transfers.size(), copy_stream_),
            "copy from the pool"));
  PEGA_TRY(order(slot.middle, copy_stream_, kernel_stream_));
  PEGA_TRY(move_pieces(kernels_.scatter, attached, slice, copies, at));
  if (hashed) {
    // The hash is of the content of the engine's memory, so it is gathered back from there.
    PEGA_TRY(move_pieces(kernels_.gather, attached, slice, copies, at));
    PEGA_TRY(hash(attached, slice, slot, at));
  }
  return check(*driver_, driver_->record(slot.done, kernel_stream_), "record an event");
}

Result<void> CopyStream::queue_direct(const Attached& attached, const Slice& slice,
                                      const Slot& slot, std::span<const Device::Copy> copies) {
  const std::vector<Transfer> transfers =
      attached.plan.direct_transfers(slice, copies, attached.pool.data());
  const Direction direction =
      options_.direction == Device::Direction::kSave ? Direction::kToHost : Direction::kToDevice;
  PEGA_TRY(check(*driver_,
                 driver_->copy(direction, transfers.data(), transfers.size(), copy_stream_),
                 "copy between GPU and pool"));
  return check(*driver_, driver_->record(slot.done, copy_stream_), "record an event");
}

Result<void> CopyStream::queue_pull(const Attached& attached, const Slice& slice, const Slot& slot,
                                    std::span<const Device::Copy> copies, const PeerMapping& peer) {
  const std::uint64_t first = slice.first_piece * sizeof(Piece);
  PullArguments arguments{.pieces = attached.pieces + first,
                          .peers_pieces = peer.pieces() + first,
                          .piece_count = slice.pieces,
                          .page_count = static_cast<std::uint32_t>(slice.copies),
                          .group = attached.plan.group(),
                          .blocks = {},
                          .peers_blocks = {}};
  for (std::size_t i = 0; i < slice.copies; ++i) {
    const Device::Copy& page = copies[slice.first_copy + i];
    arguments.blocks[i] = page.block;
    arguments.peers_blocks[i] = static_cast<std::uint32_t>(page.pool_offset);
  }
  const unsigned blocks = blocks_for(std::uint64_t{slice.pieces} * slice.copies,
                                     kThreads / arguments.group, options_.pull_blocks);
  PEGA_TRY(check(*driver_,
                 driver_->launch(kernels_.pull, blocks, kThreads, &arguments, kernel_stream_),
                 "start a kernel that copies another engine's pages"));
  return check(*driver_, driver_->record(slot.done, kernel_stream_), "record an event");
}

Result<void> CopyStream::move_pieces(Function kernel, const Attached& attached, const Slice& slice,
                                     std::span<const Device::Copy> copies, DeviceAddress at) {
  MoveArguments arguments{.pieces = attached.pieces + slice.first_piece * sizeof(Piece),
                          .staging = at,
                          .pitch = attached.plan.pitch(),
                          .origin = slice.origin,
                          .piece_count = slice.pieces,
                          .page_count = static_cast<std::uint32_t>(slice.copies),
                          .group = attached.plan.group(),
                          .blocks = {}};
  for (std::size_t i = 0; i < slice.copies; ++i) {
    arguments.blocks[i] = copies[slice.first_copy + i].block;
  }
  const unsigned blocks = blocks_for(std::uint64_t{slice.pieces} * slice.copies,
                                     kThreads / arguments.group, options_.kernel_blocks);
  return check(*driver_, driver_->launch(kernel, blocks, kThreads, &arguments, kernel_stream_),
               "start a kernel that moves pages");
}

Result<void> CopyStream::hash(const Attached& attached, const Slice& slice, const Slot& slot,
                              DeviceAddress at) {
  HashArguments arguments{.staging = at,
                          .pitch = attached.plan.pitch(),
                          .sums = sums_,
                          .hashes = slot.shared_on_device,
                          .page_bytes = slice.page_bytes,
                          .page_count = static_cast<std::uint32_t>(slice.copies)};
  if (const std::uint64_t sums = hash_blocks(slice.page_bytes) * slice.copies; sums != 0) {
    PEGA_TRY(check(
        *driver_,
        driver_->launch(kernels_.hash_sums, blocks_for(sums, kThreads / 32, options_.kernel_blocks),
                        kThreads, &arguments, kernel_stream_),
        "start a kernel that sums up pages"));
  }
  return check(
      *driver_,
      driver_->launch(kernels_.hash_chain, blocks_for(slice.copies, 1, options_.kernel_blocks),
                      kHashThreads, &arguments, kernel_stream_),
      "start a kernel that computes checksums");
}

Result<void> CopyStream::order(EventHandle event, Stream before, Stream after) {
  PEGA_TRY(check(*driver_, driver_->record(event, before), "record an event"));
  return check(*driver_, driver_->wait(after, event), "wait for an event");
}

Result<std::optional<CopyStream::Flight>> CopyStream::take_ended() {
  if (flights_.empty()) return std::nullopt;
  const InFlight oldest = flights_.front();
  const Slot& slot = slots_[oldest.slot];
  const Status status = driver_->query(slot.done);
  if (status == kNotReady) return std::nullopt;
  PEGA_TRY(check(*driver_, status, "copy pages"));
  flights_.pop_front();
  const TimePoint now = clock_.now();
  const auto bytes = static_cast<double>(oldest.slice.bytes());
  if (bytes >= kTellingBytes && now > oldest_since_ && !oldest.pulled) {
    const double rate = bytes / static_cast<double>((now - oldest_since_).count());
    bytes_per_nanosecond_ +=
        kNewest * (std::min(rate, kBytesPerNanosecond) - bytes_per_nanosecond_);
  }
  oldest_since_ = now;
  queued_bytes_ -= oldest.slice.bytes();
  if (oldest.staged) ring_.give_back();
  std::span<const std::uint64_t> hashes;
  if (oldest.hashed) {
    hashes = {reinterpret_cast<const std::uint64_t*>(slot.shared), oldest.slice.copies};
  }
  return Flight{oldest.ticket, oldest.slice, hashes};
}

void CopyStream::drain() {
  for (const Stream stream : {copy_stream_, kernel_stream_}) {
    // Either all of it has ended, or the device is broken and runs no work of this context.
    const Status status = driver_->synchronize(stream);
    if (status != kSuccess) kLog.debug("drained error=\"{}\"", driver_->describe(status));
  }
  while (!flights_.empty()) {
    if (flights_.front().staged) ring_.give_back();
    flights_.pop_front();
  }
  queued_bytes_ = 0;
}

}  // namespace pegaflow::cuda
