// A pool that outlives its server: --keep, the keeper, and what the next server finds.
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "server/pool/keeper_link.h"
#include "server/pool/keeper_wire.h"
#include "tests/support/kinds_engine.h"
#include "tests/support/nodes.h"
#include "tests/support/server_process.h"
#include "tests/support/test_engine.h"
#include "tests/support/wake_ups.h"
#include "tests/support/wire_client.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {
namespace {

using server::keeper_path;
using server::keeper_state;
using server::release_keeper;

constexpr std::size_t kBlocks = 64;
constexpr std::size_t kBlockBytes = 16 * 1024;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

ServerProcess::Options keeping(std::vector<std::string> more = {}) {
  ServerProcess::Options options;
  options.pool_size = "8mb";
  options.arguments = {"--keep", "yes"};
  options.arguments.insert(options.arguments.end(), more.begin(), more.end());
  return options;
}

/// A server with a keeper, which ends with it.
struct KeptServer : ServerProcess {
  explicit KeptServer(std::vector<std::string> more = {}) : KeptServer(keeping(std::move(more))) {}
  explicit KeptServer(const Options& options) : ServerProcess(options) {}
  /// A node of a cluster.
  KeptServer(const std::string& address, const std::vector<std::string>& all)
      : ServerProcess(node_options(address, all, {"--keep", "yes"}, "8mb")) {}
  KeptServer(const KeptServer&) = delete;
  KeptServer& operator=(const KeptServer&) = delete;
  ~KeptServer() {
    try {
      kill();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // It has ended before.
    }
    const auto released = release_keeper(keeper());
    CHECK_MESSAGE(released.has_value(), (released ? "" : released.error().detail));
  }
  [[nodiscard]] std::filesystem::path keeper() const { return keeper_path(socket()); }
};

/// An engine that goes on while its server is restarted.
struct Engine {
  explicit Engine(const ServerProcess& server, const std::string& instance = "engine")
      : memory(engine_memory(2, kBlockBytes / 2, kBlocks)) {
    TestEngine::Options options;
    options.socket = server.socket();
    options.instance = instance;
    engine = std::make_unique<TestEngine>(std::move(options), memory, *device);
    engine->wait_ready();
  }
  void save(std::uint64_t first, std::size_t count) {
    CHECK_FALSE(engine->save(numbers_from(first, count), blocks_from(0, count)).error);
  }
  /// Loads blocks and compares them; returns the number that was found.
  std::size_t load(std::uint64_t first, std::size_t count) {
    const auto claimed = engine->claim(numbers_from(first, count));
    REQUIRE(claimed);
    if (claimed->token.is_none()) return 0;
    const std::vector<std::uint32_t> to = blocks_from(kBlocks / 2, claimed->blocks);
    const Mover::Finished loaded = engine->load(claimed->token, to);
    engine->session().unclaim(claimed->token);
    REQUIRE_FALSE(loaded.error);
    CHECK(loaded.failed_blocks.empty());
    CHECK(engine->wrong_blocks(numbers_from(first, claimed->blocks), to) == 0);
    return claimed->blocks;
  }

  EngineMemory memory;
  std::unique_ptr<HostDevice> device = HostDevice::create({.threads = 2}).value();
  std::unique_ptr<TestEngine> engine;
};

/// Ends the server as a crash does; returns when an engine uses the next one.
void kill_and_start(ServerProcess& server, Engine& engine) {
  server.kill();
  server.start();
  engine.engine->wait_ready();
}

/// A node that keeps its pool, with 20 blocks in it, and another node.
struct KeptNode {
  KeptNode() {
    REQUIRE(sees(kept, all[1]));
    engine.save(1, 20);
  }
  std::vector<std::string> all = node_addresses(2);
  KeptServer kept{all[0], all};
  ServerProcess other{node_options(all[1], all, {}, "8mb")};
  Engine engine{kept};
};

pid_t keeper_pid(const KeptServer& server) {
  const auto state = keeper_state(server.keeper());
  return state && *state ? (*state)->keeper_pid : -1;
}

harness::Child start_keeper(const ServerProcess& server) {
  auto child = harness::Child::start(
      {.command = {PEGA_KEEPER, "--addr", "unix:" + server.socket()}, .log_file = {}});
  REQUIRE(child);
  return std::move(*child);
}

/// The address at which this process has the pool mapped.
std::string mapping_of_pool() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (has(line, "memfd:pegaflow-pool")) return line.substr(0, line.find('-'));
  }
  return {};
}

