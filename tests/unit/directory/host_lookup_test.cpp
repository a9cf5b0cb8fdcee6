// Names of servers are looked up beside the directory's thread, and all addresses of a name count.
#include "directory/redis/host_lookup.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "base/os/unique_fd.h"
#include "directory/redis/redis_server.h"

namespace pegaflow::directory {
namespace {

constexpr std::chrono::seconds kHang{20};

/// The names that this program looks up: what getaddrinfo() below answers.
class Names {
 public:
  /// A lookup of that name waits until release().
  std::string hanging = "hanging.test";
  std::vector<std::string> addresses;

  int answer(const std::string& name, const char* port, const addrinfo* hints, addrinfo** list) {
    using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
    static const auto real = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "getaddrinfo"));
    if (!name.ends_with(".test")) return real(name.c_str(), port, hints, list);
    if ((hints->ai_flags & AI_NUMERICHOST) != 0) return EAI_NONAME;
    {
      std::unique_lock lock(mutex_);
      ++lookups_;
      if (name == hanging) {
        is_hanging_ = true;
        changed_.notify_all();
        changed_.wait_for(lock, kHang, [this]() { return is_released_; });
        is_hanging_ = false;
      }
    }
    addrinfo* last = nullptr;
    for (const std::string& address : addresses) {
      addrinfo* part = nullptr;
      if (const int problem = real(address.c_str(), port, hints, &part)) return problem;
      (last == nullptr ? *list : last->ai_next) = part;
      last = part;
    }
    return last == nullptr ? EAI_AGAIN : 0;
  }
  bool await_hanging() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kHang, [this]() { return is_hanging_; });
  }
  void release() {
    const std::scoped_lock lock(mutex_);
    is_released_ = true;
    changed_.notify_all();
  }
  [[nodiscard]] int lookups() {
    const std::scoped_lock lock(mutex_);
    return lookups_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int lookups_ = 0;
  bool is_hanging_ = false;
  bool is_released_ = false;
};

/// Only the last test's answers; a thread that hangs longer than its test still finds one.
std::shared_ptr<Names>& names() {
  static std::shared_ptr<Names> shared;
  return shared;
}

struct Listener {
  explicit Listener(const std::string& host, std::uint16_t wanted = 0, int backlog = 16)
      : fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(wanted);
    ::inet_pton(AF_INET, host.c_str(), &at.sin_addr);
    REQUIRE(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0);
    REQUIRE(::listen(fd.get(), backlog) == 0);
    socklen_t size = sizeof at;
    REQUIRE(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
    port = ntohs(at.sin_port);
  }
  UniqueFd fd;
  std::uint16_t port = 0;
};

RedisServer::Options options_of(const std::string& host, std::uint16_t port) {
  return {.url = RedisUrl::parse(fmt::format("redis://{}:{}", host, port)).value()};
}

/// Steps until the state is `wanted`, which something outside of this thread causes.
bool becomes(RedisServer& server, RedisServer::State wanted) {
  const auto end = std::chrono::steady_clock::now() + kHang;
  for (server.step(); server.stats().state != wanted; server.step()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    const short events = server.wants_write() ? POLLIN | POLLOUT : POLLIN;
    pollfd entry{.fd = server.fd(), .events = events, .revents = 0};
    ::poll(&entry, 1, 100);
  }
  return true;
}

TEST_SUITE("host_lookup") {
  TEST_CASE("a name server that does not answer delays no step, and one lookup waits for it") {
    names() = std::make_shared<Names>();
    const Listener listener("127.0.0.1");
    ManualClock clock;
    RedisServer server(options_of("hanging.test", listener.port), clock);

    server.step();
    REQUIRE(names()->await_hanging());  // It waits for the name server, and step() has returned.
    CHECK(server.stats().state == RedisServer::State::kConnecting);
    CHECK(server.next_step() > clock.now());
    for (unsigned failures = 1; failures <= 3; ++failures) {
      clock.advance(std::chrono::seconds(1));
      server.step();
      CHECK(server.stats().state == RedisServer::State::kWaiting);
      CHECK(server.stats().failures == failures);
      CHECK(server.stats().why == "look up hanging.test: no answer within the deadline");
      clock.advance(std::chrono::seconds(5));
      server.step();
      CHECK(server.stats().state == RedisServer::State::kConnecting);
    }
    CHECK(names()->lookups() == 1);

    names()->addresses = {"127.0.0.1"};
    names()->release();
    CHECK(becomes(server, RedisServer::State::kLogin));
  }

  TEST_CASE("an unknown name is a failure with its name, and is looked up again") {
    names() = std::make_shared<Names>();
    ManualClock clock;
    RedisServer server(options_of("none.test", 1), clock);
    server.step();
    CHECK(becomes(server, RedisServer::State::kWaiting));
    CHECK(server.stats().why.starts_with("look up none.test: "));
    clock.advance(std::chrono::seconds(5));
    server.step();
    CHECK(becomes(server, RedisServer::State::kWaiting));
    CHECK(names()->lookups() == 2);
  }

  TEST_CASE("a server whose lookup is in progress ends at once") {
    names() = std::make_shared<Names>();
    ManualClock clock;
    {
      RedisServer server(options_of("hanging.test", 1), clock);
      server.step();
      REQUIRE(names()->await_hanging());
    }
    names()->release();
  }

  TEST_CASE(
      "when the first address of a name does not answer, the next attempt takes another one") {
    names() = std::make_shared<Names>();
    names()->addresses = {"127.0.0.2", "127.0.0.1"};
    // A full queue of connections: the kernel drops further ones.
    const Listener full("127.0.0.2", 0, 0);
    std::vector<UniqueFd> waiting;
    for (int i = 0; i < 4; ++i) {
      waiting.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      sockaddr_in to{};
      to.sin_family = AF_INET;
      to.sin_port = htons(full.port);
      ::inet_pton(AF_INET, "127.0.0.2", &to.sin_addr);
      (void)::connect(waiting.back().get(), reinterpret_cast<const sockaddr*>(&to), sizeof to);
    }
    const Listener good("127.0.0.1", full.port);
    ManualClock clock;
    RedisServer server(options_of("two.test", full.port), clock);

    bool is_reached = false;
    for (int attempt = 0; attempt < 3 && !is_reached; ++attempt) {
      server.step();
      const auto end = std::chrono::steady_clock::now() + kHang;
      pollfd resolved{.fd = server.fd(), .events = POLLIN, .revents = 0};
      ::poll(&resolved, 1, 10'000);
      server.step();
      pollfd connected{.fd = server.fd(), .events = POLLOUT, .revents = 0};
      if (::poll(&connected, 1, 200) == 1) {
        is_reached = becomes(server, RedisServer::State::kLogin);
      }
      REQUIRE(std::chrono::steady_clock::now() < end);
      clock.advance(std::chrono::seconds(1));
      if (!is_reached) server.step();
      clock.advance(std::chrono::seconds(5));
    }
    CHECK(is_reached);
  }
}

}  // namespace
}  // namespace pegaflow::directory

// In the place of the C library's.
extern "C" int getaddrinfo(const char* name, const char* port, const addrinfo* hints,
                           addrinfo** list) {
  using pegaflow::directory::Names;
  using pegaflow::directory::names;
  static const auto quiet = std::make_shared<Names>();
  const std::shared_ptr<Names> answering = names() ? names() : quiet;
  return answering->answer(name, port, hints, list);
}
