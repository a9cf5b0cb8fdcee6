#include "directory/redis/reply.h"

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/seed.h"

namespace pegaflow::directory {
namespace {

/// All replies in `bytes`, which arrive in parts of `step`; the error of the last one.
Result<std::vector<Reply>> read_all(const std::string& bytes, std::size_t step,
                                    const ReplyReader::Limits& limits = {}) {
  ReplyReader reader(limits);
  std::vector<Reply> replies;
  for (std::size_t from = 0; from < bytes.size(); from += step) {
    reader.feed(std::span<const char>(bytes).subspan(from, std::min(step, bytes.size() - from)));
    for (;;) {
      PEGA_TRY_LET(std::optional<Reply> reply, reader.next());
      if (!reply) break;
      replies.push_back(std::move(*reply));
    }
  }
  return replies;
}

TEST_SUITE("ReplyReader") {
  TEST_CASE("every type of RESP2 is read, in whatever parts it arrives") {
    const std::string bytes =
        "+OK\r\n-ERR "
        "no\r\n:-7\r\n$3\r\na\r\n\r\n$-1\r\n*3\r\n$0\r\n\r\n*1\r\n:1\r\n$-1\r\n*0\r\n*-1\r\n";
    for (const std::size_t step : {1, 2, 5, 1000}) {
      const auto read = read_all(bytes, step);

      REQUIRE(read);
      REQUIRE(read->size() == 8);
      CHECK((*read)[0].text == "OK");
      CHECK((*read)[1].is(Reply::Kind::kError));
      CHECK((*read)[2].integer == -7);
      CHECK((*read)[3].text == "a\r\n");
      CHECK((*read)[4].is(Reply::Kind::kNil));
      REQUIRE((*read)[5].items.size() == 3);
      CHECK((*read)[5].items[1].items[0].integer == 1);
      CHECK((*read)[6].is(Reply::Kind::kArray));
      CHECK((*read)[7].is(Reply::Kind::kNil));
    }
  }

  TEST_CASE("bytes that are no reply end the connection") {
    for (const std::string bytes :
         {"\r\n", "hello\r\n", ":x\r\n", ":\r\n", "$-2\r\n", "$1\r\nab\r\n", "*-2\r\n", "%1\r\n"}) {
      const auto read = read_all(bytes, 1);

      REQUIRE_FALSE(read);
      CHECK(read.error().code == Errc::kCorrupt);
    }
  }

  TEST_CASE("a header that announces more than the limits is rejected before any of it arrives") {
    const ReplyReader::Limits limits{
        .reply_bytes = 1000, .line_bytes = 100, .items = 50, .depth = 3};
    const std::string deep = "*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n";
    std::string wide = "*50\r\n";
    for (int i = 0; i < 50; ++i) wide += "*1\r\n:1\r\n";
    std::string large = "*20\r\n";
    for (int i = 0; i < 20; ++i) large += "$100\r\n" + std::string(100, 'x') + "\r\n";
    for (const std::string& bytes :
         {std::string("*2147483648\r\n"), std::string("$9223372036854775807\r\n"),
          std::string("*99999999999999999999\r\n"), std::string("$1001\r\n"), deep, wide, large,
          "+" + std::string(200, 'x')}) {
      const auto read = read_all(bytes, 7, limits);

      REQUIRE_FALSE(read);
      CHECK(read.error().code == Errc::kCorrupt);
    }
  }

  TEST_CASE("random damage to valid replies never does more than end the connection") {
    const std::uint64_t seed = testing::seed();
    std::mt19937_64 random(seed);
    const std::string good = "*2\r\n$12\r\n0123456789ab\r\n*2\r\n:1\r\n$-1\r\n+OK\r\n-ERR x\r\n";
    std::size_t rejected = 0;
    for (int round = 0; round < 20'000; ++round) {
      std::string bytes = good;
      for (std::uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
        bytes[random() % bytes.size()] = "*$:+-\r\n0123456789x"[random() % 18];
      }
      const auto read = read_all(bytes, 1 + random() % 40);
      if (!read) {
        ++rejected;
        CHECK(read.error().code == Errc::kCorrupt);
      }
    }
    CHECK(rejected > 1000);
    CHECK(rejected < 20'000);
  }
}

}  // namespace
}  // namespace pegaflow::directory
