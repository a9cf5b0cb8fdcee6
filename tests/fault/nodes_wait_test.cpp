// A decode engine waits for the save of a prefill engine on another node: real servers, some of
// which die or hang meanwhile. In every case it is notified in time, and can then load the sealed
// blocks.
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/support/forked.h"
#include "tests/support/nodes.h"
#include "tests/support/slow_device.h"

namespace pegaflow::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::size_t kPiece = std::size_t{8} << 10;
constexpr std::size_t kBlocks = 64;
constexpr Id128 kScheduler{7, 7};

/// The number of its 32 hexadecimal digits.
Id128 id_of(const std::string& text) {
  return {std::stoull(text.substr(0, 16), nullptr, 16), std::stoull(text.substr(16), nullptr, 16)};
}

TestEngine::Options prefill_options(const ServerProcess& server) {
  TestEngine::Options options;
  options.socket = server.socket();
  options.instance = "prefill";
  options.session.scheduler = kScheduler;
  return options;
}

/// A prefill engine whose copies are held back until a test allows them.
struct Prefill {
  explicit Prefill(const ServerProcess& server) : engine(prefill_options(server), memory, device) {
    engine.scheduler = kScheduler;
    engine.wait_ready();
    device.hold();
  }
  ~Prefill() { device.allow_all(); }

  EngineMemory memory = engine_memory(2, kPiece, kBlocks);
  SlowDevice device;
  TestEngine engine;
};

/// P's node and D's, which sends requests to P's. Waits are short unless a test sets another limit.
struct Two {
  explicit Two(std::vector<std::string> more_of_d = {}, bool with_prefill = true)
      : p(node_options(at[0], {at[0]})),
        d(node_options(at[1], {at[0]}, std::move(more_of_d))),
        on_p(with_prefill ? std::make_unique<Prefill>(p) : nullptr),
        on_d(d, kPiece, kBlocks) {
    REQUIRE(sees(d, at[0]));
  }

  [[nodiscard]] Id128 node_of_p() const { return on_p->engine.session().status().server; }
  /// A wait of D's engine, which P's node answers or not.
  CacheSession::Ticket wait(const Id128& node, std::uint64_t job, Duration patience = seconds(10)) {
    return on_d.engine->session().await_job(node, {kScheduler, job}, patience).value();
  }
  /// Returns once P's node has it.
  [[nodiscard]] bool is_waiting() const {
    return d.metric_becomes("pegaflow_peer_job_waits", 1) &&
           p.metric_becomes("pegaflow_job_waits", 1);
  }
  Result<std::uint64_t> answer(CacheSession::Ticket ticket) {
    auto answer = on_d.engine->session().take_wait(ticket, kHang);
    REQUIRE(answer);
    return *answer;
  }
  Errc error(CacheSession::Ticket ticket) {
    const auto answered = answer(ticket);
    REQUIRE_FALSE(answered);
    return answered.error().code;
  }
  [[nodiscard]] double waits(const std::string& result) const {
    return d.metric("pegaflow_peer_job_waits_total{result=\"" + result + "\"}");
  }

  std::vector<std::string> at = node_addresses(2);
  ServerProcess p;
  ServerProcess d;
  std::unique_ptr<Prefill> on_p;
  EngineAt on_d;
};

