// Start and end of a server, and its errors if it cannot start.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "engine/pool/memory_room.h"
#include "tests/support/server_process.h"
#include "tests/support/skip.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

namespace fs = std::filesystem;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Exit code 1, and one line on standard error beside the log.
void check_refused(const Ran& ran, const std::string& why) {
  INFO(ran.output);
  CHECK(ran.exit_code == 1);
  CHECK(has(ran.output, "pegaflow-server: "));
  CHECK(has(ran.output, why));
}

mode_t permissions(const fs::path& path) {
  struct stat about {};
  REQUIRE(::stat(path.c_str(), &about) == 0);
  return about.st_mode & 07777U;
}

/// Reserves more huge pages of 2 MiB while it lives, if this process may.
class ReservedHugePages {
 public:
  explicit ReservedHugePages(std::uint64_t count) {
    set(before() + count);
    const auto now = engine::huge_pages();
    are_there_ = now && now->page_bytes == 2 << 20 && now->free == count;
  }
  ~ReservedHugePages() { set(before()); }
  ReservedHugePages(const ReservedHugePages&) = delete;
  ReservedHugePages& operator=(const ReservedHugePages&) = delete;
  /// Only unused ones, so that no other process runs short.
  [[nodiscard]] bool are_there() const { return are_there_; }

 private:
  static void set(std::uint64_t count) { std::ofstream("/proc/sys/vm/nr_hugepages") << count; }
  /// Those at the first call: the kernel may still be freeing the ones of an earlier test.
  static std::uint64_t before() {
    static const auto pages = engine::huge_pages();
    return pages ? pages->total : 0;
  }
  bool are_there_ = false;
};

