#include "server/ssd/ssd_source.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "capnp/wire/kj_time.h"
#include "capnp/wire/rpc_error.h"

namespace pegaflow::server {
namespace {

namespace ssd = engine::ssd;

/// Bytes of one batch: what is read before unwanted blocks are removed again.
constexpr std::uint64_t kBatchBytes = std::uint64_t{8} << 20;
/// Bytes that are passed to the disks at once; more would only wait in their queues.
constexpr std::uint64_t kReadBytes = std::uint64_t{16} << 20;
/// The longest prefix of one lookup, as lookups between nodes have it.
constexpr std::size_t kGroup = 64;

}  // namespace

struct SsdSource::DiskOwner : Owners {};
struct SsdSource::DiskLease : Lease {
  ssd::Origin origin;
  std::vector<BlockKey> keys;
};

/// Blocks that wait for their turn.
struct SsdSource::Batch {
  SharedRequest request;
  std::shared_ptr<DiskLease> lease;
  std::vector<Block> blocks;
  std::shared_ptr<cluster::SourceRate::Queued> queued;
};

/// A block that is being read.
struct SsdSource::Reading {
  SharedRequest request;
  std::shared_ptr<DiskLease> lease;
  Block block;
  SsdDisk* disk = nullptr;
  std::shared_ptr<cluster::SourceRate::Queued> queued;  ///< Its batch's.
  std::uint64_t bytes = 0;
  TimePoint since{};
  bool is_given_up = false;
};

SsdSource::SsdSource(SsdDisks& disks, CacheService& service, std::span<std::byte> pool,
                     kj::Timer& timer, const Clock& clock)
    : disks_(disks),
      service_(service),
      pool_(pool),
      timer_(timer),
      clock_(clock),
      rate_(std::make_shared<cluster::SourceRate>()),
      owner_(std::make_shared<DiskOwner>()),
      tasks_(*this) {}

SsdSource::~SsdSource() noexcept(false) = default;

bool SsdSource::is_ours(const Owners& owners) {
  return dynamic_cast<const DiskOwner*>(&owners) != nullptr;
}
bool SsdSource::is_ours(const Lease& lease) {
  return dynamic_cast<const DiskLease*>(&lease) != nullptr;
}

SsdSource::Stats SsdSource::stats() const {
  return {.reads_in_flight = reading_.size(),
          .given_up = given_up_,
          .bytes_per_second = rate_->bytes_per_second(),
          .queued_bytes = rate_->queued_bytes()};
}

// ---- finding

bool SsdSource::is_ready() const { return disks_.may_read(); }

/// The blocks of `keys` that are on a disk or in the pool, up to the first that is on neither; 0
/// unless the first is on a disk.
std::size_t SsdSource::prefix(const Bytes32& space, std::span<const BlockKey> keys) const {
  const auto origin = service_.origin_of(space);
  if (!origin || keys.empty()) return 0;
  if (disks_.having(*origin, keys.front()) == nullptr) {
    if (disks_.hide(*origin, keys.front())) service_.note_disk_failed(*origin, keys.front());
    return 0;
  }
  std::vector<bool> in_pool;
  std::size_t group = keys.size();  // Whose blocks `in_pool` describes.
  for (std::size_t i = 1; i < keys.size(); ++i) {
    if (disks_.having(*origin, keys[i]) != nullptr) continue;
    if (group != i / kGroup) {
      group = i / kGroup;
      const std::size_t first = group * kGroup;
      in_pool =
          service_.present_each(space, keys.subspan(first, std::min(kGroup, keys.size() - first)));
    }
    if (in_pool[i % kGroup]) continue;
    if (disks_.hide(*origin, keys[i])) service_.note_disk_failed(*origin, keys[i]);
    return i;
  }
  return keys.size();
}

cluster::Source::Located SsdSource::located(std::size_t blocks) {
  if (blocks == 0) return {};
  return {.blocks = blocks, .rate = rate_, .batch_bytes = kBatchBytes, .all = owner_};
}

kj::Promise<cluster::Source::Located> SsdSource::locate(const Bytes32& space,
                                                        std::span<const BlockKey> keys) {
  return located(prefix(space, keys));
}

kj::Promise<std::vector<cluster::Source::Holding>> SsdSource::locate_prefixes(
    const Bytes32& space, std::span<const BlockKey> keys) {
  std::vector<Holding> found;
  if (const std::size_t blocks = prefix(space, keys); blocks != 0) {
    std::vector<bool> has(keys.size());
    std::fill_n(has.begin(), blocks, true);
    found.push_back(
        {.rate = rate_, .batch_bytes = kBatchBytes, .has = std::move(has), .all = owner_});
  }
  return found;
}

kj::Promise<std::vector<cluster::Source::Holding>> SsdSource::locate_each(
    const Bytes32& space, std::span<const BlockKey> keys) {
  std::vector<Holding> found;
  const auto origin = service_.origin_of(space);
  if (!origin) return found;
  std::vector<bool> has(keys.size());
  bool has_any = false;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    has[i] = disks_.having(*origin, keys[i]) != nullptr;
    has_any = has_any || has[i];
  }
  if (has_any) {
    found.push_back(
        {.rate = rate_, .batch_bytes = kBatchBytes, .has = std::move(has), .all = owner_});
  }
  return found;
}

