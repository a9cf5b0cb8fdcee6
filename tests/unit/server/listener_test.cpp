#include "server/rpc/listener.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <doctest/doctest.h>

namespace pegaflow::server {
namespace {

namespace fs = std::filesystem;

class Directory {
 public:
  Directory() {
    char name[] = "/tmp/pega-listener-XXXXXX";
    path_ = ::mkdtemp(name);
  }
  ~Directory() { fs::remove_all(path_); }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

bool can_connect(const fs::path& socket) {
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  socket.string().copy(to.sun_path, sizeof to.sun_path - 1);
  return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0;
}

TEST_SUITE("socket_path") {
  TEST_CASE("a port names a socket in the first directory that can be used") {
    const Directory system;
    const Directory user;
    const std::string usable = (system.path() / "pegaflow").string();  // Can be made.
    const std::string unusable = "/nonexistent/pegaflow";

    const auto in_system =
        socket_path("127.0.0.1:50055", {.system = usable, .user = user.path() / "pegaflow"});
    const auto in_user =
        socket_path("0.0.0.0:1", {.system = unusable, .user = user.path() / "pegaflow"});
    const auto explicitly = socket_path(
        "h:2",
        {.explicit_directory = "/somewhere", .system = usable, .user = user.path() / "pegaflow"});

    CHECK(in_system == fs::path(usable) / "50055.sock");
    CHECK(in_user == user.path() / "pegaflow" / "1.sock");
    CHECK(explicitly == fs::path("/somewhere/2.sock"));
  }

  TEST_CASE("without a directory the variable that helps is named") {
    const auto path = socket_path("h:1", {.system = "/nonexistent/pegaflow", .user = ""});

    REQUIRE_FALSE(path);
    CHECK(path.error().code == Errc::kRefused);
    CHECK(path.error().detail.find("PEGAFLOW_RUNTIME_DIR") != std::string::npos);
  }

  TEST_CASE("unix: names it directly") {
    CHECK(socket_path("unix:/a/b.sock", {}) == fs::path("/a/b.sock"));
  }

  TEST_CASE("an invalid address is refused") {
    for (const char* const wrong :
         {"", "50055", ":50055", "h:", "h:x", "h:70000", "h:-1", "unix:", "unix:a", "unix:/a/"}) {
      CAPTURE(wrong);
      const auto path = socket_path(wrong, {.explicit_directory = "/d"});
      REQUIRE_FALSE(path);
      CHECK(path.error().code == Errc::kInvalidArgument);
    }
    CHECK_FALSE(socket_path("unix:/" + std::string(107, 'x'), {}));
    CHECK(socket_path("unix:/" + std::string(106, 'x'), {}));
  }
}

TEST_SUITE("SocketLock") {
  TEST_CASE("the lock has one holder at a time, and the last removes its file") {
    const Directory directory;
    const fs::path socket = directory.path() / "made" / "x.sock";
    std::optional<SocketLock> first;
    {
      auto taken = SocketLock::take(socket, "");
      REQUIRE(taken);
      first.emplace(std::move(*taken));
    }

    const auto second = SocketLock::take(socket, "");

    REQUIRE_FALSE(second);
    CHECK(second.error().code == Errc::kRefused);
    CHECK(second.error().detail.find("pid " + std::to_string(::getpid())) != std::string::npos);
    first.reset();
    CHECK_FALSE(fs::exists(socket.string() + ".lock"));
    CHECK(SocketLock::take(socket, ""));
  }

  TEST_CASE("an unknown group is an invalid argument") {
    const Directory directory;

    const auto lock = SocketLock::take(directory.path() / "x.sock", "no-such-group");

    REQUIRE_FALSE(lock);
    CHECK(lock.error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("a directory that cannot be made is refused") {
    const auto lock = SocketLock::take("/proc/nothing/x.sock", "");

    REQUIRE_FALSE(lock);
    CHECK(lock.error().code == Errc::kRefused);
  }
}

TEST_SUITE("Listener") {
  TEST_CASE("replaces the socket of a dead server, and removes its own") {
    const Directory directory;
    const fs::path path = directory.path() / "x.sock";
    const auto lock = SocketLock::take(path, "");
    REQUIRE(lock);
    {
      // A killed server leaves a socket without a listener.
      const UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      sockaddr_un at{};
      at.sun_family = AF_UNIX;
      path.string().copy(at.sun_path, sizeof at.sun_path - 1);
      REQUIRE(::bind(dead.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0);
    }
    CHECK_FALSE(can_connect(path));

    {
      const auto listener = Listener::open(*lock, "");
      REQUIRE(listener);
      CHECK(can_connect(path));
      CHECK((fs::status(path).permissions() & fs::perms::mask) == fs::perms(0660));
    }

    CHECK_FALSE(fs::exists(path));
  }

  TEST_CASE("a file that is not a socket is not removed") {
    const Directory directory;
    const fs::path path = directory.path() / "x.sock";
    std::ofstream(path) << "precious";
    const auto lock = SocketLock::take(path, "");
    REQUIRE(lock);

    const auto listener = Listener::open(*lock, "");

    REQUIRE_FALSE(listener);
    CHECK(listener.error().code == Errc::kRefused);
    CHECK(fs::file_size(path) == 8);
  }
}

TEST_SUITE("peers") {
  TEST_CASE("the kernel reports the process at the other end") {
    int pair[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    const UniqueFd one(pair[0]);
    const UniqueFd other(pair[1]);

    const auto peer = peer_of(one.get());

    REQUIRE(peer);
    CHECK(peer->uid == ::geteuid());
    CHECK(peer->pid == ::getpid());
    CHECK_FALSE(peer_of(-1));
  }

  TEST_CASE("root, the own user and allowed users may connect") {
    CHECK(may_connect(::geteuid(), {}));
    CHECK(may_connect(0, {}));
    CHECK(may_connect(12345, {999, 12345}));
    CHECK_FALSE(may_connect(54321, {999, 12345}));
  }
}

TEST_SUITE("listen_tcp") {
  TEST_CASE("port 0 becomes a real port, in both families") {
    const auto v4 = listen_tcp("127.0.0.1:0", "--http-addr");
    REQUIRE(v4);
    CHECK(v4->address.starts_with("127.0.0.1:"));
    CHECK(v4->address != "127.0.0.1:0");
    if (const auto v6 = listen_tcp("[::1]:0", "--http-addr"))
      CHECK(v6->address.starts_with("[::1]:"));
  }

  TEST_CASE("a taken port is refused, and an invalid address is an invalid argument") {
    const auto first = listen_tcp("127.0.0.1:0", "--http-addr");
    REQUIRE(first);

    const auto second = listen_tcp(first->address, "--http-addr");

    REQUIRE_FALSE(second);
    CHECK(second.error().code == Errc::kRefused);
    CHECK(second.error().detail.find(first->address) != std::string::npos);
    for (const char* const wrong : {"", "9091", "127.0.0.1:", "127.0.0.1:http", "no host:1"}) {
      CAPTURE(wrong);
      const auto none = listen_tcp(wrong, "--http-addr");
      REQUIRE_FALSE(none);
      CHECK(none.error().code == Errc::kInvalidArgument);
    }
  }
}

}  // namespace
}  // namespace pegaflow::server
