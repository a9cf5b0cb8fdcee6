#include "server/http/admin.h"

#include <cstring>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/page_layout.h"
#include "capnp/wire/rpc_error.h"
#include "server/direct/direct_reads.h"
#include "server/prefetch/prefetches.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"admin"};

}  // namespace

Admin::Admin(CacheService& service, Background& background, kj::Timer& timer, const Clock& clock,
             const RpcCounters& counters, const engine::Pool& pool,
             std::function<std::optional<NodesReport>()> nodes,
             std::function<std::optional<SsdReport>()> ssd,
             std::function<std::optional<KeptReport>()> kept, CleanDisks clean_disks,
             Prefetches& prefetches, const DirectReads& direct, const Id128& server,
             HttpServer& http, Mailbox<AdminQuestion>& questions)
    : service_(service),
      background_(background),
      timer_(timer),
      clock_(clock),
      counters_(counters),
      pool_(pool),
      nodes_(std::move(nodes)),
      ssd_(std::move(ssd)),
      kept_(std::move(kept)),
      clean_disks_(std::move(clean_disks)),
      prefetches_(prefetches),
      direct_(direct),
      http_(http),
      questions_(questions),
      routers_(service, prefetches, timer, nodes_,
               [this](std::uint64_t ticket, AdminAnswer told) { answer(ticket, std::move(told)); },
               {.server = server,
                .most_readers = HttpServer::kReaders,
                .has_disks = [this]() { return ssd_().has_value(); }}),
      tasks_(*this) {}

void Admin::read() {
  questions_.drain([this](AdminQuestion&& question) { take(question); });
}

void Admin::take(const AdminQuestion& question) {
  switch (question.kind) {
    case AdminQuestion::Kind::kMetrics:
      answer(question.ticket, snapshot());
      break;
    case AdminQuestion::Kind::kInstances:
      answer(question.ticket, instances());
      break;
    case AdminQuestion::Kind::kCleanup:
      start_cleanup(question.ticket);
      break;
    case AdminQuestion::Kind::kSsdCleanup:
      clean_disks_([this, ticket = question.ticket](const SsdCleanupReport& report) {
        if (report.has_disks) {
          kLog.info("cleaned up the disks dropped_blocks={} durable={}", report.dropped_blocks,
                    report.is_durable);
        }
        answer(ticket, report);
      });
      break;
    case AdminQuestion::Kind::kOverwriteBlock:
      answer(question.ticket, overwrite(question.argument));
      break;
    case AdminQuestion::Kind::kRouter:
      routers_.take(question.ticket, question.router);
      break;
  }
}

void Admin::answer(std::uint64_t ticket, AdminAnswer answer) {
  HttpNews news;
  news.ticket = ticket;
  news.answer = std::move(answer);
  const bool sent = http_.publish(std::move(news));
  PEGA_ASSERT(sent, "the place of answer {} was reserved", ticket);
}

std::vector<InstanceInfo> Admin::instances() const {
  std::vector<InstanceInfo> list = service_.instances();
  for (InstanceInfo& instance : list) {
    for (RankInfo& rank : instance.ranks) {
      const OfferedMemory* const memory = direct_.offers().memory_of(rank.connection);
      if (memory == nullptr) continue;
      rank.direct = {.group = memory->group,
                     .lane = memory->is_on_gpu() ? "cuda" : "process_vm_readv",
                     .network = memory->network ? memory->network->fabric.backend : ""};
    }
  }
  return list;
}

Snapshot Admin::snapshot() const {
  Snapshot now;
  now.cache = service_.stats();
  now.rpc = counters_;
  now.pool_bytes = pool_.size_bytes();
  now.pool_page_bytes = pool_.page_bytes();
  now.pool_huge_bytes = pool_.huge_bytes();
  if (const auto oldest = now.cache.store.oldest_pin) {
    now.oldest_pin_seconds = std::chrono::duration<double>(clock_.now() - *oldest).count();
  }
  if (const auto oldest = now.cache.store.oldest_lease) {
    now.oldest_lease_seconds = std::chrono::duration<double>(clock_.now() - *oldest).count();
  }
  now.nodes = nodes_();
  now.ssd = ssd_();
  now.kept = kept_();
  now.prefetches = prefetches_.stats();
  now.direct = direct_.stats();
  now.journal_readers = routers_.readers();
  now.chains = service_.chains().stats();
  return now;
}

void Admin::start_cleanup(std::uint64_t ticket) {
  service_.store().start_cleanup();
  background_.poke();
  cleaning_for_.push_back(ticket);
  if (cleaning_for_.size() == 1) tasks_.add(await_cleanup());
}

kj::Promise<void> Admin::await_cleanup() {
  const engine::BlockStore::Cleanup& cleanup = service_.store().cleanup();
  if (!cleanup.done) return next_turn(timer_).then([this]() { return await_cleanup(); });
  kLog.info("cleaned up evicted_blocks={} still_referenced_blocks={}", cleanup.evicted_blocks,
            cleanup.still_referenced_blocks);
  for (const std::uint64_t ticket : std::exchange(cleaning_for_, {})) {
    answer(ticket, CleanupReport{.evicted_blocks = cleanup.evicted_blocks,
                                 .evicted_bytes = cleanup.evicted_bytes,
                                 .still_referenced_blocks = cleanup.still_referenced_blocks});
  }
  return kj::READY_NOW;
}

OverwriteReport Admin::overwrite(std::uint64_t recent) const {
  OverwriteReport report;
  const auto frame = service_.store().recent_frame(recent);
  if (!frame) return report;
  // The first shard: one wrong page makes the block wrong.
  report.found = true;
  const std::uint64_t offset = service_.store().page_offset(*frame, 0);
  report.slot = offset / kSlotAlignment;
  report.bytes = service_.store().page_bytes(*frame, 0);
  const auto page = pool_.bytes().subspan(offset, report.bytes);
  std::memset(page.data(), 0xA5, page.size());
  kLog.warn("test switch: a block was overwritten slot={} bytes={}", report.slot, report.bytes);
  return report;
}

void Admin::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "a task of Admin failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