kj::Promise<cluster::Source::SharedLease> SsdSource::lease(SharedRequest request,
                                                           std::vector<BlockKey> keys,
                                                           Located located) {
  const auto origin = service_.origin_of(request->space);
  const auto& failed = request->failed;
  if (located.blocks == 0 || !origin ||
      std::find(failed.begin(), failed.end(), rate_.get()) != failed.end()) {
    return SharedLease();
  }
  auto lease = std::make_shared<DiskLease>();
  lease->origin = *origin;
  keys.resize(std::min(keys.size(), located.blocks));
  lease->keys = std::move(keys);
  lease->blocks = lease->keys.size();
  lease->checksums.resize(lease->blocks * request->shards());
  return SharedLease(std::move(lease));
}

void SsdSource::end(const SharedLease& /*lease*/) {}

// ---- reading

void SsdSource::read(const SharedRequest& request, const SharedLease& lease,
                     std::vector<Block>&& blocks) {
  const auto granted = std::static_pointer_cast<DiskLease>(lease);
  const std::uint64_t block_bytes = std::max<std::uint64_t>(1, request->block_bytes());
  const std::size_t step = std::max<std::size_t>(1, kBatchBytes / block_bytes);
  if (request->reserved) request->reserved->queued(blocks.size() * block_bytes);
  for (std::size_t from = 0; from < blocks.size(); from += step) {
    const std::size_t count = std::min(blocks.size() - from, step);
    const std::span<Block> part = std::span(blocks).subspan(from, count);
    auto batch = std::make_unique<Batch>();
    batch->request = request;
    batch->lease = granted;
    batch->queued = std::make_shared<cluster::SourceRate::Queued>(rate_, count * block_bytes);
    sink().queued(part, *rate_, batch->queued->end());
    batch->blocks.assign(std::make_move_iterator(part.begin()),
                         std::make_move_iterator(part.end()));
    waiting_.push_back(std::move(batch));
  }
  const Duration left = std::max(Duration::zero(), request->deadline - clock_.now());
  tasks_.add(timer_.afterDelay(to_kj(left)).then([this, request]() { expire(request); }));
  submit_some();
}

void SsdSource::submit_some() {
  if (is_submitting_) return;
  is_submitting_ = true;
  while (!waiting_.empty() && reading_bytes_ < kReadBytes) {
    const std::unique_ptr<Batch> next = std::move(waiting_.front());
    waiting_.pop_front();
    sink().remove_unwanted(next->blocks);
    if (next->request->deadline <= clock_.now()) {
      if (!next->blocks.empty()) sink().rejected(next->blocks);
      continue;
    }
    std::vector<Block> blocks = std::move(next->blocks);
    for (Block& block : blocks) submit(*next, std::move(block));
  }
  is_submitting_ = false;
}

