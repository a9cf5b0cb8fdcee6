#include "harness/sim_disks.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/assert.h"
#include "capnp/wire/rpc_error.h"
#include "engine/ssd/proof.h"

namespace pegaflow::harness {
namespace {

namespace ssd = engine::ssd;

/// The time of one read without a fault.
constexpr Duration kRead = std::chrono::microseconds(40);
constexpr kj::Duration kWriteDelay = 200 * kj::MICROSECONDS;
constexpr std::uint64_t kBatchBytes = std::uint64_t{64} << 10;
constexpr std::uint64_t kLife = 1;

kj::Duration to_kj(Duration time) { return time.count() * kj::NANOSECONDS; }

}  // namespace

struct SimDisks::DiskLease : Lease {
  ssd::Origin origin;
  std::vector<BlockKey> keys;
};

struct SimDisks::Reading {
  SharedRequest request;
  std::shared_ptr<DiskLease> lease;
  Block block;
  std::optional<cluster::SourceRate::Queued> queued;
  std::uint64_t number = 0;
  TimePoint since{};
  bool is_begun = false;
  bool is_given_up = false;
  bool is_over = false;
};

SimDisks::SimDisks(server::CacheService& service, std::span<std::byte> pool, kj::Timer& timer,
                   const Clock& clock, std::uint64_t seed, const Mistakes& mistakes)
    : service_(service),
      pool_(pool),
      timer_(timer),
      clock_(clock),
      mistakes_(mistakes),
      random_(seed),
      tasks_(*this) {
  service_.store().set_listener(this);
}

SimDisks::~SimDisks() noexcept { service_.store().set_listener(nullptr); }

bool SimDisks::chance(double probability) {
  return std::uniform_real_distribution<>(0, 1)(random_) < probability;
}

// ---- writes

void SimDisks::sealed(engine::FrameIndex frame, From from) {
  if (from != From::kEngine) return;
  unwritten_.push_back(frame);
  if (unwritten_.size() == 1) {
    tasks_.add(timer_.afterDelay(kWriteDelay).then([this]() { write(); }));
  }
}

void SimDisks::write() {
  for (const engine::FrameIndex frame : std::exchange(unwritten_, {})) {
    const auto stored = service_.stored(frame);
    if (!stored) continue;
    std::vector<std::byte> bytes;
    for (std::size_t i = 0; i < stored->offsets.size(); ++i) {
      const auto page = pool_.subspan(stored->offsets[i], stored->page_bytes[i]);
      bytes.insert(bytes.end(), page.begin(), page.end());
    }
    const ssd::Origin& origin = stored->origin;
    blocks_[{origin.name, origin.epoch.counter, origin.epoch.id, stored->key}] = std::move(bytes);
  }
}

// ---- finding

const std::vector<std::byte>* SimDisks::find(const ssd::Origin& origin, const BlockKey& key) const {
  if (mistakes_.drops_epoch) {
    for (const auto& [name, bytes] : blocks_) {
      if (std::get<0>(name) == origin.name && std::get<3>(name) == key) return &bytes;
    }
  }
  const auto found = blocks_.find({origin.name, origin.epoch.counter, origin.epoch.id, key});
  return found == blocks_.end() ? nullptr : &found->second;
}

kj::Promise<cluster::Source::Located> SimDisks::locate(const Bytes32& space,
                                                       std::span<const BlockKey> keys) {
  const auto origin = service_.origin_of(space);
  std::size_t blocks = 0;
  while (origin && blocks < keys.size()) {
    const bool is_here =
        blocks != 0 && service_.present_each(space, keys.subspan(blocks, 1)).front();
    if (!is_here && find(*origin, keys[blocks]) == nullptr) break;
    ++blocks;
  }
  if (blocks == 0) return Located{};
  return Located{.blocks = blocks, .rate = rate_, .batch_bytes = kBatchBytes, .all = owner_};
}

kj::Promise<std::vector<cluster::Source::Holding>> SimDisks::locate_prefixes(
    const Bytes32& /*space*/, std::span<const BlockKey> /*keys*/) {
  // The engines of a simulated cluster have one kind of blocks, for which none is asked for.
  return std::vector<Holding>();
}

kj::Promise<std::vector<cluster::Source::Holding>> SimDisks::locate_each(
    const Bytes32& /*space*/, std::span<const BlockKey> /*keys*/) {
  return std::vector<Holding>();
}

kj::Promise<cluster::Source::SharedLease> SimDisks::lease(SharedRequest request,
                                                          std::vector<BlockKey> keys,
                                                          Located located) {
  const auto origin = service_.origin_of(request->space);
  if (located.blocks == 0 || !origin) return SharedLease();
  auto lease = std::make_shared<DiskLease>();
  lease->origin = *origin;
  keys.resize(std::min(keys.size(), located.blocks));
  lease->keys = std::move(keys);
  lease->blocks = lease->keys.size();
  return SharedLease(std::move(lease));
}

// ---- reads

Duration SimDisks::some_time() {
  if (!chance(faults_.slow)) return kRead;
  const double part = std::uniform_real_distribution<>(0, 1)(random_);
  return kRead + Duration(static_cast<Duration::rep>(part * part * part *
                                                     static_cast<double>(faults_.slowest.count())));
}

void SimDisks::read(const SharedRequest& request, const SharedLease& lease,
                    std::vector<Block>&& blocks) {
  const auto granted = std::static_pointer_cast<DiskLease>(lease);
  for (Block& block : blocks) {
    auto reading = std::make_shared<Reading>();
    reading->request = request;
    reading->lease = granted;
    reading->queued.emplace(rate_, request->block_bytes());
    reading->number = ++last_read_;
    sink().queued({&block, 1}, *rate_, reading->queued->end());
    reading->block = std::move(block);
    const Duration left = std::max(Duration::zero(), request->deadline - clock_.now());
    tasks_.add(timer_.afterDelay(to_kj(left)).then([this, reading]() { give_up(reading); }));
    waiting_.push_back(std::move(reading));
  }
  if (!is_reading_) read_next();
}

void SimDisks::read_next() {
  is_reading_ = false;
  while (!waiting_.empty()) {
    const std::shared_ptr<Reading> next = std::move(waiting_.front());
    waiting_.pop_front();
    if (next->is_over) continue;
    std::vector<Block> one = {next->block};
    sink().remove_unwanted(one);
    if (one.empty()) {
      next->is_over = true;
      next->queued.reset();
      continue;
    }
    is_reading_ = true;
    next->is_begun = true;
    next->since = clock_.now();
    rate_->read_began(next->number, next->queued->bytes(), clock_.now());
    writing_.insert(next->block.offsets.begin(), next->block.offsets.end());
    tasks_.add(timer_.afterDelay(to_kj(some_time())).then([this, next]() {
      ended(next);
      read_next();
    }));
    return;
  }
}

/// The deadline of a request.
void SimDisks::give_up(const std::shared_ptr<Reading>& reading) {
  if (std::exchange(reading->is_given_up, true) || reading->is_over) return;
  const std::vector<Block> one = {reading->block};
  reading->queued.reset();
  if (reading->is_begun) {
    sink().given_up(one);
  } else {
    reading->is_over = true;
    sink().rejected(one);
  }
  sink().progressed();
}

void SimDisks::ended(const std::shared_ptr<Reading>& reading) {
  reading->is_over = true;
  rate_->read_ended(reading->number);
  const ssd::Origin& origin = reading->lease->origin;
  const BlockKey& key = reading->lease->keys[reading->block.leased];
  const std::vector<std::byte>* const bytes = find(origin, key);
  const bool is_good = bytes != nullptr && !chance(faults_.failed);
  // What arrives late or fails may have been written, too.
  std::size_t from = 0;
  for (std::size_t shard = 0; shard < reading->block.offsets.size(); ++shard) {
    const std::size_t size = reading->request->page_bytes[shard];
    if (bytes != nullptr) {
      std::memcpy(pool_.data() + reading->block.offsets[shard], bytes->data() + from,
                  is_good ? size : size / 2);
    }
    from += size;
    writing_.erase(reading->block.offsets[shard]);
  }
  std::vector<Block> one = {reading->block};
  if (reading->is_given_up) {
    sink().quiesced(one);
  } else if (!is_good) {
    reading->queued.reset();
    sink().failed(reading->request, std::move(one));
  } else {
    reading->queued.reset();
    rate_->arrived(from, reading->since, clock_.now());
    const std::vector<std::uint64_t> checksums(reading->block.offsets.size());
    one[0].proven = ssd::Proven::prove(origin, key, kLife, checksums,
                                       ssd::proof_of(origin, key, kLife, checksums));
    tasks_.add(sink().arrived(reading->request, reading->lease, std::move(one)));
  }
  sink().progressed();
}

void SimDisks::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "a simulated disk failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::harness
