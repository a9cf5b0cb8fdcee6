#include "router/kv/kv_routing.h"

#include <map>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "base/session_name.h"
#include "router/kv/kv_policy.h"
#include "router/page/kv_page.h"

namespace pegaflow::router {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

index::Arrival arrival_of(index::StreamId stream, index::Arrival::Kind kind,
                          std::uint64_t sequence = 0) {
  index::Arrival arrival;
  arrival.stream = stream;
  arrival.kind = kind;
  arrival.sequence = sequence;
  return arrival;
}

index::KvEvent event_of(index::EventKind kind, std::string_view session = {},
                        std::optional<std::uint64_t> parent = {}) {
  index::KvEvent event;
  event.kind = kind;
  event.parent = parent;
  event.session_id = session;
  event.block_size = kind == index::EventKind::kStored ? 16 : 0;
  return event;
}

/// Engines A and B with one rank each, whose streams the test feeds.
class Rig {
 public:
  Rig() {
    KvStreams streams{.add =
                          [this](index::StreamId id, const index::EventSocket::Stream& stream) {
                            open[stream.endpoint] = id;
                            return Result<void>();
                          },
                      .remove =
                          [this](index::StreamId id) {
                            std::erase_if(open,
                                          [id](const auto& each) { return each.second == id; });
                          },
                      .replay =
                          [this](index::StreamId, std::uint64_t ticket, std::uint64_t sequence) {
                            replays.emplace_back(ticket, sequence);
                            return Result<void>();
                          }};
    routing = KvRouting::create({.index_blocks = 65'536, .text_bytes = 1 << 20, .seed = 7},
                                std::move(streams))
                  .value();
    for (const char* url : {"http://a:1", "http://b:1"}) {
      engines.push_back(std::make_shared<Engine>(EngineUrl::parse(url).value(), Role::kDecode,
                                                 Breaker::Options()));
    }
    routing->fleet().set_engines(engines, now);
  }

  /// The engine publishes events, from now on and without replays.
  void connect(std::size_t engine, bool can_replay = false) {
    index::EventAddress address;
    if (can_replay) address.replay_endpoint = "tcp://replay:5558";
    address.endpoint = "tcp://" + engines[engine]->url.host + ":5557";
    routing->fleet().set_addresses(engines[engine]->id, {address}, "", now);
    routing->fleet().arrive(arrival_of(stream_of(engine), index::Arrival::Kind::kConnected), now);
  }
  index::StreamId stream_of(std::size_t engine) {
    return open.at("tcp://" + engines[engine]->url.host + ":5557");
  }

  void publish(std::size_t engine, index::KvEvent event, std::vector<std::uint64_t> hashes) {
    index::Arrival arrival =
        arrival_of(stream_of(engine), index::Arrival::Kind::kLive, sequences[engine]++);
    arrival.batch.timestamp = static_cast<double>(arrival.sequence);
    arrival.batch.hashes = std::move(hashes);
    event.hashes = arrival.batch.hashes;
    arrival.batch.events.push_back(event);
    routing->fleet().arrive(std::move(arrival), now);
  }
  void store(std::size_t engine, std::vector<std::uint64_t> hashes, std::string_view session = {},
             std::optional<std::uint64_t> parent = {}) {
    publish(engine, event_of(index::EventKind::kStored, session, parent), std::move(hashes));
  }

  std::unique_ptr<KvRequest> request(std::string text, std::string_view session = {}) {
    return routing->begin({.root = 1, .text = std::move(text), .tokens = {}}, "m", session);
  }
  std::vector<Candidate> candidates() {
    std::vector<Candidate> all;
    for (const auto& engine : engines) all.push_back({engine->id, 0});
    return all;
  }
  std::optional<std::size_t> choose(KvRequest& request) {
    return routing->choose(candidates(), request, Role::kDecode, now);
  }
  /// Sends a prompt to an engine, which announces `hashes` for it.
  void serve(std::size_t engine, const std::string& text, std::vector<std::uint64_t> hashes) {
    const auto one = request(text);
    routing->accept({engines[engine]->id, 0}, "least-load", *one, Role::kDecode, now);
    routing->sent(*one, *engines[engine], now);
    store(engine, std::move(hashes), one->session);
    now += milliseconds(100);
    routing->first_token(*one, now);
    routing->finished(*one, now);
    // Its blocks are announced now, and no longer only expected.
    now += seconds(60);
    routing->tick(now);
  }

  std::map<std::string, index::StreamId> open;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> replays;
  std::vector<std::shared_ptr<Engine>> engines;
  std::map<std::size_t, std::uint64_t> sequences;
  TimePoint now{seconds(1'000)};
  std::unique_ptr<KvRouting> routing;
};

std::string words(std::size_t bytes, char letter) {
  std::string text;
  while (text.size() < bytes) text += std::string(7, letter) + std::to_string(text.size()) + ' ';
  return text;
}

std::vector<std::uint64_t> hashes(std::uint64_t from, std::size_t count) {
  std::vector<std::uint64_t> all;
  for (std::size_t i = 0; i < count; ++i) all.push_back(from + i);
  return all;
}

TEST_SUITE("kv_routing") {
  TEST_CASE("without events another policy chooses, and its choice is accounted for") {
    Rig rig;
    const auto request = rig.request(words(4096, 'a'));
    CHECK(!rig.choose(*request));
    rig.routing->accept(rig.candidates()[1], "least-load", *request, Role::kDecode, rig.now);
    REQUIRE(request->choice);
    CHECK(request->choice->engine == rig.engines[1]->id);
    rig.routing->sent(*request, *rig.engines[1], rig.now);
    CHECK(rig.routing->placement_stats().inflight == 1);
    rig.routing->finished(*request, rig.now);
    CHECK(rig.routing->placement_stats().inflight == 0);
    CHECK(rig.routing->stats().fallbacks == 1);
  }

  TEST_CASE("a conversation goes to the engine whose events announced its blocks") {
    Rig rig;
    rig.connect(0);
    rig.connect(1);
    const std::string first = words(16'384, 'a');  // 256 blocks of 16 tokens of 4 bytes.
    const std::string other = words(16'384, 'b');
    rig.serve(0, first, hashes(1'000, 256));
    rig.serve(1, other, hashes(9'000, 256));
    for (int round = 0; round < 20; ++round) {
      const auto turn = rig.request(first + words(512, 'c'));
      CHECK(turn->known.keys.size() >= 200);
      CHECK(!turn->wants_full_report);
      CHECK(rig.choose(*turn) == 0);
      CHECK(turn->choice->predicted_cached >= 200 * 16);
      const auto second = rig.request(other + words(512, 'c'));
      CHECK(rig.choose(*second) == 1);
    }
  }

  TEST_CASE("another router's blocks are entered slice by slice, without those removed since") {
    Rig rig;
    rig.connect(0, true);
    REQUIRE(rig.replays.size() == 1);
    const index::StreamId stream = rig.stream_of(0);
    rig.sequences[0] = 50;
    rig.store(0, hashes(1, 1));
    index::Arrival failed = arrival_of(stream, index::Arrival::Kind::kReplayFailed);
    failed.ticket = rig.replays.back().first;
    rig.routing->fleet().arrive(std::move(failed), rig.now);
    KvFleet::Rank& rank = *rig.routing->fleet().find_rank(rig.engines[0]->id, 0);
    REQUIRE(rank.source.trust() == index::Trust::kPartial);
    std::vector<index::Key> keys;
    constexpr std::size_t kBlocks = 50'000;
    for (const std::uint64_t hash : hashes(1'000, kBlocks)) keys.push_back(index::key_of(0, hash));

    REQUIRE(rig.routing->fleet().adopt(rank, {.sequence = 50, .timestamp = 50, .is_exact = true},
                                       keys, rig.now));
    CHECK(rig.routing->blocks_of(rank) == 0);  // Nothing in the turn of the snapshot itself.
    CHECK(rig.routing->work());
    CHECK(rig.routing->blocks_of(rank) == index::Adoption::kSlice);
    REQUIRE(rig.replays.size() == 2);
    index::Arrival same = arrival_of(stream, index::Arrival::Kind::kReplayed, 50);
    same.ticket = rig.replays.back().first;
    same.batch.timestamp = 50;
    rig.routing->fleet().arrive(std::move(same), rig.now);
    index::Arrival end = arrival_of(stream, index::Arrival::Kind::kReplayEnd);
    end.ticket = rig.replays.back().first;
    rig.routing->fleet().arrive(std::move(end), rig.now);
    REQUIRE(rank.source.trust() == index::Trust::kExact);
    rig.publish(0, event_of(index::EventKind::kRemoved), {1'000, 1'001 + kBlocks / 2, 2});
    while (rig.routing->work()) {
    }

    CHECK(rig.routing->blocks_of(rank) == kBlocks - 2);
    CHECK(rig.routing->fleet().stats().adopted == kBlocks - 1);
    rig.publish(0, event_of(index::EventKind::kCleared), {});
    while (rig.routing->work()) {
    }
    CHECK(rig.routing->blocks_of(rank) == 0);
  }

  TEST_CASE("a cache that is emptied while another router's blocks are entered stays empty") {
    Rig rig;
    rig.connect(0, true);
    KvFleet::Rank& rank = *rig.routing->fleet().find_rank(rig.engines[0]->id, 0);
    rank.adoption.begin(hashes(1'000, 50'000));
    CHECK(rig.routing->work());
    rig.sequences[0] = 50;

    rig.publish(0, event_of(index::EventKind::kCleared), {});
    index::Arrival failed = arrival_of(rig.stream_of(0), index::Arrival::Kind::kReplayFailed);
    failed.ticket = rig.replays.back().first;
    rig.routing->fleet().arrive(std::move(failed), rig.now);
    while (rig.routing->work()) {
    }

    CHECK(rig.routing->blocks_of(rank) == 0);
  }

  TEST_CASE("what an engine reports of its load reaches the cost") {
    Rig rig;
    rig.routing->set_load(rig.engines[0]->id, 0, {.waiting = 3, .kv_use = 0.5}, rig.now);
    rig.routing->set_load(rig.engines[0]->id, 7, {.waiting = 9}, rig.now);  // There is no rank 7.
    const auto queue = [&](std::size_t engine) {
      return rig.routing->queue_seconds(*rig.routing->fleet().find_rank(rig.engines[engine]->id, 0),
                                        rig.now);
    };
    CHECK(queue(0) > 0.1);
    CHECK(queue(1) == 0);
  }

  TEST_CASE("a turn whose blocks follow unknown ones asks for a full report, and is learned") {
    Rig rig;
    rig.connect(0);
    const std::string first = words(16'384, 'a');
    rig.serve(0, first, hashes(1'000, 256));
    // The answer before it, and the question, are not known as text.
    const std::string second = first + words(1'024, 'b') + words(1'024, 'c');
    const auto turn = rig.request(second);
    CHECK(turn->known.keys.size() >= 248);
    CHECK(turn->wants_full_report);
    rig.serve(0, second, hashes(1'000, 288));
    CHECK(rig.request(second + words(512, 'd'))->known.keys.size() >= 280);
    // What is unknown of this one is less than a 16th.
    CHECK(!rig.request(second + words(512, 'd'))->wants_full_report);
  }

  TEST_CASE("an engine without events is known by its server's chains and its node's pool") {
    Rig rig;
    KvPools& pools = rig.routing->pools();
    LinksPage links{.node = std::string(32, '1'), .has_chains = true};
    links.engines.push_back({.instance = "i", .space = "n", .block_tokens = 16});
    pools.set_servers(
        {EngineUrl::parse("http://a:50061").value(), EngineUrl::parse("http://b:50061").value()});
    pools.set_links("http://a:50061", links);
    links.node = std::string(32, '2');
    pools.set_links("http://b:50061", links);
    for (const char* server : {"http://a:50061", "http://b:50061"}) {
      pools.answered(server, "n",
                     {.server = "s", .generation = 1, .is_list = true, .block_tokens = 16});
    }
    const std::string text = words(16'384, 'a');
    const auto first = rig.request(text);
    rig.routing->accept({rig.engines[1]->id, 0}, "least-load", *first, Role::kDecode, rig.now);
    rig.routing->sent(*first, *rig.engines[1], rig.now);
    CHECK(first->has_lesson);  // So the engine gets the session id.
    PoolPage page{.server = "s", .generation = 1, .position = 1, .block_tokens = 16};
    page.chain_position = 1;
    page.chains.push_back({.session = session_name(first->session), .block_tokens = 16});
    for (const std::uint64_t hash : hashes(1'000, 256)) {
      page.chains[0].hashes.push_back(hash);
      page.changes.push_back({hash, false});
    }
    pools.answered("http://b:50061", "n", page);
    rig.routing->finished(*first, rig.now);
    // In the first seconds it is expected in the GPU, and later in the pool.
    auto turn = rig.request(text + words(512, 'c'));
    CHECK(turn->known.keys.size() >= 200);
    CHECK(rig.choose(*turn) == 1);
    CHECK(turn->choice->terms.gpu_blocks >= 200);
    rig.now += seconds(60);
    turn = rig.request(text + words(512, 'c'));
    CHECK(rig.choose(*turn) == 1);
    CHECK(turn->choice->terms.gpu_blocks == 0);
    CHECK(turn->choice->predicted_cached >= 200 * 16);
    rig.routing->sent(*turn, *rig.engines[1], rig.now);
    rig.routing->reported(*turn, 4224, turn->placed->predicted_cached, rig.now);
    CHECK(rig.routing->stats().close_reports == 1);
    links.engines[0].reports_chains = true;
    pools.set_links("http://b:50061", links);
    const json health = json::parse(kv_health(*rig.routing, rig.now));
    CHECK(health["sources"][0]["known_by"] == "pool");
    CHECK(health["sources"][1]["known_by"] == "chains");
    CHECK(health["pools"][1]["chains"] == 1);
  }

  TEST_CASE("blocks that were removed or cleared give no credit") {
    Rig rig;
    rig.connect(0);
    rig.connect(1);
    const std::string text = words(16'384, 'a');
    rig.serve(0, text, hashes(1'000, 256));
    rig.publish(0, event_of(index::EventKind::kRemoved), hashes(1'010, 246));
    auto turn = rig.request(text + "x");
    REQUIRE(rig.choose(*turn));
    CHECK(turn->choice->predicted_cached <= 10 * 16);
    rig.publish(0, event_of(index::EventKind::kCleared), {});
    turn = rig.request(text + "x");
    REQUIRE(rig.choose(*turn));
    CHECK(turn->choice->predicted_cached == 0);
  }

  TEST_CASE("a busy engine loses a short prefix to an idle one, and keeps a long one") {
    Rig rig;
    rig.connect(0);
    rig.connect(1);
    const std::string shorter = words(2'048, 'a');
    const std::string longer = words(65'536, 'b');
    rig.serve(0, shorter, hashes(1'000, 32));
    rig.serve(0, longer, hashes(9'000, 1024));
    // Half a second of prefill waits at A.
    const auto load = rig.request(words(16'384, 'z'));
    rig.routing->accept({rig.engines[0]->id, 0}, "least-load", *load, Role::kDecode, rig.now);
    rig.routing->sent(*load, *rig.engines[0], rig.now);
    const auto one = rig.request(shorter + "x");
    CHECK(rig.choose(*one) == 1);
    const auto two = rig.request(longer + "x");
    CHECK(rig.choose(*two) == 0);
    rig.routing->finished(*load, rig.now);
  }

  TEST_CASE("a burst of equal prompts stays together before the first event arrives") {
    Rig rig;
    rig.connect(0);
    rig.connect(1);
    const std::string text = words(32'768, 'q');
    const auto first = rig.request(text);
    const auto where = rig.choose(*first);
    REQUIRE(where);
    rig.routing->sent(*first, *rig.engines[*where], rig.now);
    rig.now += milliseconds(5);
    rig.routing->first_token(*first, rig.now);
    const auto sibling = rig.request(text);
    CHECK(rig.choose(*sibling) == where);
    rig.routing->finished(*first, rig.now);
  }

  TEST_CASE("answers that contradict the events end the credit, and the reason has both numbers") {
    Rig rig;
    rig.connect(0);
    const std::string text = words(16'384, 'a');
    rig.serve(0, text, hashes(1'000, 256));
    for (int i = 0; i < 200; ++i) {
      const auto turn = rig.request(text + std::to_string(i));
      if (!rig.choose(*turn)) break;
      rig.routing->sent(*turn, *rig.engines[0], rig.now);
      rig.routing->reported(*turn, 4'097, 0, rig.now);
      rig.routing->finished(*turn, rig.now);
      rig.now += seconds(1);
      rig.routing->tick(rig.now);
      // After the first contradiction the index is empty; the engine announces the same again.
      if (i == 40) rig.store(0, hashes(1'000, 256));
    }
    const auto last = rig.request(text + "end");
    const json health = json::parse(kv_health(*rig.routing, rig.now));
    CAPTURE(health.dump(1));
    CHECK((!rig.choose(*last) || last->choice->predicted_cached == 0));
  }

  TEST_CASE("blocks that are evicted while a request waits are its work, and no contradiction") {
    Rig rig;
    rig.connect(0);
    const KvFleet::Rank& rank = *rig.routing->fleet().find_rank(rig.engines[0]->id, 0);
    const std::string text = words(16'384, 'a');
    rig.serve(0, text, hashes(1'000, 256));
    for (int i = 0; i < 100; ++i) {
      CAPTURE(i);
      const auto turn = rig.request(text + words(256, 'b') + std::to_string(i));
      REQUIRE(rig.choose(*turn) == 0);
      REQUIRE(turn->choice->predicted_cached == 256 * 16);
      rig.routing->sent(*turn, *rig.engines[0], rig.now);
      CHECK(rig.routing->waiting().blocks() == 256);
      const double before = rig.routing->queue_seconds(rank, rig.now);
      // The request before it needs room; then this one computes what is gone again.
      std::vector<std::uint64_t> end = hashes(1'128, 128);
      rig.publish(0, event_of(index::EventKind::kRemoved), {end.rbegin(), end.rend()});
      CHECK(rig.routing->queue_seconds(rank, rig.now) > 2 * before);
      rig.store(0, end, turn->session, 1'127);
      rig.now += milliseconds(500);
      rig.routing->first_token(*turn, rig.now);
      KvRouting::release_text(*turn);
      rig.routing->reported(*turn, 4'160, 128 * 16, rig.now);
      rig.routing->finished(*turn, rig.now);
      CHECK(rig.routing->waiting().blocks() == 0);
      rig.now += seconds(20);
      rig.routing->tick(rig.now);
    }
    CHECK(rank.source.trust() == index::Trust::kExact);
    CHECK(rank.source.stats().resyncs == 0);
    CHECK(rig.routing->stats().evicted_reports == 100);
    CHECK(rig.routing->stats().close_reports == 0);
  }

  TEST_CASE("blocks that are evicted after the engine has used them contradict nothing") {
    Rig rig;
    rig.connect(0);
    const KvFleet::Rank& rank = *rig.routing->fleet().find_rank(rig.engines[0]->id, 0);
    const std::string text = words(16'384, 'a');
    rig.serve(0, text, hashes(1'000, 256));
    for (int i = 0; i < 100; ++i) {
      const auto turn = rig.request(text + words(256, 'b') + std::to_string(i));
      REQUIRE(rig.choose(*turn) == 0);
      rig.routing->sent(*turn, *rig.engines[0], rig.now);
      rig.now += milliseconds(10);  // 64 tokens, at the speed of the first prompt.
      rig.routing->first_token(*turn, rig.now);
      CHECK(rig.routing->waiting().blocks() == 0);
      rig.publish(0, event_of(index::EventKind::kRemoved), hashes(1'128, 128));
      rig.store(0, hashes(1'128, 128), turn->session, 1'127);
      rig.routing->reported(*turn, 4'160, 256 * 16, rig.now);
      rig.routing->finished(*turn, rig.now);
      rig.now += seconds(20);
    }
    CHECK(rank.source.stats().resyncs == 0);
    CHECK(rig.routing->stats().close_reports == 100);
  }

  TEST_CASE("a prompt in flight is expected at an engine that has not announced a block yet") {
    Rig rig;
    rig.connect(0);
    rig.connect(1);
    index::KvEvent event = event_of(index::EventKind::kStored);
    event.block_size = 32;  // The assumption is 16.
    rig.publish(1, event, hashes(5'000, 3));
    const std::string text = words(8'192, 'a');
    const auto first = rig.request(text);
    rig.routing->accept({rig.engines[0]->id, 0}, "least-load", *first, Role::kDecode, rig.now);
    rig.routing->sent(*first, *rig.engines[0], rig.now);

    const auto long_one = rig.request(words(262'144, 'z'));
    rig.routing->accept({rig.engines[1]->id, 0}, "least-load", *long_one, Role::kDecode, rig.now);
    rig.routing->sent(*long_one, *rig.engines[1], rig.now);

    const auto second = rig.request(text + words(512, 'b'));
    const std::vector<Candidate> both = rig.candidates();
    for (const std::vector<Candidate>& some :
         {std::vector{both[0]}, both, std::vector{both[1], both[0]}}) {
      const auto where = rig.routing->choose(some, *second, Role::kDecode, rig.now);
      REQUIRE(where);
      CHECK(some[*where].id == both[0].id);
      CHECK(second->choice->predicted_cached >= 1'900);
    }
  }

  TEST_CASE("blocks that the router forgets while a request waits are not evicted") {
    Rig rig;
    rig.connect(0);
    const std::string text = words(16'384, 'a');
    rig.serve(0, text, hashes(1'000, 256));
    const auto turn = rig.request(text + words(256, 'b'));
    REQUIRE(rig.choose(*turn) == 0);
    rig.routing->sent(*turn, *rig.engines[0], rig.now);
    rig.sequences[0] += 5;  // Batches are lost, and the engine does not replay.
    rig.store(0, hashes(1'000, 256), turn->session);
    rig.now += seconds(5);
    rig.routing->tick(rig.now);
    CHECK(rig.routing->waiting().size() == 0);
    rig.routing->reported(*turn, 4'160, 256 * 16, rig.now);
    rig.routing->finished(*turn, rig.now);
    CHECK(rig.routing->stats().evicted_reports == 0);
    CHECK(rig.routing->stats().close_reports == 1);
  }

  TEST_CASE("ranks of one engine are candidates of their own, and the request names its rank") {
    Rig rig;
    std::vector<index::EventAddress> addresses(2);
    addresses[0].endpoint = "tcp://a:5557";
    addresses[1].rank = 1;
    addresses[1].endpoint = "tcp://a:5558";
    rig.routing->fleet().set_addresses(rig.engines[0]->id, addresses, "", rig.now);
    for (const auto& [endpoint, stream] : rig.open) {
      rig.routing->fleet().arrive(arrival_of(stream, index::Arrival::Kind::kConnected), rig.now);
    }
    const std::string text = words(32'768, 'a');
    const auto taught = rig.request(text);
    rig.routing->accept(rig.candidates()[0], "least-load", *taught, Role::kDecode, rig.now);
    rig.routing->sent(*taught, *rig.engines[0], rig.now);
    index::Arrival arrival = arrival_of(rig.open.at("tcp://a:5558"), index::Arrival::Kind::kLive);
    arrival.batch.hashes = hashes(1, 512);
    arrival.batch.rank = 1;
    arrival.batch.events.push_back(event_of(index::EventKind::kStored, taught->session));
    arrival.batch.events.back().hashes = arrival.batch.hashes;
    rig.routing->fleet().arrive(std::move(arrival), rig.now);
    rig.routing->first_token(*taught, rig.now);
    rig.routing->finished(*taught, rig.now);
    rig.now += seconds(60);
    const auto turn = rig.request(text + "x");
    CHECK(rig.choose(*turn) == 0);
    REQUIRE(turn->choice);
    CHECK(turn->choice->rank == 1);
    CHECK(turn->choice->names_rank);
    // One rank fewer: what it held is forgotten.
    addresses.pop_back();
    rig.routing->fleet().set_addresses(rig.engines[0]->id, addresses, "", rig.now);
    const auto after = rig.request(text + "y");
    REQUIRE(rig.choose(*after));
    CHECK(after->choice->predicted_cached == 0);
  }

  TEST_CASE(
      "an engine that leaves takes its blocks along, and pages show why a source is not used") {
    Rig rig;
    rig.connect(0);
    rig.routing->fleet().set_addresses(rig.engines[1]->id, {}, "no events here", rig.now);
    const std::string text = words(8'192, 'a');
    rig.serve(0, text, hashes(1, 128));
    const json health = json::parse(kv_health(*rig.routing, rig.now));
    REQUIRE(health["sources"].size() == 2);
    CHECK(health["sources"][0]["blocks"] == 128);
    CHECK(health["sources"][1]["events"] == "no_events");
    CHECK(health["sources"][1]["reason"] == "no events here");
    rig.routing->fleet().set_engines(std::span(rig.engines).last(1), rig.now);
    CHECK(rig.open.empty());
    while (rig.routing->work()) {
    }
    CHECK(rig.routing->block_stats().blocks == 0);
  }

  TEST_CASE("an engine whose batches cannot be decoded does not fill the log") {
    static int lines;
    lines = 0;
    set_log_sink([](LogLevel, std::string_view) { ++lines; });
    Rig rig;
    rig.connect(0);
    for (std::uint64_t number = 0; number < 1'000; ++number) {
      index::Arrival arrival = arrival_of(rig.stream_of(0), index::Arrival::Kind::kLive, number);
      arrival.batch.undecodable = true;
      rig.routing->fleet().arrive(std::move(arrival), rig.now);
    }
    set_log_sink(nullptr);
    CHECK(lines <= 4);
    const json health = json::parse(kv_health(*rig.routing, rig.now));
    CHECK(health["sources"][0]["reason"] == "batch 999 could not be decoded");
  }

  TEST_CASE("lessons stay within their bytes, whatever engines announce") {
    constexpr std::size_t kBytes = std::size_t{1} << 20U;
    index::TextIndex texts({.bytes = 1 << 20});
    KvLessons lessons(texts, kBytes);
    index::Text text;
    for (int i = 0; i < 100; ++i) {
      const std::string session = "s" + std::to_string(i);
      lessons.begin(session, text, {});
      const auto keys = hashes(1, 10'000);
      lessons.stored(session, nullptr, keys.data(), keys.size());
    }
    CHECK(lessons.size() == 100);
    CHECK(lessons.bytes() <= kBytes);
    CHECK(lessons.stats().refused > 0);
    for (int i = 0; i < 100; ++i) lessons.end("s" + std::to_string(i), TimePoint{});
    lessons.tick(TimePoint{seconds(60)});
    CHECK(lessons.size() == 0);
    CHECK(lessons.bytes() == 0);
  }

  TEST_CASE("long names that clients choose are not kept") {
    Rig rig;
    rig.connect(0);
    rig.connect(1);
    const std::string name(1'000'000, 'x');
    const auto request =
        rig.routing->begin({.root = 1, .text = words(4096, 'a'), .tokens = {}}, name, name);
    const auto where = rig.choose(*request);
    REQUIRE(where);
    rig.routing->sent(*request, *rig.engines[*where], rig.now);
    CHECK(!request->has_lesson);
    CHECK(rig.routing->log().json(rig.now).size() < 10'000);
    rig.routing->finished(*request, rig.now);
  }

  TEST_CASE("a request that is answered keeps nothing of its prompt, and its report still counts") {
    Rig rig;
    rig.connect(0);
    const auto request = rig.request(words(16'384, 'a'));
    const auto where = rig.choose(*request);
    REQUIRE(where);
    rig.routing->sent(*request, *rig.engines[*where], rig.now);
    rig.routing->first_token(*request, rig.now);
    KvRouting::release_text(*request);
    CHECK(request->text_bytes.capacity() < 100);
    CHECK(request->text.chunks.capacity() == 0);
    rig.routing->reported(*request, 8'192, 0, rig.now);  // 2 bytes each.
    rig.routing->finished(*request, rig.now);
    CHECK(rig.request(words(16'384, 'b'))->prompt_tokens == 8'192);
  }

  TEST_CASE("a request waits in the router while each engine has enough to compute") {
    Rig rig;
    rig.connect(0);
    rig.connect(1);
    ManualClock clock;
    clock.advance(rig.now - clock.now());
    const auto policy = [&](Role role, Duration queue_time) {
      return KvAware(*rig.routing, role, clock, queue_time, "least-load",
                     std::move(make_policy("least-load", 1).value()));
    };
    const KvAware decode = policy(Role::kDecode, milliseconds(500));
    const auto waiting = rig.request(words(4096, 'w'));
    const RequestView view{.affinity = 0, .kv = waiting.get()};
    const auto place = [&](std::size_t engine) {
      auto one = rig.request(words(64'000, static_cast<char>('a' + engine)));  // 2 s of 8,000/s.
      rig.routing->accept({rig.engines[engine]->id, 0}, "least-load", *one, Role::kDecode, rig.now);
      rig.routing->sent(*one, *rig.engines[engine], rig.now);
      return one;
    };
    const auto first = place(0);
    CHECK_FALSE(decode.should_wait(rig.candidates(), view));
    const auto second = place(1);
    CHECK(decode.should_wait(rig.candidates(), view));
    const KvRouting::Outlook outlook = rig.routing->outlook(rig.candidates(), rig.now);
    CHECK(outlook.least_queue == doctest::Approx(2).epsilon(0.1));
    CHECK(outlook.tokens_per_second == doctest::Approx(16'000));

    CHECK_FALSE(policy(Role::kDecode, Duration::zero()).should_wait(rig.candidates(), view));
    CHECK_FALSE(policy(Role::kPrefill, milliseconds(500)).should_wait(rig.candidates(), view));
    CHECK_FALSE(decode.should_wait(rig.candidates(), {}));
    waiting->is_prefilled = true;
    CHECK_FALSE(decode.should_wait(rig.candidates(), view));
    waiting->is_prefilled = false;

    // Placed twice by mistake it would count twice.
    rig.routing->sent(*second, *rig.engines[1], rig.now);
    CHECK(rig.routing->placement_stats().inflight == 2);
    rig.routing->first_token(*second, rig.now);
    CHECK_FALSE(decode.should_wait(rig.candidates(), view));
    rig.routing->finished(*first, rig.now);
    rig.routing->finished(*second, rig.now);
  }

  TEST_CASE("no request waits in the router for engines that are placed by load") {
    Rig rig;
    ManualClock clock;
    clock.advance(rig.now - clock.now());
    const KvAware decode(*rig.routing, Role::kDecode, clock, milliseconds(1), "least-load",
                         std::move(make_policy("least-load", 1).value()));
    std::vector<std::unique_ptr<KvRequest>> placed;
    for (std::size_t engine = 0; engine < 2; ++engine) {
      placed.push_back(rig.request(words(64'000, 'a')));
      rig.routing->accept({rig.engines[engine]->id, 0}, "least-load", *placed.back(), Role::kDecode,
                          rig.now);
      rig.routing->sent(*placed.back(), *rig.engines[engine], rig.now);
    }
    const auto waiting = rig.request(words(4096, 'w'));
    CHECK_FALSE(decode.should_wait(rig.candidates(), {.affinity = 0, .kv = waiting.get()}));
  }

  TEST_CASE("the page of routes explains each decision and its outcome") {
    Rig rig;
    rig.connect(0);
    rig.connect(1);
    const std::string text = words(16'384, 'a');
    rig.serve(0, text, hashes(1'000, 256));
    const auto turn = rig.request(text + words(64, 'x'));
    REQUIRE(rig.choose(*turn) == 0);
    rig.routing->sent(*turn, *rig.engines[0], rig.now);
    rig.now += milliseconds(50);
    rig.routing->first_token(*turn, rig.now);
    rig.routing->reported(*turn, 4'112, 4'096, rig.now);
    rig.routing->finished(*turn, rig.now);
    const json page = json::parse(rig.routing->log().json(rig.now));
    const json& newest = page["routes"][0];
    CAPTURE(newest.dump(1));
    CHECK(newest["policy"] == "kv-aware");
    CHECK(newest["terms"].size() == 2);
    CHECK(newest["terms"][0]["engine"] == "http://a:1");
    CHECK(newest["terms"][0]["chosen"] == true);
    CHECK(newest["outcome"]["cached_tokens"] == 4'096);
    CHECK(newest["outcome"]["first_token_s"].get<double>() == doctest::Approx(0.05));
    CHECK(page.dump().find("aaaaaaa") == std::string::npos);
    CHECK(page.dump().find("pf1:") == std::string::npos);
  }
}

}  // namespace
}  // namespace pegaflow::router