/// Passes one block to the disk that has it.
void SsdSource::submit(const Batch& batch, Block block) {
  const Request& request = *batch.request;
  SsdDisk::Block wanted{.origin = batch.lease->origin, .key = batch.lease->keys[block.leased]};
  for (std::size_t shard = 0; shard < request.shards(); ++shard) {
    const std::uint64_t bytes = request.page_bytes[shard];
    if (bytes == 0) continue;  // The shard has no page of this kind.
    wanted.add(pool_, block.offsets[shard], bytes);
  }
  const std::uint64_t number = ++last_number_;
  const std::uint64_t bytes = wanted.bytes();
  SsdDisk* const disk = disks_.having(wanted.origin, wanted.key);
  const bool is_begun =
      disk != nullptr && disk->read(std::move(wanted), [this, number](SsdDisk::Loaded&& loaded) {
        ended(number, std::move(loaded));
      });
  if (!is_begun) {
    // Its segment was used again since it was located, or the disk failed meanwhile.
    std::vector<Block> lost;
    lost.push_back(std::move(block));
    sink().failed(batch.request, std::move(lost));
    return;
  }
  auto reading = std::make_unique<Reading>(Reading{.request = batch.request,
                                                   .lease = batch.lease,
                                                   .block = std::move(block),
                                                   .disk = disk,
                                                   .queued = batch.queued,
                                                   .bytes = bytes,
                                                   .since = clock_.now()});
  rate_->read_began(number, bytes, clock_.now());
  reading_bytes_ += bytes;
  reading_.emplace(number, std::move(reading));
}

void SsdSource::ended(std::uint64_t number, SsdDisk::Loaded&& loaded) {
  const auto found = reading_.find(number);
  const std::unique_ptr<Reading> reading = std::move(found->second);
  reading_.erase(found);
  if (reading->is_given_up) {
    reading->disk->late_read_ended();
  } else {
    reading_bytes_ -= reading->bytes;
    rate_->read_ended(number);
  }
  std::vector<Block> blocks;
  blocks.push_back(std::move(reading->block));
  if (loaded.proven) rate_->arrived(reading->bytes, reading->since, clock_.now());
  if (!loaded.proven) {
    service_.note_disk_failed(reading->lease->origin, reading->lease->keys[blocks[0].leased]);
  }
  if (reading->is_given_up) {
    sink().quiesced(blocks);
  } else if (!loaded.proven) {
    sink().failed(reading->request, std::move(blocks));
  } else {
    const Request& request = *reading->request;
    std::size_t page = 0;
    for (std::size_t shard = 0; shard < request.shards(); ++shard) {
      if (request.page_bytes[shard] == 0 || loaded.checksums.empty()) continue;
      reading->lease->checksums[blocks[0].leased * request.shards() + shard] =
          loaded.checksums[page++];
    }
    blocks[0].proven = loaded.proven;
    tasks_.add(sink().arrived(reading->request, reading->lease, std::move(blocks)));
  }
  submit_some();
  sink().progressed();
}

/// The deadline of a request: what has not arrived is given up.
void SsdSource::expire(const SharedRequest& request) {
  std::vector<Block> unread;
  for (auto batch = waiting_.begin(); batch != waiting_.end();) {
    if ((*batch)->request != request) {
      ++batch;
      continue;
    }
    for (Block& block : (*batch)->blocks) unread.push_back(std::move(block));
    batch = waiting_.erase(batch);
  }
  if (!unread.empty()) sink().rejected(unread);
  std::vector<Block> late;
  for (auto& [number, reading] : reading_) {
    if (reading->request != request || reading->is_given_up) continue;
    reading->is_given_up = true;
    late.push_back(reading->block);
    // A disk that hangs holds up neither the others nor what is predicted of them.
    reading->disk->read_is_late();
    reading_bytes_ -= reading->bytes;
    rate_->read_ended(number);
  }
  given_up_ += late.size();
  if (!late.empty()) {
    sink().given_up(late);
    submit_some();
    sink().progressed();
  }
}

void SsdSource::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "a read from a disk failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
