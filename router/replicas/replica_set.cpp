#include "router/replicas/replica_set.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "router/http/log.h"
#include "router/kv/kv_routing.h"

namespace pegaflow::router {

namespace {

constexpr double kMostReadySeconds = 4000;  // What the microseconds of a placement can tell.

using State = Sibling::State;

}  // namespace

ReplicaSet::ReplicaSet(KvRouting& routing, const std::optional<cluster::PeerSecrets>& secrets,
                       Options options)
    : routing_(routing),
      secrets_(secrets),
      options_(std::move(options)),
      began_(options_.unix_ms()) {
  routing_.observe(this);
}

ReplicaSet::~ReplicaSet() {
  routing_.observe(nullptr);
  routing_.parts().placement.set_turns({}, {});
}

const cluster::PeerSecrets& ReplicaSet::secrets() const {
  return secrets_ ? *secrets_ : no_secrets_;
}

ReplicaHeader ReplicaSet::header(std::uint64_t sequence) const {
  return {
      .router = options_.router, .began = began_, .sequence = sequence, .time = options_.unix_ms()};
}

// ---- siblings

void ReplicaSet::set_addresses(std::span<const std::string> addresses, TimePoint now) {
  std::map<std::string, Sibling> before = std::exchange(siblings_, {});
  std::vector<bool> is_taken(kMaxSiblings + 1);
  for (const std::string& address : addresses) {
    const auto known = before.find(address);
    if (known == before.end()) continue;
    is_taken[known->second.number] = true;
    siblings_.insert(before.extract(known));
  }
  for (auto& [address, sibling] : before) forget(sibling, now);
  left_out_ = 0;
  for (const std::string& address : addresses) {
    if (siblings_.contains(address)) continue;
    const auto free = std::find(is_taken.begin() + 1, is_taken.end(), false);
    if (free == is_taken.end()) {
      ++left_out_;
      continue;
    }
    *free = true;
    Sibling sibling;
    sibling.address = address;
    sibling.number = static_cast<index::RouterId>(free - is_taken.begin());
    siblings_.emplace(address, std::move(sibling));
  }
}

void ReplicaSet::order_routers() {
  std::vector<index::RouterId> before;
  std::vector<index::RouterId> after;
  for (const auto& [address, each] : siblings_) {
    if (each.state != State::kLive) continue;
    (each.last.router < options_.router ? before : after).push_back(each.number);
  }
  routing_.parts().placement.set_turns(before, after);
}

void ReplicaSet::forget(Sibling& sibling, TimePoint now) {
  routing_.parts().placement.forget_router(sibling.number, now);
}

bool ReplicaSet::accept(Sibling& sibling, const ReplicaHeader& header, TimePoint now) {
  const std::uint64_t clock = options_.unix_ms();
  const std::uint64_t apart = clock > header.time ? clock - header.time : header.time - clock;
  const auto window =
      std::chrono::duration_cast<std::chrono::milliseconds>(cluster::kHttpTokenTime).count();
  if (apart > static_cast<std::uint64_t>(window)) {
    ++sibling.refused[static_cast<std::size_t>(Refusal::kLate)];
    if (sibling.state != State::kLive) {
      sibling.reason = fmt::format("its clock and this one are {} s apart", apart / 1000);
    }
    return false;
  }
  const bool is_known = sibling.last.router == header.router;
  const bool is_next =
      is_known ? header.sequence > sibling.last.sequence : header.began > sibling.last.began;
  if (!is_next) {
    ++sibling.refused[static_cast<std::size_t>(Refusal::kRepeated)];
    return false;
  }
  for (const auto& [address, other] : siblings_) {
    if (&other == &sibling || other.state != State::kLive || other.last.router != header.router) {
      continue;
    }
    if (sibling.state == State::kLive) forget(sibling, now);
    sibling.state = State::kDuplicate;
    sibling.reason = fmt::format("the same router as {}", address);
    return false;
  }
  if (is_known) {
    sibling.lost += header.sequence - sibling.last.sequence - 1;
  } else {
    forget(sibling, now);
  }
  if (sibling.state != State::kLive) {
    g_log.info("another router shares its placements replica={} router={}", sibling.address,
               to_string(header.router));
  }
  const bool is_new = !is_known || sibling.state != State::kLive;
  sibling.state = State::kLive;
  sibling.reason.clear();
  sibling.last = header;
  if (is_new) order_routers();
  sibling.heard = now;
  ++sibling.messages;
  return true;
}

void ReplicaSet::arrived(const std::string& address, std::span<const std::byte> bytes,
                         TimePoint now) {
  const auto found = siblings_.find(address);
  if (found == siblings_.end() || found->second.state == State::kSelf) return;
  Sibling& sibling = found->second;
  const auto refuse = [&](Refusal why) { ++sibling.refused[static_cast<std::size_t>(why)]; };
  const auto opened = open_message(bytes, kPublished, secrets());
  if (!opened) {
    refuse(opened.error());
    if (opened.error() == Refusal::kForeign && sibling.state != State::kLive) {
      sibling.reason = "its messages were not made with the secret of this router";
    }
    return;
  }
  if (opened->header.router == options_.router) {
    if (sibling.state == State::kLive) forget(sibling, now);
    sibling.state = State::kSelf;
    sibling.reason = "the address of this router";
    return;
  }
  if (!accept(sibling, opened->header, now)) return;
  const auto records = read_records(opened->records);
  if (!records) {
    refuse(Refusal::kMalformed);
    return;
  }
  const std::uint64_t placements = sibling.placements;
  for (const ReplicaRecord& record : *records) {
    std::visit([&](const auto& one) { apply(sibling, one, now); }, record);
  }
  if (sibling.placements != placements) options_.on_placements();
}

void ReplicaSet::refresh_names() {
  if (engines_version_ == routing_.fleet().version()) return;
  engines_version_ = routing_.fleet().version();
  engines_.clear();
  for (const auto& [id, entry] : routing_.fleet().entries()) {
    for (const auto& rank : entry.ranks) {
      engines_.emplace(name_of_rank(entry.url, rank->number), rank->place);
    }
  }
}

void ReplicaSet::apply(Sibling& sibling, const SharedPlacement& one, TimePoint now) {
  refresh_names();
  const auto engine = engines_.find(one.engine);
  if (engine == engines_.end()) {
    ++sibling.unknown_engines;
    return;
  }
  const auto source = nodes_.find(one.source);
  const bool pulls = one.source != 0 && source != nodes_.end();
  ++sibling.placements;
  routing_.parts().placement.apply(
      index::PlacementRecord{.stage = index::Stage::kPlaced,
                             .router = sibling.number,
                             .request = one.request,
                             .engine = engine->second,
                             .prompt_tokens = one.prompt_tokens,
                             .uncached_tokens = std::min(one.uncached_tokens, one.prompt_tokens),
                             .source = pulls ? source->second : index::kNoNode,
                             .pull_bytes = pulls ? one.pull_bytes : 0,
                             .ready_seconds = static_cast<double>(one.ready_us) * 1e-6},
      now);
  routing_.parts().expected.placed(engine->second, one.chunks, now);
}

void ReplicaSet::apply(Sibling& sibling, const SharedFirstToken& one, TimePoint now) {
  reached(sibling, index::Stage::kFirstToken, one.request, now);
}

void ReplicaSet::apply(Sibling& sibling, const SharedEnd& one, TimePoint now) {
  reached(sibling, index::Stage::kDone, one.request, now);
}

void ReplicaSet::reached(const Sibling& sibling, index::Stage stage, std::uint64_t request,
                         TimePoint now) {
  index::PlacementRecord record;
  record.stage = stage;
  record.router = sibling.number;
  record.request = request;
  routing_.parts().placement.apply(record, now);
}

void ReplicaSet::apply(Sibling& sibling, const SharedHeartbeat& one, TimePoint now) {
  refresh_names();
  sibling.http_port = one.http_port;
  sibling.texts = one.texts;
  // Engines that it does not list have none of its requests.
  std::unordered_map<index::EngineId, index::EngineSums> sums;
  for (const SharedHeartbeat::Sums& each : one.engines) {
    const auto engine = engines_.find(each.engine);
    if (engine == engines_.end()) {
      ++sibling.unknown_engines;
      continue;
    }
    sums[engine->second] = {.router = sibling.number,
                            .engine = engine->second,
                            .prefills = each.prefills,
                            .decodes = each.decodes,
                            .prefill_tokens = each.prefill_tokens};
  }
  for (const auto& [name, engine] : engines_) {
    const auto listed = sums.find(engine);
    const index::EngineSums none{.router = sibling.number, .engine = engine};
    routing_.parts().placement.apply(listed == sums.end() ? none : listed->second, now);
  }
}

void ReplicaSet::apply(Sibling& sibling, const SharedText& one, TimePoint now) {
  const std::size_t bytes = (one.text.chunks.size() + one.keys.size()) * sizeof(std::uint64_t) +
                            one.hashes.size() * sizeof(BlockKey);
  if (!sibling.budget.take(bytes, now)) {
    ++sibling.unlearned;
    return;
  }
  ++sibling.learned;
  routing_.parts().texts.learn(one.text, one.keys, one.hashes);
}

void ReplicaSet::tick(TimePoint now) {
  now_ = now;
  nodes_.clear();
  for (const auto& [url, node] : routing_.pools().nodes()) {
    if (node.place != index::kNoNode) nodes_.emplace(name_of_node(url), node.place);
  }
  for (auto& [address, sibling] : siblings_) {
    if (sibling.state == State::kDuplicate) {
      sibling.state = State::kConnecting;
      sibling.reason = "no message came since another address led to the same router";
    }
    if (sibling.state != State::kLive || now - sibling.heard < kSilence) continue;
    sibling.state = State::kSilent;
    sibling.reason =
        fmt::format("no heartbeat for {} s",
                    std::chrono::duration_cast<std::chrono::seconds>(kSilence).count());
    forget(sibling, now);
    g_log.warn("another router is silent, and its placements are forgotten replica={}", address);
  }
  order_routers();
  send_heartbeat();
}

bool ReplicaSet::is_settled() const {
  for (const auto& [id, entry] : routing_.fleet().entries()) {
    if (!entry.was_asked) return false;
    for (const auto& rank : entry.ranks) {
      const index::Trust trust = rank->source.trust();
      const bool waits = trust == index::Trust::kUnknown || trust == index::Trust::kSyncing;
      if (rank->stream != 0 && waits) return false;
    }
  }
  return true;
}

KvFleet::Rank* ReplicaSet::rank_of(SharedName name) {
  for (const auto& [id, entry] : routing_.fleet().entries()) {
    for (const auto& rank : entry.ranks) {
      if (name_of_rank(entry.url, rank->number) == name) return rank.get();
    }
  }
  return nullptr;
}

const Sibling* ReplicaSet::best_source() const {
  const Sibling* best = nullptr;
  for (const auto& [address, sibling] : siblings_) {
    if (sibling.state != State::kLive || sibling.http_port == 0 || sibling.texts == 0) continue;
    if (best == nullptr || sibling.texts > best->texts) best = &sibling;
  }
  return best;
}

// ---- this router's messages

SharedName ReplicaSet::name_of(index::NodeId node) const {
  if (node == index::kNoNode) return 0;
  for (const auto& [url, each] : routing_.pools().nodes()) {
    if (each.place == node) return name_of_node(url);
  }
  return 0;
}

void ReplicaSet::add(const ReplicaRecord& record) {
  const bool was_empty = pending_.empty();
  if (pending_.size() >= kFlushBytes) flush();
  const std::size_t before = pending_.size();
  if (!append_record(pending_, record)) return;
  if (kReplicaHeaderBytes + pending_.size() + kSealBytes > kMaxReplicaMessage) {
    // It did not fit behind the others: they go first.
    const std::string last = pending_.substr(before);
    pending_.resize(before);
    flush();
    pending_ = last;
  }
  if (was_empty) options_.on_pending();
}

void ReplicaSet::flush() {
  if (pending_.empty()) return;
  const std::string message =
      seal_message(header(++sequence_), pending_, kPublished, secrets().first());
  pending_.clear();
  ++(options_.publish(message) ? published_ : dropped_);
}

void ReplicaSet::send_heartbeat() {
  SharedHeartbeat beat{.http_port = http_port_, .texts = routing_.text_stats().chains};
  for (const auto& [id, entry] : routing_.fleet().entries()) {
    for (const auto& rank : entry.ranks) {
      const index::EngineSums sums = routing_.parts().placement.sums(rank->place);
      if (sums.prefills == 0 && sums.decodes == 0) continue;
      beat.engines.push_back({.engine = name_of_rank(entry.url, rank->number),
                              .prefills = sums.prefills,
                              .decodes = sums.decodes,
                              .prefill_tokens = sums.prefill_tokens});
    }
  }
  add(beat);
  flush();
}

void ReplicaSet::placed(const index::PlacementRecord& record, const KvFleet::Rank& rank,
                        std::span<const std::uint64_t> chunks) {
  chunks = chunks.first(std::min(chunks.size(), kMaxSharedChunks));
  const double ready = std::clamp(record.ready_seconds, 0.0, kMostReadySeconds);
  add(SharedPlacement{.request = record.request,
                      .engine = name_of_rank(rank.url, rank.number),
                      .prompt_tokens = record.prompt_tokens,
                      .uncached_tokens = record.uncached_tokens,
                      .source = name_of(record.source),
                      .pull_bytes = record.pull_bytes,
                      .ready_us = static_cast<std::uint32_t>(ready * 1e6),
                      .chunks = {chunks.begin(), chunks.end()}});
}

void ReplicaSet::first_token(std::uint64_t request) { add(SharedFirstToken{request}); }

void ReplicaSet::ended(std::uint64_t request) { add(SharedEnd{request}); }

void ReplicaSet::learned(const index::Text& text, std::span<const index::Key> keys) {
  if (text.chunks.empty() || keys.empty()) return;
  const std::size_t bytes = (text.chunks.size() + keys.size()) * sizeof(std::uint64_t);
  const bool is_short = kReplicaHeaderBytes + bytes + 64 + kSealBytes <= kMaxReplicaMessage;
  if (!is_short || !lessons_.take(bytes, now_)) {
    ++unpublished_texts_;
    return;
  }
  add(SharedText{
      .text = index::outline_of(text), .keys = {keys.begin(), keys.end()}, .hashes = {}});
}

// ---- pages

std::string ReplicaSet::health(TimePoint now) const {
  std::string list;
  for (const auto& [address, each] : siblings_) {
    const double age =
        each.heard == TimePoint() ? -1 : std::chrono::duration<double>(now - each.heard).count();
    list += fmt::format(
        R"({}{{"replica":"{}","state":"{}","reason":"{}","last_message_s":{},"messages":{},)"
        R"("lost":{},"refused":{{"malformed":{},"foreign":{},"late":{},"repeated":{}}},)"
        R"("placements":{},"texts":{},"unknown_engines":{}}})",
        list.empty() ? "\n  " : ",\n  ", address, to_string(each.state), each.reason,
        age < 0 ? std::string("null") : fmt::format("{:.3f}", age), each.messages, each.lost,
        each.refused[0], each.refused[1], each.refused[2], each.refused[3], each.placements,
        each.learned, each.unknown_engines);
  }
  return fmt::format(
      R"("replicas":[{}],"snapshot":{{"state":"{}","reason":"{}","texts":{},"engines":{}}},)", list,
      snapshot_.state, snapshot_.reason, snapshot_.texts, snapshot_.engines);
}

bool ReplicaSet::is_good() const {
  return std::none_of(siblings_.begin(), siblings_.end(),
                      [](const auto& each) { return each.second.state == State::kSilent; });
}

void ReplicaSet::metrics(MetricsPage& page) const {
  using Type = MetricsPage::Type;
  const auto each = [&](Type type, const char* name, const char* help, auto value) {
    page.begin(type, name, help);
    for (const auto& [address, sibling] : siblings_) {
      page.sample(value(sibling), {{"replica", address}});
    }
  };
  page.begin(Type::Gauge, "replica", "1 for the present state of another router, by state");
  for (const auto& [address, sibling] : siblings_) {
    page.sample(1, {{"replica", address}, {"state", std::string(to_string(sibling.state))}});
  }
  each(Type::Counter, "replica_messages_total", "Messages of the other router that were used",
       [](const Sibling& one) { return one.messages; });
  each(Type::Counter, "replica_lost_messages_total",
       "Messages of the other router that never arrived",
       [](const Sibling& one) { return one.lost; });
  page.begin(Type::Counter, "replica_refused_messages_total",
             "Messages from the other router's address that were not used, by reason");
  for (const auto& [address, sibling] : siblings_) {
    for (std::size_t i = 0; i < kRefusals; ++i) {
      page.sample(
          sibling.refused[i],
          {{"replica", address}, {"reason", std::string(to_string(static_cast<Refusal>(i)))}});
    }
  }
  each(Type::Counter, "replica_placements_total",
       "Requests of the other router in this router's accounts",
       [](const Sibling& one) { return one.placements; });
  each(Type::Counter, "replica_texts_total", "Prompts whose blocks the other router has taught",
       [](const Sibling& one) { return one.learned; });
  each(Type::Counter, "replica_refused_texts_total",
       "Prompts that were not learned because the other router sent too many at a time",
       [](const Sibling& one) { return one.unlearned; });
  each(Type::Counter, "replica_unknown_engines_total",
       "Records of the other router about engines that this router does not have",
       [](const Sibling& one) { return one.unknown_engines; });
  page.counter("replica_published_total", "Messages sent to the other routers", published_);
  page.counter("replica_dropped_total", "Messages to the other routers that could not be sent",
               dropped_);
  page.counter("replica_unpublished_texts_total",
               "Prompts that were learned and not sent, because they are too long or too many",
               unpublished_texts_);
  page.gauge("replica_left_out", "Addresses of --replicas beyond the limit of 15", left_out_);
}

}  // namespace pegaflow::router
