// The directory against real Redis servers: what nodes announce is found, and whatever a server
// does or another program writes there, no question waits and nothing false is passed on.
#include "directory/directory.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <doctest/doctest.h>

#include "base/os/thread.h"
#include "directory/agent.h"
#include "harness/redis_process.h"
#include "tests/support/nodes.h"

namespace pegaflow::directory {
namespace {

using harness::RedisProcess;
using testing::kHang;

constexpr Epoch kEpoch{.counter = 5, .id = 6};

Bytes32 bytes_of(unsigned value) {
  Bytes32 bytes{};
  bytes[0] = static_cast<std::byte>(value);
  return bytes;
}

std::vector<BlockKey> prompt_of(std::uint64_t first, std::size_t blocks) {
  std::vector<BlockKey> keys(blocks);
  for (std::size_t i = 0; i < blocks; ++i) {
    const std::uint64_t word = (first << 32) + i;
    std::memcpy(keys[i].bytes.data(), &word, sizeof word);
  }
  return keys;
}

RedisProcess redis(std::vector<std::string> arguments = {}) {
  auto started = RedisProcess::start(
      {.address = testing::node_addresses(1)[0], .arguments = std::move(arguments)});
  REQUIRE_MESSAGE(started, (started ? std::string() : started.error().detail));
  return std::move(*started);
}

/// One node's directory, with the news that it has sent.
class Node {
 public:
  struct Options {
    unsigned number = 1;  ///< The last part of its address.
    unsigned secret = 1;
    Agent::Options agent{};
    std::shared_ptr<TlsContext> tls{};
  };
  Node(const std::vector<std::string>& urls, const Options& options) : number_(options.number) {
    Directory::Options wanted;
    for (const std::string& url : urls) {
      wanted.servers.push_back({.url = RedisUrl::parse(url).value(), .tls = options.tls});
      wanted.servers.back().longest_pause = std::chrono::milliseconds(200);
      // A busy machine does not make a server late, except where a test stops it.
      wanted.servers.back().deadline = std::chrono::milliseconds(100);
    }
    wanted.keys = {.anchors = bytes_of(options.secret), .all = {bytes_of(options.secret)}};
    auto agent = std::make_shared<AgentOptions>(options.agent);
    agent->leases.own = {.node = {1, 1000 + options.number}, .address = address(), .lanes = "tcp"};
    agent->leases.refresh = std::chrono::milliseconds(100);
    agent->servers.check = std::chrono::milliseconds(100);
    agent->epochs.check = std::chrono::milliseconds(100);
    wanted.agent = std::move(agent);
    directory_ = Directory::start(std::move(wanted)).value();
  }

  [[nodiscard]] std::string address() const { return fmt::format("10.0.0.{}:50055", number_); }
  void send(Command command) { REQUIRE(directory_->try_send(std::move(command))); }

  void announce(const std::vector<BlockKey>& keys, bool is_findable = true,
                const Bytes32& space = bytes_of(7), Epoch epoch = kEpoch) {
    Announcement made{.space = 1, .name = space, .epoch = epoch};
    for (const BlockKey& key : keys) {
      if (is_anchor(key, false)) made.blocks.emplace_back(key, is_findable);
    }
    send(std::move(made));
  }

  Found ask(const std::vector<BlockKey>& keys, const Bytes32& space = bytes_of(7),
            Epoch epoch = kEpoch) {
    const std::uint64_t ticket = ++ticket_;
    send(Question{.ticket = ticket,
                  .space = space,
                  .epoch = epoch,
                  .candidates = candidates_of(keys),
                  .deadline = SteadyClock().now() + kHang});
    std::optional<Found> answer;
    REQUIRE(until([&]() {
      answer = std::move(found_);
      found_.reset();
      return answer && answer->ticket == ticket;
    }));
    return *answer;
  }

  /// Whether a question comes to have that answer: the nodes named, in this order.
  bool finds(const std::vector<BlockKey>& keys, const std::vector<std::string>& addresses) {
    const auto end = SteadyClock().now() + kHang;
    while (SteadyClock().now() < end) {
      std::vector<std::string> now;
      for (const Found::Owner& owner : ask(keys).owners) now.push_back(owner.address);
      if (now == addresses) return true;
    }
    return false;
  }

