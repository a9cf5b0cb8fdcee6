#include "router/replicas/replica_set.h"

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "router/kv/kv_routing.h"
#include "router/replicas/snapshot.h"

namespace pegaflow::router {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

/// Secrets as of a file with this text.
std::optional<cluster::PeerSecrets> secrets_of(const std::string& text) {
  const std::string path = "/tmp/pegaflow_replica_set_" + std::to_string(::getpid());
  std::ofstream(path) << text;
  ::chmod(path.c_str(), 0600);
  auto read = cluster::PeerSecrets::read(path);
  ::unlink(path.c_str());
  REQUIRE(read);
  return std::optional(std::move(*read));
}

/// A router with the engines A and B, whose messages the test carries.
class One {
 public:
  explicit One(std::optional<cluster::PeerSecrets> its_secrets = secrets_of("0123456789abcdef-one"),
               std::uint64_t its_clock = 1'000'000)
      : clock(its_clock), secrets(std::move(its_secrets)) {
    KvStreams streams{
        .add =
            [this](index::StreamId id, const index::EventSocket::Stream&) {
              stream = id;
              return Result<void>();
            },
        .remove = [](index::StreamId) {},
        .replay = [](index::StreamId, std::uint64_t, std::uint64_t) { return Result<void>(); }};
    routing = KvRouting::create({.index_blocks = 65'536, .text_bytes = 1 << 20, .seed = 7},
                                std::move(streams))
                  .value();
    for (const char* url : {"http://a:1", "http://b:1"}) {
      engines.push_back(std::make_shared<Engine>(EngineUrl::parse(url).value(), Role::kDecode,
                                                 Breaker::Options()));
    }
    routing->fleet().set_engines(engines, now);
    replicas =
        std::make_unique<ReplicaSet>(*routing, secrets,
                                     ReplicaSet::Options{.router = Id128::random(),
                                                         .publish =
                                                             [this](std::string_view text) {
                                                               sent.emplace_back(text);
                                                               return true;
                                                             },
                                                         .on_pending = [] {},
                                                         .on_placements = [this] { ++heard; },
                                                         .unix_ms = [this] { return clock; }});
    const std::vector<std::string> addresses = {"x:1"};
    replicas->set_addresses(addresses, now);
  }

  std::unique_ptr<KvRequest> place(std::size_t engine, const std::string& text) {
    auto request = routing->begin({.root = 1, .text = text, .tokens = {}}, "m", "");
    routing->accept({engines[engine]->id, 0}, "least-load", *request, Role::kDecode, now);
    routing->sent(*request, *engines[engine], now);
    return request;
  }
  double queue(std::size_t engine) {
    return routing->queue_seconds(*routing->fleet().find_rank(engines[engine]->id, 0), now);
  }
  /// The engine's rank, which publishes an event without blocks: its blocks are trusted then.
  KvFleet::Rank& publish(std::size_t engine) {
    index::EventAddress address;
    address.endpoint = "tcp://" + engines[engine]->url.host + ":5557";
    routing->fleet().set_addresses(engines[engine]->id, {address}, "", now);
    for (const auto kind : {index::Arrival::Kind::kConnected, index::Arrival::Kind::kLive}) {
      index::Arrival arrival;
      arrival.stream = stream;
      arrival.kind = kind;
      routing->fleet().arrive(std::move(arrival), now);
    }
    return *routing->fleet().find_rank(engines[engine]->id, 0);
  }
  /// All messages since the last call.
  std::vector<std::string> take() {
    replicas->flush();
    return std::exchange(sent, {});
  }
  void hear(const std::vector<std::string>& messages) {
    for (const std::string& message : messages) replicas->arrived("x:1", bytes_of(message), now);
  }
  const Sibling& sibling() { return replicas->siblings().at("x:1"); }
  std::uint64_t refused(Refusal why) { return sibling().refused[static_cast<std::size_t>(why)]; }

  int heard = 0;               ///< Messages with placements.
  index::StreamId stream = 0;  ///< The one that was opened last.
  std::uint64_t clock;
  TimePoint now{seconds(1'000)};
  std::optional<cluster::PeerSecrets> secrets;
  std::vector<std::shared_ptr<Engine>> engines;
  std::vector<std::string> sent;
  std::unique_ptr<KvRouting> routing;
  std::unique_ptr<ReplicaSet> replicas;
};

std::string words(std::size_t bytes, char letter) {
  std::string text;
  while (text.size() < bytes) text += std::string(7, letter) + std::to_string(text.size()) + ' ';
  return text;
}

void learn(One& one, const std::string& bytes, std::uint64_t first_key, std::size_t count) {
  index::Text text;
  index::hash_text(1, bytes, text);
  std::vector<index::Key> keys;
  for (std::size_t i = 0; i < count; ++i) keys.push_back(first_key + i);
  one.routing->parts().texts.learn(text, keys);
  one.replicas->learned(text, keys);
}

index::TextIndex::Known known_of(One& one, const std::string& bytes) {
  index::Text text;
  index::hash_text(1, bytes, text);
  index::TextIndex::Known known;
  one.routing->parts().texts.look_up(text, known);
  return known;
}

/// The records about blocks in what is left of a snapshot.
std::vector<SharedBlocks> blocks_of(One& one, SnapshotWriter& writer, const std::string& nonce) {
  std::vector<SharedBlocks> all;
  for (std::string part = writer.next(); !part.empty(); part = writer.next()) {
    const auto message = std::string_view(part).substr(sizeof(std::uint32_t));
    const auto opened = open_message(bytes_of(message), snapshot_purpose(nonce), *one.secrets);
    REQUIRE(opened);
    const auto records = read_records(opened->records);
    REQUIRE(records);
    for (const ReplicaRecord& record : *records) {
      if (const auto* const blocks = std::get_if<SharedBlocks>(&record)) all.push_back(*blocks);
    }
  }
  return all;
}

TEST_SUITE("replicas") {
  TEST_CASE("a request of one router is in the accounts of the other until it ends") {
    One a;
    One b;
    const auto request = a.place(0, words(40'000, 'a'));
    b.hear(a.take());
    CHECK(b.queue(0) > 0.5);
    CHECK(b.queue(1) == 0);

    a.routing->first_token(*request, a.now);
    b.hear(a.take());
    CHECK(b.queue(0) == 0);
    a.routing->finished(*request, a.now);
    b.hear(a.take());
    CHECK(b.routing->placement_stats().inflight == 0);
    CHECK(b.sibling().placements == 1);
    CHECK(b.sibling().lost == 0);
  }

  TEST_CASE("an answer that is not streamed shows that the engine computes another prompt now") {
    One a;
    One b;
    // The engine receives that of the first router before the other one, whose record arrives
    // later.
    const auto second = b.place(0, words(40'000, 'b'));
    const auto first = a.place(0, words(40'000, 'a'));
    b.hear(a.take());
    const double each = b.queue(0) / 2;
    REQUIRE(each > 0.5);

    for (One* const one : {&a, &b}) one->now += seconds(3);
    a.routing->computed(*first, a.now);
    a.routing->finished(*first, a.now);
    b.hear(a.take());

    CHECK(b.queue(0) == doctest::Approx(each));
    b.routing->finished(*second, b.now);
    CHECK(b.queue(0) == 0);
  }

  TEST_CASE("a request that is cancelled in the engine's queue tells nothing of the others") {
    One a;
    One b;
    const auto first = b.place(0, words(40'000, 'b'));
    const auto second = a.place(0, words(40'000, 'a'));
    b.hear(a.take());

    for (One* const one : {&a, &b}) one->now += seconds(3);
    a.routing->finished(*second, a.now);
    b.hear(a.take());

    CHECK(b.queue(0) == 0);
    CHECK(b.routing->placement_stats().inflight == 1);
  }

  TEST_CASE("of two routers one chooses first at an instant, until it is silent") {
    One a;
    One b;
    CHECK(a.routing->is_turn(a.now));
    a.replicas->tick(a.now);
    b.hear(a.take());
    b.replicas->tick(b.now);
    a.hear(b.take());
    REQUIRE(a.routing->is_turn(a.now) != b.routing->is_turn(b.now));
    One& first = a.routing->is_turn(a.now) ? a : b;
    One& second = &first == &a ? b : a;

    CHECK(second.heard == 0);
    const auto request = first.place(0, words(40'000, 'a'));
    second.hear(first.take());
    CHECK(second.heard == 1);
    CHECK(second.routing->is_turn(second.now));

    second.now += seconds(5);
    CHECK_FALSE(second.routing->is_turn(second.now));
    second.replicas->tick(second.now);
    CHECK(second.routing->is_turn(second.now));
  }

  TEST_CASE("a heartbeat replaces what lost messages would have told") {
    One a;
    One b;
    const auto lost = a.place(0, words(40'000, 'a'));
    (void)a.take();
    a.replicas->tick(a.now);
    b.hear(a.take());
    CHECK(b.queue(0) > 0.5);

    const auto other = a.place(1, words(40'000, 'b'));
    b.hear(a.take());
    CHECK(b.queue(1) > 0.5);
    a.routing->finished(*other, a.now);
    a.routing->finished(*lost, a.now);
    (void)a.take();
    a.replicas->tick(a.now);
    b.hear(a.take());
    CHECK(b.queue(0) == 0);
    CHECK(b.queue(1) == 0);
    CHECK(b.sibling().lost == 1);  // What came before its first message is not known.
  }

  TEST_CASE("a router without heartbeats for five seconds is forgotten, and heard again") {
    One a;
    One b;
    const auto request = a.place(0, words(40'000, 'a'));
    b.hear(a.take());
    CHECK(b.replicas->is_good());
    b.now += seconds(4);
    b.replicas->tick(b.now);
    CHECK(b.sibling().state == Sibling::State::kLive);
    b.now += seconds(1);
    b.replicas->tick(b.now);
    CHECK(b.sibling().state == Sibling::State::kSilent);
    CHECK(b.sibling().reason == "no heartbeat for 5 s");
    CHECK_FALSE(b.replicas->is_good());
    CHECK(b.queue(0) == 0);

    a.replicas->tick(a.now);
    b.hear(a.take());
    CHECK(b.sibling().state == Sibling::State::kLive);
    CHECK(b.queue(0) > 0.5);
  }

  TEST_CASE("garbage, foreign, late and repeated messages are counted and change nothing") {
    One a;
    One b;
    One foreign(secrets_of("fedcba9876543210-other"));
    const auto one = a.place(0, words(40'000, 'a'));
    const auto two = foreign.place(0, words(40'000, 'a'));
    const std::vector<std::string> good = a.take();
    REQUIRE(good.size() == 1);

    b.hear({"", "garbage", std::string(2'000'000, 'x'), std::string(500, '\xff')});
    CHECK(b.refused(Refusal::kMalformed) == 4);
    b.hear(foreign.take());
    CHECK(b.refused(Refusal::kForeign) == 1);
    CHECK(b.sibling().reason == "its messages were not made with the secret of this router");
    for (std::size_t at = 4; at < good[0].size(); at += 7) {
      std::string changed = good[0];
      changed[at] = static_cast<char>(changed[at] ^ 1);
      b.hear({changed});
    }
    b.hear({good[0].substr(0, good[0].size() - 1)});
    CHECK(b.sibling().messages == 0);
    CHECK(b.queue(0) == 0);

    b.hear(good);
    b.hear(good);
    CHECK(b.refused(Refusal::kRepeated) == 1);
    a.clock -= 121'000;
    a.replicas->tick(a.now);
    b.hear(a.take());
    CHECK(b.refused(Refusal::kLate) == 1);
    CHECK(b.sibling().messages == 1);
  }

  TEST_CASE("messages of a former incarnation are refused, and its requests are forgotten") {
    One before;
    One after(secrets_of("0123456789abcdef-one"), 1'005'000);
    One b;
    b.clock = 1'010'000;
    const auto request = before.place(0, words(40'000, 'a'));
    b.hear(before.take());
    CHECK(b.queue(0) > 0.5);

    after.replicas->tick(after.now);
    b.hear(after.take());
    CHECK(b.queue(0) == 0);
    before.replicas->tick(before.now);
    b.hear(before.take());
    CHECK(b.refused(Refusal::kRepeated) == 1);
    CHECK(b.queue(0) == 0);
  }

  TEST_CASE("a router recognizes its own address, and two addresses of one other router") {
    One a;
    One b;
    a.replicas->tick(a.now);
    a.hear(a.take());
    CHECK(a.sibling().state == Sibling::State::kSelf);

    const std::vector<std::string> both = {"x:1", "y:1"};
    b.replicas->set_addresses(both, b.now);
    const auto request = a.place(0, words(40'000, 'a'));
    const std::vector<std::string> messages = a.take();
    b.hear(messages);
    const double queue = b.queue(0);
    for (const std::string& each : messages) b.replicas->arrived("y:1", bytes_of(each), b.now);
    CHECK(b.replicas->siblings().at("y:1").state == Sibling::State::kDuplicate);
    CHECK(b.queue(0) == queue);
    // Its requests go with its address.
    b.replicas->set_addresses(std::vector<std::string>(), b.now);
    CHECK(b.queue(0) == 0);
  }

  TEST_CASE("what one router learns is known to the other, within a rate") {
    One a;
    One b;
    const std::string text = words(4'000, 'a');
    learn(a, text, 100, 60);
    b.hear(a.take());
    CHECK(known_of(b, text).keys == known_of(a, text).keys);
    CHECK(known_of(b, text).keys.size() == 60);
    CHECK(b.sibling().learned == 1);

    // 8 MB may be sent at once.
    const std::string longer = words(4'000, 'b');
    for (std::uint64_t i = 0; i < 30; ++i) learn(a, longer, i * 100'000, 60'000);
    b.hear(a.take());
    CHECK(b.sibling().learned < 20);
    CHECK(b.sibling().learned > 10);
    b.hear({});
    CHECK(json::parse("{" + b.replicas->health(b.now) + "\"x\":1}")["replicas"][0]["texts"] ==
          b.sibling().learned);
  }

  TEST_CASE("engines that only one of them has are counted") {
    One a;
    One b;
    b.routing->fleet().set_engines(std::span(b.engines).first(1), b.now);
    const auto request = a.place(1, words(40'000, 'a'));
    b.hear(a.take());
    CHECK(b.sibling().unknown_engines == 1);
    CHECK(b.sibling().placements == 0);
  }

  TEST_CASE("a snapshot carries every text, in parts, for the router that asked for it") {
    One a;
    One b;
    std::vector<std::string> texts;
    for (std::uint64_t i = 0; i < 40; ++i) {
      texts.push_back(words(4'000, static_cast<char>('a' + i % 26)) + std::to_string(i));
      learn(a, "text " + std::to_string(i) + texts.back(), i * 1000, 900);
    }
    (void)a.take();
    const std::string nonce(32, 'a');
    SnapshotWriter writer(*a.replicas, nonce);
    std::string all;
    std::size_t parts = 0;
    for (std::string part = writer.next(); !part.empty(); part = writer.next()) {
      all += part;
      ++parts;
    }
    CHECK(parts > 1);

    SnapshotReader reader(*b.replicas, nonce, a.replicas->router());
    for (std::size_t at = 0; at < all.size(); at += 1000) {
      REQUIRE(reader.feed(std::string_view(all).substr(at, 1000), b.now));
    }
    CHECK(reader.is_complete());
    CHECK(reader.texts() == 40);
    for (std::uint64_t i = 0; i < 40; ++i) {
      CHECK(known_of(b, "text " + std::to_string(i) + texts[i]).keys.size() == 900);
    }

    One c;
    SnapshotReader other_nonce(*c.replicas, std::string(32, 'b'), a.replicas->router());
    CHECK_FALSE(other_nonce.feed(all, c.now));
    SnapshotReader other_router(*c.replicas, nonce, c.replicas->router());
    CHECK_FALSE(other_router.feed(all, c.now));
    std::string changed = all;
    changed[200] = static_cast<char>(changed[200] ^ 1);
    SnapshotReader damaged(*c.replicas, nonce, a.replicas->router());
    CHECK_FALSE(damaged.feed(changed, c.now));
    SnapshotReader cut(*c.replicas, nonce, a.replicas->router());
    CHECK(cut.feed(std::string_view(all).substr(0, all.size() - 1), c.now));
    CHECK_FALSE(cut.is_complete());
  }

  TEST_CASE("a snapshot is without ranks that another router's snapshot is still completing") {
    One one;
    KvFleet::Rank& rank = one.publish(0);
    REQUIRE(rank.gives_credit());
    constexpr std::size_t kBlocks = 3 * index::Adoption::kSlice;
    std::vector<index::Key> keys;
    for (std::uint64_t hash = 1; hash <= kBlocks; ++hash) keys.push_back(index::key_of(0, hash));
    const std::string nonce(32, 'a');

    SnapshotWriter before(*one.replicas, nonce);
    rank.adoption.begin(keys);
    CHECK(one.routing->work());
    SnapshotWriter during(*one.replicas, nonce);
    CHECK(blocks_of(one, during, nonce).empty());
    const auto broken = blocks_of(one, before, nonce);
    REQUIRE(broken.size() == 1);
    CHECK(broken[0].part == SharedBlocks::Part::kVoid);
    CHECK(broken[0].keys.empty());

    while (one.routing->work()) {
    }
    SnapshotWriter after(*one.replicas, nonce);
    const auto whole = blocks_of(one, after, nonce);
    std::size_t count = 0;
    for (const SharedBlocks& each : whole) count += each.keys.size();
    CHECK(count == kBlocks);
    REQUIRE(!whole.empty());
    CHECK(whole.back().part == SharedBlocks::Part::kLast);
  }

  TEST_CASE("the target of a snapshot has a nonce of 32 hexadecimal digits") {
    CHECK(nonce_of("/index/snapshot?0123456789abcdef0123456789abcdef") ==
          "0123456789abcdef0123456789abcdef");
    CHECK(nonce_of("/index/snapshot").empty());
    CHECK(nonce_of("/index/snapshot?0123").empty());
    CHECK(nonce_of("/index/snapshot?0123456789ABCDEF0123456789ABCDEF").empty());
    CHECK(nonce_of("/index/snapshot/0123456789abcdef0123456789abcdef").empty());
  }

  TEST_CASE("records of a kind that is unknown here are left out") {
    std::string records;
    append_record(records, SharedEnd{7});
    records += std::string("\x63\x02\x00\x00\x00zz", 7);
    append_record(records, SharedEnd{8});
    const auto read = read_records(bytes_of(records));
    REQUIRE(read);
    CHECK(read->size() == 2);
    CHECK_FALSE(read_records(bytes_of(records.substr(0, records.size() - 1))));
  }
}

}  // namespace
}  // namespace pegaflow::router
