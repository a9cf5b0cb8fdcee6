#include "directory/redis/redis_url.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <sys/stat.h>

#include <doctest/doctest.h>

#include "tests/support/server_process.h"

namespace pegaflow::directory {
namespace {

std::string file_with(const testing::TemporaryDirectory& directory, const std::string& text,
                      mode_t mode) {
  const std::string path = directory.path() / "login";
  std::ofstream(path, std::ios::trunc) << text;
  ::chmod(path.c_str(), mode);
  return path;
}

TEST_SUITE("RedisUrl") {
  TEST_CASE("an address has a host, and may have a port, a database, TLS, a user and a password") {
    const auto plain = RedisUrl::parse("redis://cache").value();
    CHECK(plain.host == "cache");
    CHECK(plain.port == 6379);
    CHECK(plain.database == 0);
    CHECK_FALSE(plain.is_tls);

    const auto full = RedisUrl::parse("rediss://pega:s%3Acr%40t@[fd00::7]:7000/3").value();
    CHECK(full.is_tls);
    CHECK(full.user == "pega");
    CHECK(full.password == "s:cr@t");
    CHECK(full.host == "fd00::7");
    CHECK(full.port == 7000);
    CHECK(full.database == 3);
    CHECK(full.name() == "rediss://[fd00::7]:7000/3");
    CHECK(RedisUrl::parse("redis://:secret@h").value().user.empty());
  }

  TEST_CASE("an address of another form is rejected, without its password in the error") {
    for (const char* const text :
         {"", "cache:6379", "http://cache", "redis://", "redis://:1@", "redis://h:", "redis://h:0",
          "redis://h:65536", "redis://h:6379x", "redis://h/one", "redis://u:geheim%4@h",
          "redis://u:geheim@h:x", "redis://[::1", "redis://[::1]7"}) {
      const auto url = RedisUrl::parse(text);

      REQUIRE_FALSE(url);
      CHECK(url.error().code == Errc::kInvalidArgument);
      CHECK(url.error().detail.find("geheim") == std::string::npos);
    }
  }

  TEST_CASE("a file has a password, or a user and a password") {
    const testing::TemporaryDirectory directory;
    CHECK(RedisLogin::read(file_with(directory, "geheim\n", 0600)).value().password == "geheim");
    const auto both = RedisLogin::read(file_with(directory, "pega\r\ngeheim\r\n", 0640)).value();
    CHECK(both.user == "pega");
    CHECK(both.password == "geheim");
  }

  TEST_CASE("a file that others may read, or with other contents, is rejected") {
    const testing::TemporaryDirectory directory;
    CHECK(RedisLogin::read(file_with(directory, "geheim\n", 0644)).error().code == Errc::kRefused);
    CHECK(RedisLogin::read(directory.path() / "none").error().code == Errc::kRefused);
    for (const std::string& text :
         {std::string("\n"), std::string("a\nb\nc\n"), std::string(600, 'x')}) {
      const auto login = RedisLogin::read(file_with(directory, text, 0600));
      CHECK(login.error().code == Errc::kInvalidArgument);
    }
  }
}

}  // namespace
}  // namespace pegaflow::directory