  /// Whether the report becomes like that.
  bool reports(const std::function<bool(const Report&)>& wanted) {
    return until([&]() { return report_ && wanted(*report_); });
  }
  void forget_report() { report_.reset(); }
  bool is_ready() {
    return reports(
        [](const Report& report) { return report.is_usable && report.stats.nodes != 0; });
  }
  [[nodiscard]] const Stats& stats() const { return report_->stats; }
  std::vector<KnownEpochs> epochs;

  void take_news(int wait_ms) {
    pollfd entry{.fd = directory_->news().fd(), .events = POLLIN, .revents = 0};
    ::poll(&entry, 1, wait_ms);
    directory_->news().drain([this](News&& news) {
      if (auto* const found = std::get_if<Found>(&news)) found_ = std::move(*found);
      if (auto* const report = std::get_if<Report>(&news)) report_ = std::move(*report);
      if (auto* const known = std::get_if<KnownEpochs>(&news)) epochs.push_back(*known);
    });
  }
  [[nodiscard]] bool has_bad_epochs() const { return report_ && report_->stats.bad_epochs != 0; }

  bool until(const std::function<bool()>& done) {
    const auto end = SteadyClock().now() + kHang;
    while (!done()) {
      if (SteadyClock().now() >= end) return false;
      take_news(50);
    }
    return true;
  }

 private:
  unsigned number_;
  std::uint64_t ticket_ = 0;
  std::optional<Found> found_;
  std::optional<Report> report_;
  std::unique_ptr<Directory> directory_;
};

/// The anchors among those blocks.
std::size_t anchors_of(const std::vector<BlockKey>& keys) {
  return static_cast<std::size_t>(std::count_if(
      keys.begin(), keys.end(), [](const BlockKey& key) { return is_anchor(key, false); }));
}

/// The members of all sorted sets of anchors.
std::size_t members_of(const RedisProcess& server) {
  std::size_t members = 0;
  const auto keys = server.call({"KEYS", "a:*"}).value();
  for (const Reply& key : keys.items) {
    members += static_cast<std::size_t>(server.call({"ZCARD", key.text}).value().integer);
  }
  return members;
}

/// Answers every connection with the same bytes, whatever is asked.
class Garbage {
 public:
  Garbage(const std::string& address, std::string bytes) : bytes_(std::move(bytes)) {
    const std::size_t colon = address.rfind(':');
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(colon + 1))));
    ::inet_pton(AF_INET, address.substr(0, colon).c_str(), &at.sin_addr);
    listener_ = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0);
    REQUIRE(::listen(listener_.get(), 16) == 0);
    thread_ = start_thread("garbage", [this]() { run(); }).value();
  }
  ~Garbage() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }

 private:
  void run() {
    for (;;) {
      const UniqueFd peer(::accept(listener_.get(), nullptr, nullptr));
      if (!peer) return;
      std::array<char, 4096> asked{};
      if (::recv(peer.get(), asked.data(), asked.size(), 0) <= 0) continue;
      ::send(peer.get(), bytes_.data(), bytes_.size(), MSG_NOSIGNAL);
    }
  }
  std::string bytes_;
  UniqueFd listener_;
  std::thread thread_;
};

