#include "server/http/router_requests.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "capnp/wire/kj_time.h"
#include "capnp/wire/rpc_error.h"
#include "server/cache/cache_service.h"
#include "server/prefetch/prefetches.h"

namespace pegaflow::server {
namespace {

/// How often requests that wait are looked through for those that have waited enough.
constexpr kj::Duration kExpireInterval = 1 * kj::SECONDS;

RouterRefusal refusal(const Error& error) {
  const unsigned status = error.code == Errc::kGone              ? 404
                          : error.code == Errc::kInvalidArgument ? 400
                                                                 : 503;
  return {.status = status, .why = error.detail};
}

BlocksAnswer about(const CacheService::Indexed& kind, const Id128& server,
                   const RouterQuery& query) {
  return {.server = server,
          .generation = static_cast<std::uint64_t>(kind.wants.generation),
          .kind = kind.kind,
          .block_tokens = kind.block_tokens,
          .keys = query.keys,
          .has_chains = query.wants_chains,
          .chains = {.position = query.chain_position}};
}

}  // namespace

RouterRequests::RouterRequests(CacheService& service, Prefetches& prefetches, kj::Timer& timer,
                               std::function<std::optional<NodesReport>()> nodes, Answer answer,
                               const Options& options)
    : service_(service),
      prefetches_(prefetches),
      timer_(timer),
      nodes_(std::move(nodes)),
      answer_(std::move(answer)),
      options_(options),
      tasks_(*this) {}

RouterRequests::~RouterRequests() noexcept(false) {
  service_.store().on_next_entry(nullptr);
  service_.chains().on_next(nullptr);
}

void RouterRequests::take(std::uint64_t ticket, const RouterQuery& query) {
  switch (query.kind) {
    case RouterQuery::Kind::kJournal:
      return read_journal(ticket, query);
    case RouterQuery::Kind::kBlocks:
      return list_blocks(ticket, query);
    case RouterQuery::Kind::kLinks:
      return answer_(ticket, links());
    case RouterQuery::Kind::kPrefetch:
      return start_prefetch(ticket, query);
    case RouterQuery::Kind::kCancelPrefetch:
      prefetches_.cancel(query.prefetch.id);
      return answer_(ticket, Accepted{});
  }
}

// ---- the journal

std::optional<AdminAnswer> RouterRequests::changes(RouterQuery& query) const {
  const auto kind = service_.indexed(query.space, query.block_kind);
  if (!kind) return refusal(kind.error());
  BlocksAnswer answer = about(*kind, options_.server, query);
  auto part = service_.store().journal(kind->wants.generation, query.position, kMostEntries);
  const bool is_first = query.position == engine::BlockStore::kJournalEnd;
  answer.has_lost = !is_first && (part.has_lost ||
                                  (query.generation != 0 && query.generation != answer.generation));
  answer.position = query.position = part.next;
  answer.has_more = part.has_more;
  // A reader that has lost entries starts anew with a list: these would be of no use.
  if (!answer.has_lost) answer.entries = std::move(part.entries);
  if (answer.has_lost) answer.position = query.position = service_.store().journal_end();
  if (query.wants_chains) {
    answer.chains = service_.chains().read(query.space, query.chain_position, kMostChainBytes);
    query.chain_position = answer.chains.position;
    answer.has_more = answer.has_more || answer.chains.has_more;
  }
  const bool has_news = is_first || answer.has_lost || answer.has_more || !answer.entries.empty() ||
                        !answer.chains.chains.empty();
  if (!has_news) return std::nullopt;
  return answer;
}

void RouterRequests::read_journal(std::uint64_t ticket, RouterQuery query) {
  if (const auto kept = service_.store().keep_journal(); !kept) {
    return answer_(ticket, refusal(kept.error()));
  }
  if (auto now = changes(query)) return answer_(ticket, std::move(*now));
  if (waiting_.size() >= options_.most_readers) {
    return answer_(ticket, RouterRefusal{503, "too many requests wait for the journal"});
  }
  waiting_.push_back({.ticket = ticket,
                      .query = std::move(query),
                      .until = timer_.now() + to_kj(options_.patience)});
  watch();
  if (!std::exchange(is_expiring_, true)) tasks_.add(expire_waiting());
}

/// Answers those that wait some time after the next change.
void RouterRequests::watch() {
  if (std::exchange(is_watching_, true)) return;
  auto changed = kj::newPromiseAndFulfiller<void>();
  // The store keeps the function, and not the promise.
  const auto wake =
      std::make_shared<kj::Own<kj::PromiseFulfiller<void>>>(kj::mv(changed.fulfiller));
  service_.store().on_next_entry([wake]() { (*wake)->fulfill(); });
  service_.chains().on_next([wake]() { (*wake)->fulfill(); });
  tasks_.add(changed.promise.then([this]() { return timer_.afterDelay(to_kj(options_.collect)); })
                 .then([this]() {
                   is_watching_ = false;
                   answer_waiting();
                   if (!waiting_.empty()) watch();
                 }));
}

void RouterRequests::answer_waiting() {
  for (auto each = waiting_.begin(); each != waiting_.end();) {
    auto now = changes(each->query);
    if (!now) {
      ++each;
      continue;
    }
    answer_(each->ticket, std::move(*now));
    each = waiting_.erase(each);
  }
}

kj::Promise<void> RouterRequests::expire_waiting() {
  return timer_.afterDelay(kExpireInterval).then([this]() -> kj::Promise<void> {
    for (auto each = waiting_.begin(); each != waiting_.end();) {
      if (each->until > timer_.now()) {
        ++each;
        continue;
      }
      const auto kind = service_.indexed(each->query.space, each->query.block_kind);
      if (kind) {
        BlocksAnswer empty = about(*kind, options_.server, each->query);
        empty.position = each->query.position;
        answer_(each->ticket, std::move(empty));
      } else {
        answer_(each->ticket, refusal(kind.error()));
      }
      each = waiting_.erase(each);
    }
    is_expiring_ = !waiting_.empty();
    if (!is_expiring_) return kj::READY_NOW;
    return expire_waiting();
  });
}

// ---- lists, links and prefetches

void RouterRequests::list_blocks(std::uint64_t ticket, const RouterQuery& query) {
  const auto kind = service_.indexed(query.space, query.block_kind);
  if (!kind) return answer_(ticket, refusal(kind.error()));
  // From before the first part: the journal has what changes meanwhile.
  if (const auto kept = service_.store().keep_journal(); !kept) {
    return answer_(ticket, refusal(kept.error()));
  }
  BlocksAnswer answer = about(*kind, options_.server, query);
  answer.is_list = true;
  answer.position = service_.store().journal_end();
  // A list of blocks of a former generation is of no use.
  answer.has_lost = query.generation != 0 && query.generation != answer.generation;
  if (answer.has_lost) return answer_(ticket, std::move(answer));
  const auto listed = service_.store().list(kind->wants.generation, query.cursor, kMostEntries);
  answer.has_more = listed.next != engine::kNoFrame;
  answer.cursor = answer.has_more ? listed.next : 0;
  answer.entries.reserve(listed.keys.size());
  for (const BlockKey& key : listed.keys)
    answer.entries.push_back({.key = key, .is_present = true});
  answer_(ticket, std::move(answer));
}

LinksAnswer RouterRequests::links() const {
  LinksAnswer answer{.server = options_.server, .nodes = nodes_()};
  answer.has_disks = options_.has_disks && options_.has_disks();
  for (InstanceInfo& instance : service_.instances()) {
    LinksAnswer::Engine& engine = answer.engines.emplace_back();
    if (const auto kind = service_.indexed(instance.namespace_hash, std::nullopt)) {
      engine.block_bytes = kind->wants.block_bytes();
      engine.block_tokens = kind->block_tokens;
    }
    engine.instance = std::move(instance);
  }
  return answer;
}

void RouterRequests::start_prefetch(std::uint64_t ticket, const RouterQuery& query) {
  const auto kind = service_.indexed(query.space, query.block_kind);
  if (!kind) return answer_(ticket, refusal(kind.error()));
  prefetches_.start(kind->wants, query.prefetch);
  answer_(ticket, Accepted{});
}

void RouterRequests::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "a request of a router failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