TEST_SUITE("waits across nodes") {
  TEST_CASE("an engine is notified when a job of another node is sealed, and then loads it") {
    Two two;
    const auto ticket = two.wait(two.node_of_p(), 2);
    REQUIRE(two.on_p->engine.start_save(1, numbers_from(1, 10), blocks_from(0, 10)));
    REQUIRE(two.on_p->engine.start_save(2, numbers_from(11, 10), blocks_from(10, 10)));
    REQUIRE(two.is_waiting());
    CHECK_FALSE(two.on_d.engine->session().take_wait(ticket));
    CHECK(two.on_d.engine->lookup(numbers_from(1, 20)).value().blocks == 0);

    two.on_p->device.allow_all();

    CHECK(two.answer(ticket));
    const auto claimed = two.on_d.engine->claim(numbers_from(1, 20)).value();
    CHECK(claimed.coming == 20);
    CHECK(two.on_d.engine->load(claimed.token, blocks_from(0, 20)).blocks == 20);
    CHECK(two.on_d.engine->wrong_blocks(numbers_from(1, 20), blocks_from(0, 20)) == 0);
    CHECK(two.waits("over") == 1);
    CHECK(two.d.metric("pegaflow_peer_job_waits") == 0);
    CHECK(two.p.metric("pegaflow_peer_awaits_total") == 1);
    // A wait for an ended job returns at once, and reports the last one that is over.
    CHECK(two.answer(two.wait(two.node_of_p(), 1)).value() == 2);

    const auto health = nlohmann::json::parse(two.d.get("/health").body).at("nodes");
    CHECK(health.at("peers").at(0).at("node") == to_string(two.node_of_p()));
    CHECK(health.at("node") == to_string(two.on_d.engine->session().status().server));
  }

  TEST_CASE("a wait for an unknown job ends at once") {
    Two two;
    CHECK(two.error(two.wait(Id128::random(), 1)) == Errc::kGone);
    CHECK(two.waits("unknown") == 1);
    // The node exists, that scheduler does not.
    const auto stranger =
        two.on_d.engine->session().await_job(two.node_of_p(), {{8, 8}, 1}, seconds(10));
    CHECK(two.error(stranger.value()) == Errc::kGone);
    CHECK(two.waits("gone") == 1);
    // D's own node is the target.
    CHECK(two.error(two.wait(two.on_d.engine->session().status().server, 1)) == Errc::kGone);
    CHECK(two.waits("unknown") + two.waits("gone") == 2);
  }

  TEST_CASE("a client of an older version receives nothing about other nodes") {
    Two two;
    LinkOptions link = patient_link();
    link.socket_path = two.d.socket();
    link.instance = "decode";
    link.maximum_version = 2;
    const auto old = CacheSession::start(link).value();
    REQUIRE(old->wait_for(LinkState::kReady, kHang));
    const auto ticket = old->await_job(two.node_of_p(), {kScheduler, 1}, seconds(10)).value();
    CHECK(old->take_wait(ticket, kHang)->error().code == Errc::kGone);
    CHECK(two.p.metric("pegaflow_peer_awaits_total") == 0);
  }

  TEST_CASE("the wait ends at its deadline") {
    Two two({"--peer-deadline", "2s"});
    // P's node responds after three quarters of it.
    CHECK(two.error(two.wait(two.node_of_p(), 1, seconds(1))) == Errc::kTimeout);
    CHECK(two.p.metric(R"(pegaflow_job_waits_total{result="timeout"})") == 1);
    CHECK(two.waits("timeout") == 1);
    // The node itself responds.
    CHECK(two.d.metric("pegaflow_peer_late_total{peer=\"" + two.at[0] + "\"}") == 0);
  }

  TEST_CASE("the wait ends when the prefill engine leaves") {
    Two two;
    const auto left = two.wait(two.node_of_p(), 1);
    REQUIRE(two.is_waiting());
    const Id128 node = two.node_of_p();
    two.on_p->engine.close_session();
    CHECK(two.error(left) == Errc::kGone);
    CHECK(two.error(two.wait(node, 1)) == Errc::kGone);
    CHECK(two.waits("gone") == 2);
  }

  TEST_CASE("the wait ends when the prefill engine is killed") {
    const auto at = node_addresses(2);
    const ServerProcess p(node_options(at[0], {at[0]}));
    const ServerProcess d(node_options(at[1], {at[0]}));
    // A process of its own, forked before this one has threads.
    Forked killed([&]() {
      static Prefill* const engine = new Prefill(p);  // Lives as long as the process.
      REQUIRE(engine->engine.start_save(1, numbers_from(1, 10), blocks_from(0, 10)));
    });
    EngineAt on_d(d, kPiece, kBlocks);
    REQUIRE(sees(d, at[0]));
    const auto health = nlohmann::json::parse(d.get("/health").body).at("nodes");
    const Id128 node = id_of(health.at("peers").at(0).at("node").get<std::string>());
    REQUIRE(p.metric_becomes("pegaflow_reservations", 1));
    const auto ticket =
        on_d.engine->session().await_job(node, {kScheduler, 1}, seconds(10)).value();
    REQUIRE(p.metric_becomes("pegaflow_job_waits", 1));

    killed.kill();

    const auto answer = on_d.engine->session().take_wait(ticket, kHang);
    REQUIRE(answer);
    CHECK(answer->error().code == Errc::kGone);
    CHECK(on_d.engine->claim(numbers_from(1, 10)).value().blocks == 0);
    CHECK(d.metric("pegaflow_peer_job_waits") == 0);
  }

  TEST_CASE("the wait ends when the node is killed, and its next incarnation is another one") {
    Two two;
    const Id128 node = two.node_of_p();
    const auto ticket = two.wait(node, 1);
    REQUIRE(two.is_waiting());
    two.p.kill();
    CHECK(two.error(ticket) == Errc::kGone);
    CHECK(two.waits("gone") == 1);

    two.p.start();
    REQUIRE(sees(two.d, two.at[0]));
    CHECK(two.error(two.wait(node, 1)) == Errc::kGone);
    CHECK(two.waits("unknown") == 1);
    CHECK(two.p.metric("pegaflow_peer_awaits_total") == 0);
  }

  TEST_CASE("a stopped node: a wait ends at its deadline, and the node receives no further one") {
    Two two({"--peer-deadline", "50ms"});
    const Id128 node = two.node_of_p();
    const auto patient = two.wait(node, 1);
    REQUIRE(two.is_waiting());
    two.p.signal(SIGSTOP);
    CHECK(two.error(two.wait(node, 1, milliseconds(200))) == Errc::kTimeout);
    // The node owes a response, so it receives no request before it is lost.
    CHECK(two.error(two.wait(node, 1, milliseconds(200))) == Errc::kBusy);
    CHECK(sees_no_more(two.d, two.at[0]));
    CHECK(two.error(patient) == Errc::kGone);
    CHECK(two.waits("gone") == 1);
    CHECK(two.error(two.wait(node, 1)) == Errc::kGone);
    CHECK(two.waits("unknown") == 1);

    two.p.signal(SIGCONT);
    REQUIRE(sees(two.d, two.at[0]));
    REQUIRE(two.on_p->engine.start_save(1, numbers_from(1, 4), blocks_from(0, 4)));
    two.on_p->device.allow_all();
    CHECK(two.answer(two.wait(node, 1)));
    CHECK(two.on_d.engine->claim(numbers_from(1, 4)).value().coming == 4);
  }

  TEST_CASE("no state is kept for a waiting node that dies") {
    Two two;
    static_cast<void>(two.wait(two.node_of_p(), 1));
    REQUIRE(two.is_waiting());
    two.d.kill();
    CHECK(two.p.metric_becomes("pegaflow_job_waits", 0));
    CHECK(two.p.metric(R"(pegaflow_job_waits_total{result="cancelled"})") == 1);
  }

  TEST_CASE("no state is kept for a waiting engine that dies") {
    Two two({"--peer-deadline", "100ms"});
    static_cast<void>(two.wait(two.node_of_p(), 1, seconds(1)));
    REQUIRE(two.p.metric_becomes("pegaflow_peer_awaits_total", 1));
    two.on_d.engine->close_session();
    CHECK(two.d.metric_becomes("pegaflow_peer_job_waits", 0));
    CHECK(two.p.metric_becomes("pegaflow_job_waits", 0));
  }
}

}  // namespace
}  // namespace pegaflow::testing