TEST_SUITE("directory") {
  TEST_CASE("what one node announces is found by the others until it is gone there") {
    const RedisProcess first = redis();
    const RedisProcess second = redis();
    const std::vector<std::string> urls{first.url(), second.url()};
    Node a(urls, {.number = 1});
    Node b(urls, {.number = 2});
    REQUIRE(b.reports([](const Report& report) { return report.stats.nodes == 2; }));
    const auto keys = prompt_of(1, 640);

    a.announce(keys);
    REQUIRE(b.finds(keys, {a.address()}));
    const Found found = b.ask(keys);
    CHECK(found.owners[0].node == Id128{1, 1001});
    CHECK(found.owners[0].place > 500);
    // Both servers have a part of the anchors.
    CHECK(members_of(first) > 0);
    CHECK(members_of(second) > 0);
    // A node does not find itself.
    CHECK(a.ask(keys).result == Found::Result::kNone);
    // Another epoch and another kind have other names.
    CHECK(b.ask(keys, bytes_of(7), {.counter = 6, .id = 6}).result == Found::Result::kNone);
    CHECK(b.ask(keys, bytes_of(8)).result == Found::Result::kNone);

    a.announce(keys, false);
    REQUIRE(b.finds(keys, {}));
    CHECK(members_of(first) + members_of(second) == 0);
  }

  TEST_CASE("the node with the longest part of a prompt comes first, and three at most") {
    const RedisProcess server = redis();
    std::vector<std::unique_ptr<Node>> nodes;
    for (unsigned number = 1; number <= 5; ++number) {
      nodes.push_back(
          std::make_unique<Node>(std::vector{server.url()}, Node::Options{.number = number}));
    }
    Node& reader = *nodes[4];
    REQUIRE(reader.reports([](const Report& report) { return report.stats.nodes == 5; }));
    const auto keys = prompt_of(2, 1600);
    for (std::size_t i = 0; i < 4; ++i) {
      nodes[i]->announce({keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(400 * (i + 1))});
    }

    CHECK(reader.finds(keys, {nodes[3]->address(), nodes[2]->address(), nodes[1]->address()}));
  }

  TEST_CASE("the anchors of a node that ended are ignored, and removed by those that live") {
    const RedisProcess server = redis();
    Agent::Options quick;
    quick.leases.length = std::chrono::milliseconds(600);
    quick.leases.renewal = std::chrono::milliseconds(200);
    quick.announcer.sweep_one_in = 1;
    quick.announcer.least_circle = std::chrono::milliseconds(100);
    Node b({server.url()}, {.number = 2, .agent = quick});
    const auto keys = prompt_of(3, 640);
    const std::size_t announced = anchors_of(keys);
    {
      Node a({server.url()}, {.number = 1, .agent = quick});
      a.announce(keys);
      REQUIRE(b.finds(keys, {a.address()}));
      REQUIRE(b.until([&]() { return members_of(server) == announced; }));
    }
    CHECK(announced > 10);
    REQUIRE(b.finds(keys, {}));
    // Each node looks through the buckets of its own anchors.
    b.announce(keys);
    const auto end = SteadyClock().now() + kHang;
    while (b.reports([](const Report& report) { return report.stats.repaired > 10; }) &&
           members_of(server) != announced && SteadyClock().now() < end) {
      b.forget_report();
    }
    CHECK(members_of(server) == announced);
  }

  TEST_CASE("a server that is killed, stopped or flushed delays no question, and has all again") {
    RedisProcess server = redis();
    Node a({server.url()}, {.number = 1});
    Node b({server.url()}, {.number = 2});
    const auto keys = prompt_of(4, 3200);
    a.announce(keys);
    REQUIRE(b.finds(keys, {a.address()}));
    const std::size_t members = anchors_of(keys);

    SUBCASE("killed") {
      server.process().kill();
      REQUIRE(b.reports([](const Report& report) { return !report.is_usable; }));
      CHECK(b.ask(keys).result == Found::Result::kDown);
      REQUIRE(server.restart());
    }
    SUBCASE("stopped") {
      REQUIRE(server.process().signal(SIGSTOP));
      REQUIRE(b.reports([](const Report& report) { return !report.is_usable; }));
      CHECK(b.ask(keys).result == Found::Result::kDown);
      REQUIRE(server.process().signal(SIGCONT));
    }
    SUBCASE("flushed") { REQUIRE(server.call({"FLUSHALL"})); }

    CHECK(b.finds(keys, {a.address()}));
    const auto end = SteadyClock().now() + kHang;
    while (members_of(server) != members && SteadyClock().now() < end) CHECK(b.is_ready());
    CHECK(members_of(server) == members);
  }

  TEST_CASE("what a program without the secret writes is ignored and counted") {
    const RedisProcess server = redis();
    Node a({server.url()}, {.number = 1});
    Node b({server.url()}, {.number = 2});
    const auto keys = prompt_of(5, 640);
    a.announce(keys);
    REQUIRE(b.finds(keys, {a.address()}));
    REQUIRE(b.until([&]() { return members_of(server) == anchors_of(keys); }));
    // Leases: of another secret, of no form, and members of other lengths.
    const Lease forged{.node = {9, 9}, .address = "10.9.9.9:1", .lanes = ""};
    REQUIRE(server.call({"SET", "n:zz", forged.sealed(bytes_of(2))}));
    REQUIRE(server.call({"ZADD", "n", "0", "zz", "0", "z", "0", "long"}));
    const auto buckets = server.call({"KEYS", "a:*"}).value();
    REQUIRE(buckets.items.size() > 4);
    for (const Reply& bucket : buckets.items) {
      const auto member = server.call({"ZRANGE", bucket.text, "0", "0"}).value().items.at(0).text;
      const std::string anchor = member.substr(0, 8);
      REQUIRE(server.call({"ZADD", bucket.text, "0", anchor + "x", "0", anchor + "zzzz"}));
    }

    REQUIRE(b.reports([](const Report& report) { return report.stats.bad_leases != 0; }));
    CHECK(b.finds(keys, {a.address()}));
    REQUIRE(b.reports([](const Report& report) {
      return report.stats.bad_members != 0 && report.stats.dead != 0;
    }));
    CHECK(b.stats().nodes == 2);

    // Keys of another type.
    for (const Reply& bucket : buckets.items) REQUIRE(server.call({"SET", bucket.text, "x"}));
    REQUIRE(server.call({"DEL", "n"}));
    REQUIRE(server.call({"SET", "n", "x"}));
    CHECK(b.ask(keys).owners.empty());
    CHECK(b.reports([](const Report& report) { return report.stats.errors != 0; }));
  }

  TEST_CASE("a server whose marker belongs to something else is not used") {
    const RedisProcess server = redis();
    REQUIRE(server.call({"SET", "g", "of another program"}));
    Node a({server.url()}, {.number = 1});
    REQUIRE(a.reports([](const Report& report) {
      return report.stats.servers.at(0).why.find("no marker") != std::string::npos;
    }));
    CHECK(a.ask(prompt_of(6, 640)).result == Found::Result::kDown);
    CHECK(server.call({"DBSIZE"}).value().integer == 1);
  }

  TEST_CASE("a server in cluster mode is not used, and says so") {
    const RedisProcess server = redis({"--cluster-enabled", "yes"});
    Node a({server.url()}, {.number = 1});
    REQUIRE(a.reports([](const Report& report) {
      return report.stats.servers.at(0).why.find("cluster mode") != std::string::npos;
    }));
    CHECK(a.ask(prompt_of(6, 640)).result == Found::Result::kDown);
    CHECK(a.stats().errors == 0);
  }

  TEST_CASE("a server is shown with its version and what it does when it is full") {
    const RedisProcess server =
        redis({"--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"});
    Node a({server.url()}, {.number = 1});
    REQUIRE(a.reports([](const Report& report) {
      const ServerInfo& info = report.stats.servers.at(0).info;
      return !info.version.empty() && info.policy == "volatile-lru";
    }));
    const ServerInfo& info = a.stats().servers.at(0).info;
    CHECK((info.version.starts_with("Redis ") || info.version.starts_with("Valkey ")));
    CHECK(info.mode == "standalone");
    CHECK(info.max_bytes == 100U << 20);
  }

  TEST_CASE("a replica is read, and has all announcements when it becomes the primary") {
    const RedisProcess primary = redis();
    const std::size_t colon = primary.address().rfind(':');
    const RedisProcess server = redis(
        {"--replicaof", primary.address().substr(0, colon), primary.address().substr(colon + 1)});
    Agent::Options quick;
    quick.leases.renewal = std::chrono::milliseconds(200);
    // Its marker is the primary's.
    Node before({primary.url()}, {.number = 3, .agent = quick});
    REQUIRE(before.is_ready());
    Node a({server.url()}, {.number = 1, .agent = quick});
    Node b({server.url()}, {.number = 2, .agent = quick});
    const auto keys = prompt_of(10, 640);
    a.announce(keys);
    REQUIRE(a.reports([](const Report& report) { return report.stats.errors > 2; }));

    REQUIRE(server.call({"REPLICAOF", "NO", "ONE"}));
    CHECK(b.finds(keys, {a.address()}));
    const auto end = SteadyClock().now() + kHang;
    while (members_of(server) != anchors_of(keys) && SteadyClock().now() < end) a.take_news(20);
    CHECK(members_of(server) == anchors_of(keys));
  }

  TEST_CASE("a full server is read, and has all announcements when it has room again") {
    const RedisProcess server = redis();
    Agent::Options quick;
    quick.leases.renewal = std::chrono::milliseconds(200);
    Node a({server.url()}, {.number = 1, .agent = quick});
    Node b({server.url()}, {.number = 2, .agent = quick});
    const auto keys = prompt_of(11, 640);
    a.announce(keys);
    REQUIRE(b.finds(keys, {a.address()}));
    REQUIRE(server.call({"CONFIG", "SET", "maxmemory", "1"}));
    const auto more = prompt_of(12, 640);
    a.announce(more);
    REQUIRE(a.reports([](const Report& report) { return report.stats.errors > 2; }));
    CHECK(b.ask(keys).result != Found::Result::kDown);

    REQUIRE(server.call({"CONFIG", "SET", "maxmemory", "0"}));
    CHECK(b.finds(more, {a.address()}));
    CHECK(b.finds(keys, {a.address()}));
    const std::size_t all = anchors_of(keys) + anchors_of(more);
    const auto end = SteadyClock().now() + kHang;
    while (members_of(server) != all && SteadyClock().now() < end) a.take_news(20);
    CHECK(members_of(server) == all);
  }

  TEST_CASE("at a server that is full for longer than a lease, all nodes stay and are found") {
    const RedisProcess server = redis();
    Agent::Options quick;
    quick.leases.length = std::chrono::milliseconds(1500);
    quick.leases.renewal = std::chrono::milliseconds(100);
    Node a({server.url()}, {.number = 1, .agent = quick});
    Node b({server.url()}, {.number = 2, .agent = quick});
    const auto keys = prompt_of(13, 640);
    a.announce(keys);
    REQUIRE(b.finds(keys, {a.address()}));
    REQUIRE(b.until([&]() { return members_of(server) == anchors_of(keys); }));
    REQUIRE(server.call({"CONFIG", "SET", "maxmemory", "1"}));

    // A lease that is not extended ends at the server, and then at the node that has read it.
    const auto end = SteadyClock().now() + 5 * quick.leases.length / 2;
    while (SteadyClock().now() < end) {
      a.take_news(0);
      b.take_news(20);
      REQUIRE(b.ask(keys).result == Found::Result::kFound);
    }
    CHECK(a.reports([](const Report& report) { return report.stats.errors > 5; }));
    CHECK(b.stats().nodes == 2);
    CHECK(server.call({"ZCARD", "n"}).value().integer == 2);
    CHECK(members_of(server) == anchors_of(keys));
  }

  TEST_CASE("a server in protected mode, or with too many clients, is named with its answer") {
    // As Redis 7.0 words it; it closes the connection then.
    const std::string denied =
        "-DENIED Redis is running in protected mode because protected mode is enabled and no "
        "password is set for the default user. " +
        std::string(950, 'x') + "\r\n";
    for (const auto& [bytes, word] :
         {std::pair(denied, "protected mode is enabled"),
          std::pair(std::string("-ERR max number of clients reached\r\n"), "max number")}) {
      const std::string address = testing::node_addresses(1)[0];
      const Garbage server(address, bytes);
      Node a({"redis://" + address}, {.number = 1});
      CHECK(a.reports([&](const Report& report) {
        return report.stats.servers.at(0).why.find(word) != std::string::npos;
      }));
    }
  }

  TEST_CASE("a server that requires a login is named with its answer") {
    const RedisProcess server = redis({"--requirepass", "main"});
    Node a({server.url()}, {.number = 1});
    CHECK(a.reports([](const Report& report) {
      return report.stats.servers.at(0).why.find("NOAUTH") != std::string::npos;
    }));
  }

  TEST_CASE("garbage instead of replies ends that connection, and other servers answer") {
    const RedisProcess good = redis();
    for (const std::string& bytes :
         {std::string("HTTP/1.1 400 Bad Request\r\n\r\n"), std::string("*2147483648\r\n"),
          std::string("+PONG\r\n*-7\r\n"), std::string("+PONG\r\n+PONG\r\n+PONG\r\n+x\r\n+y\r\n"),
          std::string("$8388609\r\n"), std::string(100'000, 'x')}) {
      const std::string address = testing::node_addresses(1)[0];
      const Garbage bad(address, bytes);
      Node a({good.url(), "redis://" + address}, {.number = 1});
      REQUIRE(a.reports([](const Report& report) {
        const auto& server = report.stats.servers.at(1);
        return server.failures + server.losses > 1 && report.stats.servers.at(0).is_ready;
      }));
      CHECK(a.ask(prompt_of(7, 3200)).result != Found::Result::kFound);
    }
  }

  TEST_CASE("a reset reaches nodes that have no link, and an old text changes nothing") {
    const RedisProcess server = redis();
    Node a({server.url()}, {.number = 1});
    Node b({server.url()}, {.number = 2});
    const KnownEpochs known{.spaces = {{bytes_of(3), {9, 9}}}, .floor = {}};
    b.send(KnownEpochs{});
    a.send(known);

    REQUIRE(b.until([&]() { return !b.epochs.empty(); }));
    CHECK(to_text(b.epochs.back()) == to_text(known));
    REQUIRE(server.call({"SET", "e", "forged"}));
    // The first that reads it counts it. A node that knows more writes again.
    CHECK(a.until([&]() {
      b.take_news(0);
      return a.has_bad_epochs() || b.has_bad_epochs();
    }));
    REQUIRE(a.until([&]() {
      const auto text = server.call({"GET", "e"}).value().text;
      const std::vector<Bytes32> keys{bytes_of(1)};
      return text != "forged" && unseal(keys, "epochs 1", text) == to_text(known);
    }));
  }

  TEST_CASE("a password, a user with an ACL, and a database of its own") {
    const RedisProcess server = redis({"--requirepass", "main"});
    Node wrong({"redis://:other@" + server.address()}, {.number = 1});
    REQUIRE(wrong.reports([](const Report& report) {
      return report.stats.servers.at(0).why.find("AUTH") != std::string::npos;
    }));
    Node a({"redis://:main@" + server.address() + "/3"}, {.number = 1});
    CHECK(a.is_ready());
    CHECK(a.stats().servers.at(0).name == server.url() + "/3");
  }

  TEST_CASE("over TLS, only a server with a trusted certificate for its address is used") {
    const testing::TemporaryDirectory files;
    const std::string key = files.path() / "key.pem";
    const std::string certificate = files.path() / "certificate.pem";
    const std::string address = testing::node_addresses(1)[0];
    const std::string host = address.substr(0, address.rfind(':'));
    auto made = harness::Child::start(
        {.command = {"openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                     "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=redis",
                     "-addext", "subjectAltName=IP:" + host, "-keyout", key, "-out", certificate},
         .log_file = files.path() / "openssl.log"});
    REQUIRE(made);
    REQUIRE(made->wait_for_exit(kHang) == 0);
    auto server = RedisProcess::start(
        {.address = address,
         .arguments = {"--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file",
                       certificate, "--tls-auth-clients", "no"},
         .is_tls = true});
    REQUIRE(server);
    const std::string url = "rediss://" + address;

    Node a({url}, {.number = 1, .tls = TlsContext::create(certificate).value()});
    Node b({url}, {.number = 2, .tls = TlsContext::create(certificate).value()});
    Node stranger({url}, {.number = 3, .tls = TlsContext::create("").value()});
    const auto keys = prompt_of(9, 640);
    a.announce(keys);
    CHECK(b.finds(keys, {a.address()}));
    CHECK(stranger.reports([](const Report& report) {
      return report.stats.servers.at(0).why.find("not trusted") != std::string::npos;
    }));
    CHECK(TlsContext::create(files.path() / "none").error().code == Errc::kRefused);
  }

  TEST_CASE("an ACL with the commands of the documentation is enough") {
    const RedisProcess server =
        redis({"--user", "pega", "on", ">geheim", "~*", "-@all", "+ping", "+select", "+get", "+set",
               "+pexpire", "+mget", "+zadd", "+zrem", "+zrangebylex"});
    const std::string url = "redis://pega:geheim@" + server.address();
    Node a({url}, {.number = 1});
    Node b({url}, {.number = 2});
    const auto keys = prompt_of(8, 640);
    a.announce(keys);
    CHECK(b.finds(keys, {a.address()}));
    a.announce(keys, false);
    CHECK(b.finds(keys, {}));
    CHECK(b.reports([](const Report& report) { return report.stats.errors == 0; }));
  }

  TEST_CASE("an ACL of a former release, without PEXPIRE, is enough") {
    const RedisProcess server =
        redis({"--user", "pega", "on", ">geheim", "~*", "-@all", "+ping", "+select", "+get", "+set",
               "+mget", "+zadd", "+zrem", "+zrangebylex"});
    const std::string url = "redis://pega:geheim@" + server.address();
    Agent::Options quick;
    quick.leases.length = std::chrono::milliseconds(900);
    quick.leases.renewal = std::chrono::milliseconds(100);
    Node a({url}, {.number = 1, .agent = quick});
    Node b({url}, {.number = 2, .agent = quick});
    const auto keys = prompt_of(14, 640);
    a.announce(keys);
    REQUIRE(b.finds(keys, {a.address()}));
    const auto end = SteadyClock().now() + 2 * quick.leases.length;
    while (SteadyClock().now() < end) b.take_news(20);
    CHECK(b.finds(keys, {a.address()}));
    CHECK(b.reports([](const Report& report) { return report.stats.errors == 0; }));
  }
}

}  // namespace
}  // namespace pegaflow::directory
