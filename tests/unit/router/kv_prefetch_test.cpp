#include "router/kv/kv_prefetch.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "index/key.h"
#include "router/kv/kv_routing.h"

namespace pegaflow::router {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr const char* kServerA = "http://a:50061";
constexpr const char* kServerB = "http://b:50061";
constexpr std::size_t kBlocks = 256;

/// The full key of a block whose hash ends in `low`.
BlockKey full_key(std::uint64_t low) {
  BlockKey key;
  key.bytes.fill(std::byte{0xA5});
  for (std::size_t i = 0; i < 8; ++i) key.bytes.at(31 - i) = static_cast<std::byte>(low >> (8 * i));
  return key;
}

std::string words(std::size_t bytes, char letter) {
  std::string text;
  while (text.size() < bytes) text += std::string(7, letter) + std::to_string(text.size()) + ' ';
  return text;
}

/// Engines on the nodes A and B, which have a pool each; A's engine publishes events.
class Rig {
 public:
  explicit Rig(std::size_t key_bytes = 1 << 20, bool has_disks = false,
               std::vector<Role> roles = {Role::kDecode, Role::kDecode},
               std::uint32_t pool_tokens = 16)
      : block_tokens(pool_tokens) {
    KvStreams streams{
        .add = [](index::StreamId, const index::EventSocket::Stream&) { return Result<void>(); },
        .remove = [](index::StreamId) {},
        .replay = [](index::StreamId, std::uint64_t, std::uint64_t) { return Result<void>(); }};
    routing =
        KvRouting::create(
            {.index_blocks = 65'536, .text_bytes = 1 << 20, .seed = 7, .key_bytes = key_bytes},
            std::move(streams))
            .value();
    const std::vector<std::string> urls = {"http://a:1", "http://b:1", "http://b:2"};
    for (std::size_t i = 0; i < roles.size(); ++i) {
      engines.push_back(std::make_shared<Engine>(EngineUrl::parse(urls[i]).value(), roles[i],
                                                 Breaker::Options()));
    }
    routing->fleet().set_engines(engines, now);
    KvPools& pools = routing->pools();
    pools.set_servers({EngineUrl::parse(kServerA).value(), EngineUrl::parse(kServerB).value()});
    for (const auto& [url, digit] : {std::pair(kServerA, '1'), std::pair(kServerB, '2')}) {
      LinksPage page{.node = std::string(32, digit), .has_disks = has_disks};
      page.engines.push_back(
          {.instance = "i", .space = "abcd", .block_bytes = 2048, .block_tokens = block_tokens});
      pools.set_links(url, page);
      pools.answered(url, "abcd", list({}));
    }
    index::EventAddress address;
    address.endpoint = "tcp://a:5557";
    routing->fleet().set_addresses(engines[0]->id, {address}, "", now);
    index::Arrival arrival;
    arrival.stream = 1;
    arrival.kind = index::Arrival::Kind::kConnected;
    routing->fleet().arrive(std::move(arrival), now);
  }

  [[nodiscard]] PoolPage list(const std::vector<std::uint64_t>& lows) const {
    PoolPage page{.server = std::string(16, 's'),
                  .generation = 1,
                  .is_list = true,
                  .block_tokens = block_tokens};
    for (const std::uint64_t low : lows) {
      page.changes.push_back({low, false});
      page.keys.push_back(full_key(low));
    }
    return page;
  }
  void change_pool(const char* server, const std::vector<std::uint64_t>& lows, bool is_gone) {
    PoolPage page = list(lows);
    page.is_list = false;
    for (PoolPage::Change& change : page.changes) change.is_gone = is_gone;
    routing->pools().answered(server, "abcd", page);
  }

  /// Engine A has served the text, and knows its blocks no longer.
  void teach(const std::string& text) {
    const auto one = request(text);
    routing->accept({engines[0]->id, 0}, "least-load", *one, Role::kDecode, now);
    routing->sent(*one, *engines[0], now);
    publish(index::EventKind::kStored, one->session);
    now += milliseconds(100);
    routing->first_token(*one, now);
    routing->finished(*one, now);
    publish(index::EventKind::kCleared, {});
    now += seconds(60);
    routing->tick(now);
  }
  void publish(index::EventKind kind, std::string_view session) {
    index::Arrival arrival;
    arrival.stream = 1;
    arrival.kind = index::Arrival::Kind::kLive;
    arrival.sequence = sequence++;
    index::KvEvent event;
    event.kind = kind;
    event.session_id = session;
    if (kind == index::EventKind::kStored) {
      event.block_size = 16;
      arrival.batch.hashes = blocks();
      event.hashes = arrival.batch.hashes;
    }
    arrival.batch.events.push_back(event);
    routing->fleet().arrive(std::move(arrival), now);
  }

  static std::vector<std::uint64_t> blocks() {
    std::vector<std::uint64_t> all;
    for (std::size_t i = 0; i < kBlocks; ++i) all.push_back(1'000 + i);
    return all;
  }
  std::unique_ptr<KvRequest> request(const std::string& text) {
    return routing->begin({.root = 1, .text = text, .tokens = {}}, "m", "");
  }
  /// A request with the text that is sent to an engine.
  std::unique_ptr<KvRequest> send(const std::string& text, std::size_t engine) {
    auto one = request(text);
    const std::vector<Candidate> only = {{engines[engine]->id, 0}};
    REQUIRE(routing->choose(only, *one, Role::kDecode, now) == 0);
    routing->sent(*one, *engines[engine], now);
    return one;
  }
  /// The text is announced, and its blocks are being fetched to engine A's node.
  PrefetchOrder announce(const std::string& text) {
    const auto one = request(text);
    auto made = routing->announce(std::vector<Candidate>{{engines[0]->id, 0}}, *one, now);
    REQUIRE(made);
    routing->expect(*made, now);
    return std::move(*made);
  }
  json last_route() { return json::parse(routing->log().json(now))["routes"][0]; }

  const std::uint32_t block_tokens;  ///< Tokens of a block in the pools; 0: unknown.
  std::vector<std::shared_ptr<Engine>> engines;
  std::uint64_t sequence = 0;
  TimePoint now{seconds(1'000)};
  std::unique_ptr<KvRouting> routing;
};

const std::string kText = words(16'384, 'a');  // 256 blocks of 16 tokens of 4 bytes.

TEST_SUITE("kv_prefetch") {
  TEST_CASE("an announced request is expected where its blocks are fetched") {
    Rig rig;
    rig.teach(kText);
    rig.change_pool(kServerB, Rig::blocks(), false);
    const std::vector<Candidate> only = {{rig.engines[0]->id, 0}};
    const auto one = rig.request(kText);

    const auto made = rig.routing->announce(only, *one, rig.now);
    REQUIRE(made);
    CHECK(made->server == kServerA);
    CHECK(made->keys.size() == kBlocks);
    CHECK(rig.routing->placement_stats().inflight == 0);
    rig.routing->expect(*made, rig.now);

    // The request has more text, and its engine may not be told to compute.
    const auto next = rig.send(kText + words(512, 'b'), 0);
    CHECK_FALSE(rig.routing->prefetch_for(*next));
    CHECK(next->placed->terms.local_blocks >= kBlocks - 16);
    CHECK(next->placed->hint != R"("compute")");
    rig.routing->finished(*next, rig.now);
  }

  TEST_CASE("an announced request is expected for 8 s, and not beyond 16 s") {
    // Fetched blocks may be evicted at any time.
    for (const auto& [after, is_expected] :
         {std::pair(7, true), std::pair(8, true), std::pair(17, false)}) {
      CAPTURE(after);
      Rig rig;
      rig.teach(kText);
      rig.change_pool(kServerB, Rig::blocks(), false);
      rig.announce(kText);
      rig.now += seconds(after);
      const auto one = rig.send(kText + words(512, 'b'), 0);
      CHECK(one->placed->terms.gpu_blocks == 0);
      CHECK((one->placed->terms.local_blocks >= kBlocks - 16) == is_expected);
      CHECK(rig.routing->prefetch_for(*one).has_value() != is_expected);
    }
  }

  TEST_CASE("a new engine inherits nothing that was announced at one that is gone") {
    Rig rig;
    rig.teach(kText);
    rig.change_pool(kServerB, Rig::blocks(), false);
    const index::EngineId place = rig.routing->fleet().find_rank(rig.engines[0]->id, 0)->place;
    rig.announce(kText);
    const auto next = std::make_shared<Engine>(EngineUrl::parse("http://a:2").value(),
                                               Role::kDecode, Breaker::Options());
    rig.routing->fleet().set_engines(std::vector{rig.engines[1]}, rig.now);
    rig.engines[0] = next;
    rig.routing->fleet().set_engines(rig.engines, rig.now);
    rig.routing->pools().attach_engines();
    REQUIRE(rig.routing->fleet().find_rank(next->id, 0)->place == place);
    const auto one = rig.send(kText + words(512, 'b'), 0);
    CHECK(one->placed->terms.local_blocks == 0);
    CHECK(rig.routing->prefetch_for(*one));
  }

  TEST_CASE("a request whose announced blocks are not fetched after all is not expected") {
    using State = PrefetchState;
    for (const auto& [state, is_expected] :
         {std::pair(State::kSent, true), std::pair(State::kAccepted, true),
          std::pair(State::kRefused, false), std::pair(State::kFailed, false),
          std::pair(State::kBusy, false), std::pair(State::kSuspended, false)}) {
      CAPTURE(to_string(state));
      Rig rig;
      rig.teach(kText);
      rig.change_pool(kServerB, Rig::blocks(), false);
      const PrefetchOrder order = rig.announce(kText);
      rig.routing->prefetch_became(order, state);
      const auto one = rig.send(kText + words(512, 'b'), 0);
      CHECK((one->placed->terms.local_blocks > 0) == is_expected);
      CHECK(rig.routing->prefetch_for(*one).has_value() != is_expected);
    }
  }

  TEST_CASE("announced blocks that a server did not find do not count against the engine") {
    Rig rig(1 << 20, true);
    rig.teach(kText);
    rig.change_pool(kServerB, Rig::blocks(), false);
    rig.change_pool(kServerB, Rig::blocks(), true);
    const KvFleet::Rank& rank = *rig.routing->fleet().find_rank(rig.engines[0]->id, 0);
    const std::string text = kText + words(4'096, 'b');
    for (int i = 0; i < 70; ++i) {
      CAPTURE(i);
      rig.announce(text);
      const auto one = rig.send(text, 0);
      REQUIRE(one->placed->predicted_cached >= 16 * (kBlocks - 16));
      rig.now += milliseconds(100);
      rig.routing->first_token(*one, rig.now);
      rig.routing->reported(*one, 5'120, 0, rig.now);
      rig.routing->finished(*one, rig.now);
      rig.now += seconds(60);
      rig.routing->tick(rig.now);
    }
    CHECK(rank.source.stats().resyncs == 0);
    CHECK(rank.source.gives_credit());
  }

  TEST_CASE("an announced request whose blocks are at no other node has nothing to fetch") {
    Rig rig;
    const std::vector<Candidate> only = {{rig.engines[0]->id, 0}};
    CHECK_FALSE(rig.routing->announce(only, *rig.request(kText), rig.now));

    rig.teach(kText);
    rig.change_pool(kServerA, Rig::blocks(), false);
    CHECK_FALSE(rig.routing->announce(only, *rig.request(kText), rig.now));
  }

  TEST_CASE("the server of the chosen engine fetches what another node's pool has") {
    Rig rig;
    rig.teach(kText);
    rig.change_pool(kServerA, Rig::blocks(), false);
    const auto one = rig.send(kText + words(512, 'b'), 1);
    const auto order = rig.routing->prefetch_for(*one);
    REQUIRE(order);
    CHECK(order->server == kServerB);
    CHECK(order->keys.size() >= kBlocks - 8);
    CHECK(order->keys[0] == full_key(1'000));
    CHECK(order->keys[7] == full_key(1'007));

    const json body = json::parse(order->body("r1-1"));
    CHECK(body["namespace"] == "abcd");
    CHECK(body["id"] == "r1-1");
    CHECK(body["sources"][0]["node"] == std::string(32, '1'));
    CHECK(body["keys"].get<std::string>().substr(0, 64) == to_string(full_key(1'000)));
    CHECK(body["keys"].get<std::string>().size() == 64 * order->keys.size());
    rig.routing->finished(*one, rig.now);
  }

  TEST_CASE("of a prompt that ends with a block the last block is fetched too") {
    Rig rig;
    rig.teach(kText);
    rig.change_pool(kServerA, Rig::blocks(), false);
    // As with a prompt of token ids, whose blocks are computed.
    const auto one = rig.request(kText);
    one->known.keys.clear();
    for (const std::uint64_t low : Rig::blocks()) one->known.keys.push_back(index::key_of(0, low));
    one->prompt_tokens = kBlocks * 16;
    const std::vector<Candidate> only = {{rig.engines[1]->id, 0}};
    REQUIRE(rig.routing->choose(only, *one, Role::kDecode, rig.now) == 0);
    rig.routing->sent(*one, *rig.engines[1], rig.now);
    CHECK(one->placed->terms.reach_blocks == kBlocks - 1);  // The last token is computed.
    const auto order = rig.routing->prefetch_for(*one);
    REQUIRE(order);
    CHECK(order->keys.size() == kBlocks);
    CHECK(order->keys.back() == full_key(1'000 + kBlocks - 1));
    rig.routing->finished(*one, rig.now);
  }

  TEST_CASE("blocks of the engine's own cache and pool are not fetched") {
    Rig rig;
    rig.teach(kText);
    rig.change_pool(kServerA, Rig::blocks(), false);
    rig.change_pool(kServerB, Rig::blocks(), false);
    CHECK(!rig.routing->prefetch_for(*rig.send(kText + "x", 1)));
    CHECK(rig.last_route()["prefetch"].is_null());
  }

  TEST_CASE("blocks of disks are fetched too: what no pool has, if a node has disks") {
    for (const bool has_disks : {false, true}) {
      Rig rig(1 << 20, has_disks);
      rig.teach(kText);
      rig.change_pool(kServerA, Rig::blocks(), false);
      rig.change_pool(kServerA, Rig::blocks(), true);
      // With more text than is known: another node may have more than the router knows.
      const auto one = rig.send(kText + words(4'096, 'b'), 1);
      const auto order = rig.routing->prefetch_for(*one);
      CHECK(order.has_value() == has_disks);
      if (order) CHECK(order->keys.size() >= kBlocks - 8);
      if (order) CHECK(order->sources.empty());
    }
  }

  TEST_CASE("a pool that does not tell the tokens of a block has those of its engine's events") {
    Rig rig(1 << 20, true, {Role::kDecode, Role::kDecode}, 0);
    rig.teach(kText);
    rig.change_pool(kServerA, Rig::blocks(), false);
    const auto found = rig.send(kText + "x", 0);
    CHECK(found->placed->terms.local_blocks >= kBlocks - 8);
    rig.routing->finished(*found, rig.now);

    rig.change_pool(kServerA, Rig::blocks(), true);
    const auto one = rig.send(kText + words(4'096, 'b'), 0);
    const auto order = rig.routing->prefetch_for(*one);
    REQUIRE(order);
    CHECK(!order->keys.empty());
    rig.routing->finished(*one, rig.now);
  }

  TEST_CASE("without full keys there is no prefetch, and it is counted") {
    Rig rig(KvKeys::kLeastBytes);
    rig.teach(kText);
    rig.change_pool(kServerA, Rig::blocks(), false);
    std::vector<std::uint64_t> others;
    for (std::uint64_t i = 0; i < 4'000; ++i) others.push_back(1'000'000 + i);
    rig.change_pool(kServerB, others, false);
    CHECK(!rig.routing->prefetch_for(*rig.send(kText + "x", 1)));
    CHECK(rig.last_route()["prefetch"]["state"] == "unknown_keys");
  }

  TEST_CASE("without the option servers are asked for short keys, and nothing is prefetched") {
    Rig rig(0);
    CHECK(rig.routing->pools().next_target(kServerA, "abcd").ends_with("&keys=8"));
    rig.teach(kText);
    rig.change_pool(kServerA, Rig::blocks(), false);
    CHECK(!rig.routing->prefetch_for(*rig.send(kText + "x", 1)));
    CHECK(Rig().routing->pools().next_target(kServerA, "abcd").ends_with("&keys=32"));
  }

  TEST_CASE("an outcome is shown with the decision and counted") {
    Rig rig;
    rig.teach(kText);
    rig.change_pool(kServerA, Rig::blocks(), false);
    const auto one = rig.send(kText + "x", 1);
    const auto order = rig.routing->prefetch_for(*one);
    REQUIRE(order);
    rig.routing->prefetch_became(*order, PrefetchState::kAccepted);
    rig.routing->prefetch_was_cancelled(*order);
    CHECK(rig.last_route()["prefetch"] ==
          json({{"state", "accepted"}, {"blocks", order->keys.size()}, {"cancelled", true}}));
    CHECK(rig.routing->prefetch_counts().blocks == order->keys.size());
    CHECK(rig.routing->prefetch_counts().cancelled == 1);
  }
}

TEST_SUITE("kv_pairs") {
  constexpr std::size_t kPrefill = 0;
  const std::vector<Role> kRoles = {Role::kPrefill, Role::kDecode, Role::kDecode};

  struct Pairs : Rig {
    Pairs() : Rig(1 << 20, false, kRoles) {}
    bool pair(KvRequest& request) {
      return routing->choose_pair(of({kPrefill}), of({1, 2}), request, now);
    }
    std::vector<Candidate> of(const std::vector<std::size_t>& numbers) const {
      std::vector<Candidate> all;
      for (const std::size_t number : numbers) all.push_back({engines[number]->id, 0});
      return all;
    }
    /// Seconds of prefill wait at the engine.
    void load(std::size_t engine) {
      waiting.push_back(request(words(262'144, 'z')));
      routing->accept(of({engine})[0], "least-load", *waiting.back(), Role::kDecode, now);
      routing->sent(*waiting.back(), *engines[engine], now);
    }
    std::vector<std::unique_ptr<KvRequest>> waiting;
  };

  TEST_CASE("an idle decode engine computes the prompt itself, a busy one does not") {
    Pairs rig;
    auto one = rig.request(kText);
    REQUIRE(rig.pair(*one));
    CHECK(one->pair->skips_prefill);
    rig.load(1);
    rig.load(2);
    one = rig.request(kText);
    REQUIRE(rig.pair(*one));
    CHECK(!one->pair->skips_prefill);
    CHECK(one->pair->prefill == rig.engines[kPrefill]->id);
    CHECK(one->pair->cost < one->pair->alone_cost);
    CHECK(rig.routing->stats().pairs == 1);
    CHECK(rig.routing->stats().skipped_prefills == 1);
  }

  TEST_CASE("the pair is used by the next choice only, and shown with it") {
    Pairs rig;
    rig.load(1);
    rig.load(2);
    const auto one = rig.request(kText);
    REQUIRE(rig.pair(*one));
    REQUIRE(rig.routing->choose(rig.of({kPrefill}), *one, Role::kPrefill, rig.now) == 0);
    CHECK(!one->pair);
    CHECK(rig.last_route()["pair"]["skips_prefill"] == false);
    REQUIRE(rig.routing->choose(rig.of({kPrefill}), *one, Role::kPrefill, rig.now) == 0);
    CHECK(rig.last_route()["pair"].is_null());
  }

  TEST_CASE("after a prefill the decode engine is one whose node is near") {
    Pairs rig;
    const auto one = rig.request(kText);
    one->is_prefilled = true;
    CHECK(!rig.routing->choose_after_prefill(rig.of({1, 2}), *one, rig.now));
    one->prefilled_by = rig.engines[kPrefill]->id;
    const auto chosen = rig.routing->choose_after_prefill(rig.of({1, 2}), *one, rig.now);
    REQUIRE(chosen);
    REQUIRE(one->choice);
    CHECK(one->choice->engine == rig.engines[1 + *chosen]->id);
    CHECK(rig.last_route()["policy"] == "kv-aware");
  }

  TEST_CASE("without servers the legs are decided one by one") {
    Pairs rig;
    rig.routing->pools().set_servers({});
    const auto one = rig.request(kText);
    CHECK(!rig.pair(*one));
    CHECK(!one->pair);
  }
}

}  // namespace
}  // namespace pegaflow::router
