#include "router/kv/kv_fleet.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "router/http/log.h"

namespace pegaflow::router {

namespace {

/// Blocks of one call of the index.
constexpr std::size_t kSlice = 2048;

}  // namespace

KvFleet::KvFleet(index::BlockIndex& blocks, index::Placement& placement,
                 index::ExpectedBlocks& expected, KvLessons& lessons, KvTokens& tokens,
                 KvStreams streams)
    : blocks_(blocks),
      placement_(placement),
      expected_(expected),
      lessons_(lessons),
      tokens_(tokens),
      streams_(std::move(streams)) {}

bool KvFleet::add_rank(Entry& entry, std::uint64_t engine, std::uint32_t number) {
  const auto holder = blocks_.add_engine();
  if (!holder) {
    ++stats_.refused;
    entry.sources_error = holder.error().detail;
    return false;
  }
  const auto place = placement_.add_engine({.decodes = entry.decodes});
  if (!place) {
    blocks_.remove(*holder);
    ++stats_.refused;
    entry.sources_error = place.error().detail;
    return false;
  }
  auto rank = std::make_unique<Rank>();
  rank->engine = engine;
  rank->number = number;
  rank->url = entry.url;
  rank->holder = *holder;
  rank->place = *place;
  entry.ranks.push_back(std::move(rank));
  ++version_;
  return true;
}

void KvFleet::remove_rank(Rank& rank) {
  ++version_;
  if (rank.stream != 0) {
    streams_.remove(rank.stream);
    by_stream_.erase(rank.stream);
  }
  expected_.forget(rank.place);
  placement_.remove_engine(rank.place);
  blocks_.remove(rank.holder);
  if (watch_.forgotten) watch_.forgotten(rank);
  if (watch_.gone) watch_.gone(rank);
}

void KvFleet::set_engines(std::span<const std::shared_ptr<Engine>> engines, TimePoint now) {
  std::unordered_map<std::uint64_t, Entry> before = std::exchange(entries_, {});
  std::unordered_set<std::uint64_t> decoding;
  for (const auto& engine : engines) {
    if (engine->role == Role::kDecode) decoding.insert(engine->id);
  }
  for (const auto& engine : engines) {
    if (entries_.contains(engine->id)) continue;  // It has both roles.
    const bool decodes = decoding.contains(engine->id);
    const auto known = before.find(engine->id);
    if (known != before.end() && known->second.decodes == decodes) {
      entries_.insert(before.extract(known));
      continue;
    }
    Entry entry{.url = engine->url.text,
                .host = engine->url.host,
                .engine = engine,
                .ranks = {},
                .decodes = decodes};
    add_rank(entry, engine->id, 0);
    entries_.emplace(engine->id, std::move(entry));
  }
  for (auto& [id, entry] : before) {
    for (const auto& rank : entry.ranks) {
      rank->source.remove(now);
      remove_rank(*rank);
    }
  }
}

void KvFleet::close_stream(Rank& rank, TimePoint now) {
  if (rank.stream == 0) return;
  streams_.remove(rank.stream);
  by_stream_.erase(rank.stream);
  rank.stream = 0;
  rank.source.remove(now);
  rank.source = index::Source();
  rank.hashes = {};
  rank.names_sessions = false;
  rank.address = {};
  forget_blocks(rank);
  if (watch_.forgotten) watch_.forgotten(rank);
}

void KvFleet::forget_blocks(Rank& rank) {
  rank.adoption.stop();
  blocks_.clear(rank.holder);
  expected_.forget(rank.place);
}

void KvFleet::open_stream(Rank& rank, const index::EventAddress& address) {
  const index::StreamId stream = next_stream_++;
  const Result<void> added = streams_.add(
      stream, {.endpoint = address.endpoint,
               .replay_endpoint = address.replay_endpoint,
               .topic = address.topic,
               .decoder = {.dialect = address.dialect, .head_tokens = KvTokens::kHeadTokens}});
  if (!added) {
    g_log.warn("the events of an engine are not received engine={} rank={} why=\"{}\"", rank.url,
               rank.number, added.error().detail);
    return;
  }
  index::Source::Options options;
  options.can_replay = !address.replay_endpoint.empty();
  options.rank = rank.number;
  if (address.block_size != 0) options.block_size = address.block_size;
  rank.source = index::Source(options);
  rank.stream = stream;
  rank.address = address;
  by_stream_.emplace(stream, &rank);
}

void KvFleet::set_addresses(std::uint64_t engine, std::vector<index::EventAddress> addresses,
                            std::string error, TimePoint now) {
  const auto found = entries_.find(engine);
  if (found == entries_.end()) return;
  Entry& entry = found->second;
  entry.was_asked = true;
  entry.sources_error = std::move(error);
  std::erase_if(entry.ranks, [&](const std::unique_ptr<Rank>& rank) {
    const bool is_listed =
        std::any_of(addresses.begin(), addresses.end(),
                    [&](const auto& address) { return address.rank == rank->number; });
    if (is_listed) return false;
    close_stream(*rank, now);
    // Ranks without events still have their account, so rank 0 stays.
    if (rank->number == 0) return false;
    remove_rank(*rank);
    return true;
  });
  for (const index::EventAddress& address : addresses) {
    auto at = std::find_if(entry.ranks.begin(), entry.ranks.end(),
                           [&](const auto& rank) { return rank->number == address.rank; });
    if (at == entry.ranks.end()) {
      if (!add_rank(entry, engine, address.rank)) break;
      at = std::prev(entry.ranks.end());
    }
    if ((*at)->stream != 0 && (*at)->address == address) continue;
    close_stream(**at, now);
    open_stream(**at, address);
  }
  std::sort(entry.ranks.begin(), entry.ranks.end(),
            [](const auto& a, const auto& b) { return a->number < b->number; });
}

bool KvFleet::was_asked(std::uint64_t engine) const {
  const Entry* const entry = find(engine);
  return entry == nullptr || entry->was_asked;
}

void KvFleet::ask_again(std::uint64_t engine) {
  const auto found = entries_.find(engine);
  if (found != entries_.end()) found->second.was_asked = false;
}

void KvFleet::arrive(index::Arrival&& arrival, TimePoint now) {
  const auto found = by_stream_.find(arrival.stream);
  if (found == by_stream_.end()) return;  // Its stream was closed.
  Rank& rank = *found->second;
  using Kind = index::Arrival::Kind;
  switch (arrival.kind) {
    case Kind::kConnected:
      rank.source.connected(now);
      break;
    case Kind::kDisconnected:
      ask_again(rank.engine);  // Its next process may publish elsewhere.
      rank.source.disconnected(now);
      break;
    case Kind::kLive:
      rank.source.live(arrival.sequence, std::move(arrival.batch), now);
      break;
    case Kind::kReplayed:
      rank.source.replayed(arrival.ticket, arrival.sequence, std::move(arrival.batch), now);
      break;
    case Kind::kReplayEnd:
    case Kind::kReplayFailed:
      rank.source.replay_ended(arrival.ticket, arrival.kind == Kind::kReplayEnd, now);
      break;
    case Kind::kOverflow:
      rank.source.overflowed(now);
      break;
  }
  run_actions(rank, now);
}

bool KvFleet::adopt(Rank& rank, const index::Source::Position& place, std::vector<index::Key> keys,
                    TimePoint now) {
  if (rank.stream == 0 || !rank.source.resume(place, now)) return false;
  run_actions(rank, now);  // Forgets; what is replayed arrives later.
  rank.adoption.begin(std::move(keys));
  return true;
}

bool KvFleet::adopt_more() {
  bool has_more = false;
  bool has_stored = false;
  for (auto& [id, entry] : entries_) {
    for (const auto& rank : entry.ranks) {
      if (!rank->adoption.is_active()) continue;
      if (std::exchange(has_stored, true)) return true;
      const std::span<const index::Key> keys = rank->adoption.next();
      for (std::size_t at = 0; at < keys.size(); at += kSlice) {
        blocks_.store(rank->holder, keys.subspan(at, std::min(kSlice, keys.size() - at)));
      }
      stats_.adopted += keys.size();
      has_more = rank->adoption.is_active();
      if (!has_more) rank->adoption.stop();
    }
  }
  return has_more;
}

void KvFleet::tick(TimePoint now) {
  for (auto& [id, entry] : entries_) {
    for (const auto& rank : entry.ranks) {
      if (rank->stream == 0) continue;
      rank->source.tick(now);
      run_actions(*rank, now);
    }
  }
}

void KvFleet::run_actions(Rank& rank, TimePoint now) {
  index::SourceAction action;
  while (rank.source.next(action)) {
    using Kind = index::SourceAction::Kind;
    switch (action.kind) {
      case Kind::kApply:
        apply(rank, action.batch);
        break;
      case Kind::kForget:
        forget_blocks(rank);
        if (watch_.forgotten) watch_.forgotten(rank);
        break;
      case Kind::kReplay: {
        const Result<void> asked = streams_.replay(rank.stream, action.ticket, action.from);
        if (!asked) rank.source.replay_ended(action.ticket, false, now);
        break;
      }
      case Kind::kTrust:
        // A reason may change with each batch, such as the number of one that cannot be decoded.
        if (std::exchange(rank.logged, action.trust) == action.trust) break;
        g_log.info("the state of an engine's events is {} engine={} rank={} reason=\"{}\"",
                   index::to_string(action.trust), rank.url, rank.number, action.reason);
        break;
    }
  }
}

void KvFleet::apply(Rank& rank, const index::KvBatch& batch) {
  // Removals come before the blocks that take their place, and those may be the same ones again.
  bool has_removed = false;
  const auto tell_removed = [&] {
    if (std::exchange(has_removed, false) && watch_.removed) watch_.removed(rank);
  };
  for (const index::KvEvent& event : batch.events) {
    switch (event.kind) {
      case index::EventKind::kStored:
        tell_removed();
        apply_stored(rank, event);
        break;
      case index::EventKind::kRemoved:
        keys_.clear();
        for (const std::uint64_t hash : event.hashes) keys_.push_back(index::key_of(0, hash));
        for (std::size_t at = 0; at < keys_.size(); at += kSlice) {
          blocks_.erase(rank.holder,
                        std::span(keys_).subspan(at, std::min(kSlice, keys_.size() - at)));
        }
        rank.adoption.removed(keys_);
        stats_.removed += keys_.size();
        has_removed = true;
        break;
      case index::EventKind::kCleared:
        forget_blocks(rank);
        ++stats_.cleared;
        has_removed = true;
        break;
    }
  }
  tell_removed();
}

void KvFleet::apply_stored(Rank& rank, const index::KvEvent& event) {
  tokens_.observe(rank.hashes, event);
  keys_.clear();
  for (const std::uint64_t hash : event.hashes) keys_.push_back(index::key_of(0, hash));
  for (std::size_t at = 0; at < keys_.size(); at += kSlice) {
    blocks_.store(rank.holder, std::span(keys_).subspan(at, std::min(kSlice, keys_.size() - at)),
                  at == 0 && !event.parent);
  }
  rank.adoption.stored(keys_);
  stats_.stored += keys_.size();
  if (event.session_id.empty()) return;
  rank.names_sessions = true;
  const index::Key parent = event.parent ? index::key_of(0, *event.parent) : 0;
  lessons_.stored(event.session_id, event.parent ? &parent : nullptr, keys_.data(), keys_.size());
}

const KvFleet::Entry* KvFleet::find(std::uint64_t engine) const {
  const auto found = entries_.find(engine);
  return found == entries_.end() ? nullptr : &found->second;
}

std::optional<index::Dialect> KvFleet::dialect_of(std::uint64_t engine) const {
  const Entry* const entry = find(engine);
  if (entry == nullptr) return std::nullopt;
  for (const auto& rank : entry->ranks) {
    if (rank->stream != 0) return rank->address.dialect;
  }
  return std::nullopt;
}

bool KvFleet::takes_full_reports(std::string_view model) const {
  if (by_stream_.empty()) return false;
  return std::none_of(entries_.begin(), entries_.end(), [&](const auto& each) {
    return dialect_of(each.first) == index::Dialect::kTensorRtLlm &&
           (model.empty() || each.second.engine->models.serves(model) != Serves::kNo);
  });
}

const KvFleet::Rank* KvFleet::hashing_rank(std::string_view model, bool is_salted) const {
  for (const auto& [id, entry] : entries_) {
    const ModelList& models = entry.engine->models;
    const std::string_view name = model.empty() ? models.first() : model;
    if (models.serves(name) != Serves::kYes || models.is_adapter(name)) continue;
    for (const auto& rank : entry.ranks) {
      const HashMode mode = is_salted ? rank->hashes.salted : rank->hashes.mode;
      if (mode != 0 && rank->gives_credit()) return rank.get();
    }
  }
  return nullptr;
}

KvFleet::Rank* KvFleet::find_rank(std::uint64_t engine, std::uint32_t number) {
  const auto found = entries_.find(engine);
  if (found == entries_.end()) return nullptr;
  for (const auto& rank : found->second.ranks) {
    if (rank->number == number) return rank.get();
  }
  return nullptr;
}

void KvFleet::attach(std::uint64_t engine, std::optional<index::HolderId> holder,
                     index::NodeId node) {
  const auto found = entries_.find(engine);
  if (found == entries_.end()) return;
  for (const auto& rank : found->second.ranks) {
    if (holder) {
      blocks_.attach(rank->holder, *holder);
    } else {
      blocks_.detach(rank->holder);
    }
    placement_.set_node(rank->place, node);
  }
}

}  // namespace pegaflow::router