TEST_SUITE("a kept pool") {
  TEST_CASE("after a kill the next server has the blocks, and an engine keeps its mapping") {
    KeptServer server;
    Engine engine(server);
    engine.save(1, 20);
    const std::string mapping = mapping_of_pool();
    REQUIRE_FALSE(mapping.empty());

    kill_and_start(server, engine);

    CHECK(mapping_of_pool() == mapping);
    CHECK(engine.load(1, 20) == 20);
    CHECK(server.metric("pegaflow_adopted_blocks") == 20);
    CHECK(server.metric("pegaflow_former_clients") == 0);
    engine.save(100, 10);
    CHECK(engine.load(100, 10) == 10);
  }

  TEST_CASE("a stop keeps the pool too, and --release frees it") {
    KeptServer server;
    {
      Engine engine(server);
      engine.save(1, 20);
    }
    CHECK(server.terminate() == 0);
    const auto state = keeper_state(server.keeper());
    REQUIRE(state.value());
    CHECK((*state)->pool_bytes == 8 << 20);
    CHECK((*state)->server_pid == 0);

    server.start();
    CHECK(server.metric("pegaflow_adopted_blocks") == 20);
    const Ran refused = run_server_binary({"--release", "--addr", "unix:" + server.socket()});
    CHECK(refused.exit_code == 1);
    CHECK(has(refused.output, "the server with pid " + std::to_string(server.pid())));
    CHECK(server.terminate() == 0);

    const Ran released = run_server_binary({"--release", "--addr", "unix:" + server.socket()});
    INFO(released.output);
    CHECK(released.exit_code == 0);
    CHECK(has(released.output, "released the pool of 8 MiB"));
    const Ran again = run_server_binary({"--release", "--addr", "unix:" + server.socket()});
    CHECK(again.exit_code == 1);
    CHECK(has(again.output, "no keeper listens at " + server.keeper().string()));
    server.start();
    CHECK(server.metric("pegaflow_adopted_blocks") == 0);
  }

  TEST_CASE("what a client may still write is not reused before it has quiesced or ended") {
    KeptServer server;
    auto io = kj::setupAsyncIo();
    WireClient client(io, server.socket());
    client.hello();
    const auto pool = client.register_rank("writer", kBlockBytes);
    REQUIRE(pool);
    const auto pages = client.reserve({client.process(), 1}, make_keys(1, 5));
    REQUIRE(pages);

    server.kill();
    server.start();

    CHECK(server.metric("pegaflow_former_clients") == 1);
    CHECK(server.metric("pegaflow_quarantine_slots{reason=\"reader_lost\"}") == 5);
    Engine engine(server);
    engine.save(1, 30);
    CHECK(engine.load(1, 30) == 30);
    CHECK(server.metric("pegaflow_quarantine_slots{reason=\"reader_lost\"}") == 5);

    // The same process reports that its copies have ended.
    WireClient next(io, server.socket());
    next.hello({.process = client.process(), .quiesced = true});
    CHECK(server.metric_becomes("pegaflow_former_clients", 0));
    CHECK(server.metric_becomes("pegaflow_quarantine_slots{reason=\"reader_lost\"}", 0));
    CHECK(engine.load(1, 30) == 30);
  }

  TEST_CASE("a reset ends with its generation whatever ends the server") {
    KeptServer server;
    Engine engine(server);
    engine.save(1, 20);
    REQUIRE(engine.engine->session().reset_cache(kHang));
    engine.save(50, 5);

    kill_and_start(server, engine);

    CHECK(engine.load(1, 20) == 0);
    CHECK(engine.load(50, 5) == 5);
    CHECK(server.metric("pegaflow_adopted_blocks") == 5);
  }

  TEST_CASE("a server that keeps no pool names the one that a keeper holds") {
    KeptServer server;
    server.kill();
    ServerProcess::Options plain;
    plain.pool_size = "4mb";
    plain.arguments = {"--addr", "unix:" + server.socket()};
    ServerProcess other(plain);

    CHECK(has(other.log(), "a keeper at " + server.keeper().string() + " holds a pool of 8 MiB"));
    other.kill();
    server.start();
    CHECK(server.metric("pegaflow_keeper") == 1);
  }

  TEST_CASE("a kept pool is given up if a disk's file stays locked that may write to it") {
    const TemporaryDirectory disk;
    const std::filesystem::path file = disk.path() / "cache";
    std::string path = file.string();
    ServerProcess::Options with_disk =
        keeping({"--pool-wait", "300ms", "--ssd-cache-capacity", "16mb", "--ssd-segment-size",
                 "1mb", "--ssd-drain", "0s"});
    SUBCASE("by its whole path") {}
    SUBCASE("by a path in the directory of the former server") {
      path = "cache";
      with_disk.command_prefix = {"env", "-C", disk.path().string()};
    }
    with_disk.arguments.insert(with_disk.arguments.end(), {"--ssd-cache-path", path});
    KeptServer server(with_disk);
    server.kill();
    UniqueFd locked(::open(file.c_str(), O_RDWR | O_CLOEXEC));
    REQUIRE(::flock(locked.get(), LOCK_EX) == 0);
    ServerProcess::Options without_disk =
        keeping({"--addr", "unix:" + server.socket(), "--pool-wait", "300ms"});
    ServerProcess next(without_disk);

    CHECK(has(next.log(), file.string() + " is locked"));
    CHECK(next.metric("pegaflow_adopted_blocks") == 0);
    next.kill();
    locked.reset();
    server.start();
  }

  TEST_CASE("a pool of another size is given up, with one line of the reason") {
    KeptServer server;
    {
      Engine engine(server);
      engine.save(1, 20);
    }
    server.kill();
    ServerProcess::Options larger = keeping({"--addr", "unix:" + server.socket()});
    larger.pool_size = "16mb";
    ServerProcess next(larger);

    CHECK(has(next.log(), "the kept pool has 8 MiB, --pool-size 16 MiB"));
    CHECK(next.metric("pegaflow_adopted_blocks") == 0);
    next.kill();
    server.start();  // For its end.
  }

  TEST_CASE("a new server waits for the end of the former one, and then refuses with its pid") {
    KeptServer server({"--pool-wait", "300ms"});
    const pid_t former = server.pid();
    server.signal(SIGSTOP);
    std::filesystem::remove(server.socket() + ".lock");

    const Ran second =
        run_server_binary({"--keep", "yes", "--addr", "unix:" + server.socket(), "--http-addr",
                           "127.0.0.1:0", "--pool-size", "8mb", "--pool-wait", "300ms"});

    INFO(second.output);
    CHECK(second.exit_code == 1);
    CHECK(has(second.output, "the server with pid " + std::to_string(former)));
    server.signal(SIGCONT);
  }

  TEST_CASE("a server whose keeper is killed starts another one, which has all of it") {
    KeptServer server;
    Engine engine(server);
    engine.save(1, 20);
    const pid_t former = keeper_pid(server);
    REQUIRE(former > 1);
    REQUIRE(::kill(former, SIGKILL) == 0);

    const auto end = std::chrono::steady_clock::now() + kHang;
    while (keeper_pid(server) <= 1 || keeper_pid(server) == former) {
      REQUIRE(std::chrono::steady_clock::now() < end);
    }
    REQUIRE(server.metric_becomes("pegaflow_keeper", 1));
    kill_and_start(server, engine);

    CHECK(engine.load(1, 20) == 20);
  }

  TEST_CASE(
      "an invalid message, or one that is not from the owner, changes nothing at the keeper") {
    KeptServer server;
    Engine engine(server);
    engine.save(1, 20);
    using server::KeeperMessage;
    using Kind = KeeperMessage::Kind;
    for (const std::string& bytes : {std::string("x"), std::string(1000, 'x')}) {
      const auto socket = server::connect_to_keeper(server.keeper());
      REQUIRE(socket.value());
      REQUIRE(::send((*socket)->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0);
      char answer = 0;
      CHECK(::recv((*socket)->get(), &answer, 1, 0) == 0);  // It ends this connection.
    }
    const auto stranger = server::connect_to_keeper(server.keeper());
    REQUIRE(stranger.value());
    for (const Kind kind : {Kind::kDrop, Kind::kPut, Kind::kPool, Kind{999}}) {
      KeeperMessage message;
      message.kind = kind;
      REQUIRE(server::send_message((*stranger)->get(), message));
      const auto answer = server::receive_message((*stranger)->get());
      REQUIRE(answer.value());
      CHECK((*answer)->message.kind == Kind::kInvalid);
    }

    kill_and_start(server, engine);
    CHECK(engine.load(1, 20) == 20);
  }

  TEST_CASE("a keeper that accepts no connection holds up no caller for ever") {
    const TemporaryDirectory directory;
    const std::filesystem::path path = directory.path() / "x.keeper";
    const auto stopped = server::listen_as_keeper(path);  // As one that has been stopped.
    REQUIRE(stopped);
    std::vector<UniqueFd> waiting;
    for (bool is_full = false; !is_full;) {
      REQUIRE(waiting.size() < 1000);
      auto queued = server::connect_to_keeper(path, std::chrono::milliseconds(20));
      is_full = !queued;
      if (is_full) {
        CHECK(queued.error().code == Errc::kTimeout);
        CHECK(has(queued.error().detail, path.string() + " has accepted no connection"));
      } else {
        REQUIRE(*queued);
        waiting.push_back(std::move(**queued));
      }
    }

    const auto link = server::KeeperLink::open(path, std::chrono::milliseconds(20));
    REQUIRE_FALSE(link);
    CHECK(link.error().code == Errc::kTimeout);
  }

  TEST_CASE("a keeper's socket is for its own user") {
    KeptServer server;
    CHECK((std::filesystem::status(server.keeper()).permissions() &
           (std::filesystem::perms::group_all | std::filesystem::perms::others_all)) ==
          std::filesystem::perms::none);
  }

  TEST_CASE("two namespaces and several kinds of pages are adopted side by side") {
    KeptServer server;
    Engine engine(server);
    engine.save(1, 20);
    EngineMemory memory = engine_memory(1, 3 * kBlockBytes, kBlocks);
    const auto device = HostDevice::create({.threads = 1}).value();
    TestEngine::Options options;
    options.socket = server.socket();
    options.instance = "larger";
    options.model = "another model";
    TestEngine larger(std::move(options), memory, *device);
    larger.wait_ready();
    CHECK_FALSE(larger.save(numbers_from(1, 10), blocks_from(0, 10)).error);

    kill_and_start(server, engine);
    larger.wait_ready();

    CHECK(engine.load(1, 20) == 20);
    const auto claimed = larger.claim(numbers_from(1, 10));
    REQUIRE(claimed);
    REQUIRE(claimed->blocks == 10);
    CHECK_FALSE(larger.load(claimed->token, blocks_from(20, 10)).error);
    CHECK(larger.wrong_blocks(numbers_from(1, 10), blocks_from(20, 10)) == 0);
    larger.session().unclaim(claimed->token);
  }

  TEST_CASE("all kinds of blocks of a model are adopted together") {
    KeptServer server;
    OverlaidMemory memory({{.layers = 3, .layer_bytes = 4096},
                           {.layers = 2, .layer_bytes = 3000},
                           {.layers = 2, .layer_bytes = 1048},
                           {.layers = 1, .layer_bytes = 10'000}},
                          400);
    const auto device = HostDevice::create({.threads = 2}).value();
    KindsEngine::Options options;
    options.socket = server.socket();
    // Full attention, windows of 41 tokens in two groups of other sizes, and states.
    options.kinds = {
        {.rule = BlockRule::kPrefix, .tokens = 0, .block_tokens = 32, .groups = {0}},
        {.rule = BlockRule::kTrailing, .tokens = 40, .block_tokens = 16, .groups = {1, 2}},
        {.rule = BlockRule::kState, .tokens = 0, .block_tokens = 64, .groups = {3}}};
    KindsEngine engine(std::move(options), memory, *device);
    engine.wait_ready();
    constexpr std::uint64_t kPrompt = 7;
    constexpr std::size_t kUnits = 16;
    const std::vector<KindRange> needed{{0, 0, 8}, {1, 13, 3}, {2, 3, 1}};
    for (const KindRange& range : needed) CHECK_FALSE(engine.save(kPrompt, range).error);

    server.kill();
    server.start();
    engine.wait_ready();

    CHECK(server.metric("pegaflow_adopted_blocks") == 12);
    const auto claimed = engine.claim(kPrompt, kUnits);
    REQUIRE(claimed);
    CHECK(claimed->ranges == needed);
    CHECK_FALSE(engine.load(kPrompt, *claimed, claimed->ranges).error);
    CHECK(memory.wrong_bytes() == 0);
    engine.session().unclaim(claimed->token);
  }

  TEST_CASE("a kept pool is found once all other nodes have sent their epochs") {
    KeptNode nodes;
    KeptServer& kept = nodes.kept;
    ServerProcess& other = nodes.other;
    Engine& engine = nodes.engine;
    other.kill();
    kill_and_start(kept, engine);

    CHECK(kept.metric("pegaflow_adopted_blocks") == 20);
    CHECK(kept.metric("pegaflow_adopted_waits_for_nodes") == 1);
    CHECK(engine.load(1, 20) == 0);
    other.start();

    REQUIRE(kept.metric_becomes("pegaflow_adopted_waits_for_nodes", 0));
    CHECK(engine.load(1, 20) == 20);
  }

  TEST_CASE("a node that was down during a reset does not find what it kept") {
    KeptNode nodes;
    KeptServer& kept = nodes.kept;
    ServerProcess& other = nodes.other;
    Engine& engine = nodes.engine;
    kept.kill();
    {
      Engine elsewhere(other);
      REQUIRE(elsewhere.engine->session().reset_cache(kHang));
    }
    kept.start();
    engine.engine->wait_ready();

    REQUIRE(kept.metric_becomes("pegaflow_adopted_waits_for_nodes", 0));
    CHECK(kept.metric("pegaflow_adopted_blocks") == 20);
    CHECK(engine.load(1, 20) == 0);
    engine.save(1, 20);
    CHECK(engine.load(1, 20) == 20);
  }

  TEST_CASE("a server with a keeper and an idle engine does not wake") {
    KeptServer server;
    Engine engine(server);
    engine.save(1, 20);

    CHECK(wake_ups_in_a_second(server.pid()) == 0);
  }

  TEST_CASE("without a keeper an external one is used as soon as it listens") {
    ServerProcess server(
        ServerProcess::Options{.pool_size = "8mb", .arguments = {"--keep", "external"}});
    CHECK(has(server.log(), "no keeper listens at " + keeper_path(server.socket()).string()));
    const auto health = nlohmann::json::parse(server.get("/health").body);
    CHECK(health.at("keeper").at("state") == "missing");
    Engine engine(server);
    engine.save(1, 20);

    harness::Child keeper = start_keeper(server);
    REQUIRE(server.metric_becomes("pegaflow_keeper", 1));
    kill_and_start(server, engine);

    CHECK(engine.load(1, 20) == 20);
  }
}

}  // namespace
}  // namespace pegaflow::testing