TEST_SUITE("start") {
  TEST_CASE("the ready file has the addresses, and health is ok") {
    ServerProcess server;

    std::ifstream file(server.directory() / "ready.json");
    const auto ready = nlohmann::json::parse(file);

    CHECK(ready.at("socket") == server.socket());
    CHECK(ready.at("pid") == server.pid());
    const auto health = server.get("/health");
    CHECK(health.status == 200);
    CHECK(nlohmann::json::parse(health.body).at("status") == "ok");
    CHECK(has(server.log(), "http address=" + server.http()));
  }

  TEST_CASE("SIGTERM and SIGINT end it cleanly") {
    for (const int number : {SIGTERM, SIGINT}) {
      ServerProcess server;
      auto io = kj::setupAsyncIo();
      WireClient client(io, server.socket());
      client.hello();
      server.signal(number);

      const auto code = server.wait_for_exit();

      CHECK(code == 0);
      CHECK_FALSE(fs::exists(server.socket()));
      CHECK_FALSE(fs::exists(server.socket() + ".lock"));
      CHECK_FALSE(fs::exists(server.directory() / "ready.json"));
    }
  }

  TEST_CASE("only the server's user and group may connect to the socket") {
    const TemporaryDirectory parent;
    const fs::path socket = parent.path() / "made" / "x.sock";
    ServerProcess server({.arguments = {"--addr", "unix:" + socket.string()}});

    CHECK(permissions(socket) == 0660);
    CHECK(permissions(socket.parent_path()) == 0750);
  }

  TEST_CASE("a host and port name a socket in the runtime directory") {
    const TemporaryDirectory runtime;
    // A regular file has its place, so the server reports the name and exits.
    fs::create_directory(runtime.path() / "50123.sock");

    const Ran ran = run_server_binary(
        {"--addr", "127.0.0.1:50123", "--http-addr", "127.0.0.1:0", "--pool-size", "1mb"},
        {"PEGAFLOW_RUNTIME_DIR=" + runtime.path().string()});

    check_refused(ran, (runtime.path() / "50123.sock").string() + " exists and is not a socket");
  }

  TEST_CASE("a second server on the address is rejected with the first one's pid") {
    ServerProcess first;

    const Ran second = run_server_binary(
        {"--addr", "unix:" + first.socket(), "--http-addr", "127.0.0.1:0", "--pool-size", "1mb"});

    check_refused(second, "another pegaflow-server (pid " + std::to_string(first.pid()) + ")");
    CHECK(first.get("/health").status == 200);
  }

  TEST_CASE("the files of a killed server are replaced") {
    ServerProcess server;
    server.kill();
    REQUIRE(fs::exists(server.socket()));

    server.start();

    auto io = kj::setupAsyncIo();
    WireClient client(io, server.socket());
    CHECK(client.hello().version == kWireMaximum);
  }

  TEST_CASE("a pool larger than the machine's memory is rejected at once") {
    const TemporaryDirectory directory;

    const Ran ran = run_server_binary({"--addr", "unix:" + (directory.path() / "x.sock").string(),
                                       "--http-addr", "127.0.0.1:0", "--pool-size", "60tb"});

    check_refused(ran, "choose a smaller --pool-size");
  }

  TEST_CASE(
      "a pool larger than the free memory is waited for, visible in health, and then rejected") {
    // More than the gibibyte that is kept free, so that there is a size between free and all.
    ServerProcess other({.pool_size = "1200mb"});
    const auto room = engine::memory_room();
    REQUIRE(room);
    if (room->limited_by != "MemAvailable") PEGA_SKIP("a cgroup limits the memory");
    // Even if other processes free memory meanwhile, the other pool stays.
    const std::string size = std::to_string(room->possible_bytes - (std::uint64_t{1} << 30));
    const TemporaryDirectory directory;

    const Ran ran = run_server_binary({"--addr", "unix:" + (directory.path() / "x.sock").string(),
                                       "--http-addr", "127.0.0.1:0", "--pool-size", size,
                                       "--pool-wait", "300ms"});

    check_refused(ran, "do not fit");
    CHECK(has(ran.output, "memory is short, waiting"));
  }

  TEST_CASE("while it waits for memory health is 503, and it continues when the memory is free") {
    const ReservedHugePages pages(32);
    if (!pages.are_there()) PEGA_SKIP("this process cannot reserve huge pages");
    ServerProcess other({.arguments = {"--use-hugepages"}});
    ServerProcess server({.arguments = {"--use-hugepages"}, .wait_until_ready = false});
    const std::string address = server.wait_for_http_address();
    ServerProcess::Response health;
    do {
      health = http_request(address, "GET", "/health");
    } while (has(health.body, "preparing the pool"));

    CHECK(health.status == 503);
    CHECK(has(health.body, "waiting for the memory of a previous server"));
    CHECK(http_request(address, "GET", "/metrics").status == 503);
    CHECK(http_request(server.http_socket(), "POST", "/cache/memory/cleanup").status == 503);
    CHECK_FALSE(fs::exists(server.socket()));

    other.kill();
    server.wait_until_ready();
    CHECK(server.get("/health").status == 200);
    CHECK(server.metric("pegaflow_pool_page_bytes") == 2 << 20);
  }

  TEST_CASE("SIGTERM ends it while it waits for memory") {
    const ReservedHugePages pages(32);
    if (!pages.are_there()) PEGA_SKIP("this process cannot reserve huge pages");
    ServerProcess other({.arguments = {"--use-hugepages"}});
    ServerProcess server({.arguments = {"--use-hugepages"}, .wait_until_ready = false});
    (void)server.wait_for_http_address();

    CHECK(server.terminate() == 0);
  }

  TEST_CASE("missing huge pages are rejected with the command that reserves them") {
    const TemporaryDirectory directory;
    const auto pages = engine::huge_pages();
    REQUIRE(pages);
    if (pages->free != 0) PEGA_SKIP("this machine has reserved huge pages");

    const Ran ran = run_server_binary({"--addr", "unix:" + (directory.path() / "x.sock").string(),
                                       "--http-addr", "127.0.0.1:0", "--use-hugepages",
                                       "--pool-size", "64mb", "--pool-wait", "0s"});

    INFO(ran.output);
    CHECK(ran.exit_code == 1);
    // Others may use huge pages: then it needs as many more.
    CHECK(has(ran.output, pages->page_bytes == 0 ? "has no huge pages" : "needs 32 huge pages"));
    CHECK(has(ran.output, "sysctl -w vm.nr_hugepages=") == (pages->page_bytes != 0));
  }

  TEST_CASE("without huge pages the start logs the command that reserves them") {
    // Its pool is on small pages even where the kernel finds huge ones.
    ServerProcess server({.arguments = {"--numa", "interleave"}});
    const auto pages = engine::huge_pages();
    REQUIRE(pages);
    if (pages->page_bytes != 0 && pages->free == 0) {
      CHECK(has(server.log(), "sysctl -w vm.nr_hugepages="));
    }
  }

  TEST_CASE("an invalid value is rejected with an error that names the valid ones") {
    check_refused(run_server_binary({"--pool-sizes", "1gb"}), "--help");
    check_refused(run_server_binary({"--pool-size", "30 gigs"}), "--pool-size");
    check_refused(run_server_binary({"--pool-size", "10"}), "1 MiB");
    check_refused(run_server_binary({"--reservation-timeout", "30"}), "--reservation-timeout");
    check_refused(run_server_binary({"--instance-share-percent", "101"}), "1 and 100");
    check_refused(run_server_binary({"--log-level", "loud"}), "--log-level: \"loud\"");
    check_refused(run_server_binary({"--numa", "sideways"}), "auto, interleave");
    check_refused(run_server_binary({"--allow-uid", "bob"}), "bob");
    check_refused(run_server_binary({"--config", "/nonexistent.conf"}), "/nonexistent.conf");
    check_refused(run_server_binary({"--http-token-file", "/nonexistent"}),
                  "/nonexistent: cannot be read: No such file");
    check_refused(run_server_binary({"--http-token-file", "/dev/zero"}),
                  "/dev/zero: cannot be read: it is not a regular file");
    check_refused(run_server_binary({"--metric-hll-windows", "5s"}), "--metric-hll-windows: ");
    check_refused(run_server_binary({"--addr", "here"}), "unix:/path/x.sock");
    check_refused(run_server_binary({"--addr", "unix:relative.sock"}), "absolute path");
    check_refused(run_server_binary({"--addr", "unix:/" + std::string(200, 'x')}), "too long");
    check_refused(run_server_binary({"--addr", "127.0.0.1:70000"}),
                  "--addr 127.0.0.1:70000: \"70000\" is not a port");
  }

  TEST_CASE("paths that cannot be used are rejected") {
    const TemporaryDirectory directory;
    const std::string file = (directory.path() / "file").string();
    std::ofstream(file) << "x";

    check_refused(run_server_binary({"--addr", "unix:" + file + "/x.sock", "--pool-size", "1mb"}),
                  file);
    check_refused(run_server_binary({"--addr", "unix:" + directory.path().string() + "/a.sock",
                                     "--http-addr", "203.0.113.1:80", "--pool-size", "1mb"}),
                  "--http-addr 203.0.113.1:80");
    check_refused(run_server_binary({"--addr", "unix:" + directory.path().string() + "/a.sock",
                                     "--socket-group", "no-such-group", "--pool-size", "1mb"}),
                  "no-such-group");
    check_refused(run_server_binary({"--addr", "unix:" + directory.path().string() + "/a.sock",
                                     "--http-addr", "127.0.0.1:0", "--pool-size", "1mb",
                                     "--ready-file", "/nonexistent/ready"}),
                  "--ready-file");
  }

  TEST_CASE("ignored flags are accepted with one warning each") {
    ServerProcess server(
        {.arguments = {"--devices", "0,1", "--hint-value-size", "1mb", "--ssd-cache-shards", "4",
                       "--max-prefetch-blocks", "800"}});

    CHECK(has(server.log(), "--devices has no effect"));
    CHECK(has(server.log(), "--hint-value-size has no effect"));
    CHECK(has(server.log(), "--ssd-cache-shards has no effect"));
    CHECK(has(server.log(), "--max-prefetch-blocks has no effect"));
  }

  TEST_CASE("help, version and options are printed and nothing is started") {
    CHECK(has(run_server_binary({"--help"}).output, "--pool-size"));
    CHECK(has(run_server_binary({"--version"}).output, "pegaflow-server "));
    const Ran options = run_server_binary({"--pool-size", "2gb", "--print-options"});
    CHECK(options.exit_code == 0);
    CHECK(has(options.output, "pool-size = 2 GiB  # command line"));
    CHECK(
        has(run_server_binary({"--print-options-markdown"}).output, "| `--pool-size` | `30 GiB`"));
    CHECK(has(run_server_binary({"--print-options"}, {"PEGA_POOL_SIZE=3gb"}).output,
              "pool-size = 3 GiB"));
  }

  TEST_CASE("the default size is logged at the start") {
    const TemporaryDirectory directory;

    const Ran ran =
        run_server_binary({"--addr", "unix:" + (directory.path() / "f").string() + "/no/x.sock",
                           "--http-addr", "203.0.113.1:80"});

    CHECK(has(ran.output, "pool size chosen: 30 GiB or half of the free memory"));
  }
}

}  // namespace
}  // namespace pegaflow::testing
