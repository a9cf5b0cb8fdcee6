#include "server/ssd/ssd_tier.h"

#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/kj_time.h"
#include "capnp/wire/rpc_error.h"
#include "server/ssd/all_done.h"

namespace pegaflow::server {
namespace {

namespace ssd = engine::ssd;

constexpr Log kLog{"ssd"};
constexpr Duration kTick = std::chrono::seconds(1);

}  // namespace

SsdTier::SsdTier(std::unique_ptr<SsdDisks> disks, CacheService& service, std::span<std::byte> pool,
                 kj::Timer& timer, const Clock& clock, const Options& options,
                 std::function<void()> changed)
    : disks_(std::move(disks)),
      service_(service),
      timer_(timer),
      clock_(clock),
      waits_for_nodes_(options.waits_for_nodes),
      changed_(std::move(changed)),
      source_(*disks_, service, pool, timer, clock),
      writer_(*disks_, service, pool,
              {.budget_per_day = options.write_budget, .ahead = options.write_ahead}, timer, clock),
      tasks_(*this) {
  for (const auto& disk : disks_->all()) {
    for (const ssd::NameRecord& each : disk->names()) {
      service_.epochs().learn(each.origin.name, Epoch{.counter = each.origin.epoch.counter,
                                                      .id = each.origin.epoch.id});
    }
    disk->serve_recovered(!waits_for_nodes_);
    disk->start_scan();
  }
  if (waits_for_nodes_) {
    kLog.info("blocks of earlier processes wait until epochs are exchanged with all peers");
  }
  tasks_.add(tick());
}

/// The disks end first: every read and write that is in flight reports to source and writer.
SsdTier::~SsdTier() noexcept(false) { disks_->close(); }

void SsdTier::read_completions() { disks_->read_completions(); }

/// Once a second: tables, names, blocks that could not be written, resets learned meanwhile.
kj::Promise<void> SsdTier::tick() {
  return timer_.afterDelay(to_kj(kTick)).then([this]() {
    std::vector<SsdDisk::State> states;
    for (const auto& disk : disks_->all()) {
      disk->poll();
      states.push_back(disk->state());
    }
    writer_.poll();
    if (states != reported_ || disks_->is_scanning()) changed_();
    reported_ = std::move(states);
    tasks_.add(record_epochs().ignoreResult());
    return tick();
  });
}

void SsdTier::confirm_epochs() {
  if (!std::exchange(waits_for_nodes_, false)) return;
  for (const auto& disk : disks_->all()) disk->serve_recovered(true);
  kLog.info("epochs were exchanged with all peers, blocks of earlier processes are served");
}

kj::Promise<bool> SsdTier::record_epochs() {
  auto pair = kj::newPromiseAndFulfiller<bool>();
  auto fulfiller = std::make_shared<kj::Own<kj::PromiseFulfiller<bool>>>(kj::mv(pair.fulfiller));
  AllDone all([fulfiller](bool is_good) { (*fulfiller)->fulfill(bool(is_good)); });
  for (const auto& disk : disks_->all()) {
    // A reset changes the records.
    const std::vector<ssd::NameRecord> records = disk->names();
    for (const ssd::NameRecord& each : records) {
      const Epoch known = service_.epochs().of(each.origin.name);
      const ssd::Epoch epoch{.counter = known.counter, .id = known.id};
      if (epoch < each.origin.epoch) continue;
      // Equal ones too: their record may still be in flight.
      disk->reset(each.origin.name, epoch, all.begin());
    }
  }
  all.close();
  return kj::mv(pair.promise);
}

void SsdTier::drop_all(std::function<void(std::uint64_t, bool)> done) {
  std::uint64_t blocks = 0;
  for (const auto& disk : disks_->all()) blocks += disk->stats().blocks;
  AllDone all([done = std::move(done), blocks](bool is_good) { done(blocks, is_good); });
  for (const auto& disk : disks_->all()) disk->drop_all(all.begin());
  all.close();
}

kj::Promise<void> SsdTier::drain(Duration patience) {
  auto written = kj::newPromiseAndFulfiller<void>();
  auto fulfiller = std::make_shared<kj::Own<kj::PromiseFulfiller<void>>>(kj::mv(written.fulfiller));
  writer_.drain([fulfiller]() { (*fulfiller)->fulfill(); });
  kLog.info("writing the pool to the disks blocks={}", writer_.left_to_drain());
  const TimePoint began = clock_.now();
  return written.promise.exclusiveJoin(timer_.afterDelay(to_kj(patience))).then([this, began]() {
    const double seconds = std::chrono::duration<double>(clock_.now() - began).count();
    kLog.info("the pool was written to the disks seconds={:.3f} blocks_left={}", seconds,
              writer_.left_to_drain());
    kj::Vector<kj::Promise<void>> syncs;
    for (const auto& disk : disks_->all()) {
      auto synced = kj::newPromiseAndFulfiller<void>();
      auto done = std::make_shared<kj::Own<kj::PromiseFulfiller<void>>>(kj::mv(synced.fulfiller));
      disk->sync([done]() { (*done)->fulfill(); });
      syncs.add(kj::mv(synced.promise));
    }
    // A disk that hangs must not keep the server.
    return kj::joinPromises(syncs.releaseAsArray())
        .exclusiveJoin(timer_.afterDelay(2 * kj::SECONDS));
  });
}

SsdReport SsdTier::report() const {
  SsdReport report;
  for (const auto& disk : disks_->all()) {
    const SsdDisk::Stats stats = disk->stats();
    const Disk::Attributes& is = disk->attributes();
    const Disk::Stats io = disk->disk_stats();
    report.disks.push_back(
        {.path = is.path,
         .state = std::string(to_string(stats.state)),
         .backend = is.backend,
         .backend_reason = is.reason,
         .direct = is.direct,
         .is_breaker_open = stats.is_breaker_open,
         .is_slow = stats.is_slow,
         .index_limit_bytes = stats.index_limit_bytes,
         .capacity_bytes = stats.capacity_bytes,
         .segments = stats.segments,
         .free_segments = stats.free_segments,
         .scanned_segments = stats.scanned_segments,
         .blocks = stats.blocks,
         .index_bytes = stats.index_bytes,
         .recovered_blocks = stats.recovered_blocks,
         .scan_seconds = stats.scan_seconds,
         .read_bytes = stats.read_bytes,
         .read_blocks = stats.read_blocks,
         .read_seconds = stats.read_seconds,
         .written_bytes = stats.written_bytes,
         .written_blocks = stats.written_blocks,
         .table_bytes = stats.table_bytes,
         .reclaimed_blocks = stats.reclaimed_blocks,
         .proof_failures = stats.proof_failures,
         .read_errors = stats.read_errors,
         .write_errors = stats.write_errors,
         .damaged_blocks = stats.damaged_blocks,
         .bytes_in_flight = io.reads.bytes_in_flight + io.writes.bytes_in_flight});
  }
  const SsdSource::Stats reads = source_.stats();
  const SsdWriter::Stats& writes = writer_.stats();
  report.waits_for_nodes = waits_for_nodes_;
  report.reads_in_flight = reads.reads_in_flight;
  report.late_blocks = reads.given_up;
  report.evicted_unwritten = writes.evicted_unwritten;
  report.rejected_budget = writes.rejected_budget;
  report.rejected_too_large = writes.rejected_too_large;
  report.failed_writes = writes.failed;
  report.forgotten_writes = writes.forgotten;
  report.renewed_blocks = writes.renewed;
  return report;
}

void SsdTier::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "the SSD tier failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
