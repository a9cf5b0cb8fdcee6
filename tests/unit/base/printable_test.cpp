#include "base/printable.h"

#include <string>

#include <doctest/doctest.h>

#include "base/line_limit.h"
#include "base/log.h"

namespace pegaflow {
namespace {

std::string g_line;

TEST_SUITE("log lines that other processes cause") {
  TEST_CASE("control characters are escaped, all other bytes stay") {
    CHECK(printable("plain = \"text\" \xc3\xa9") == "plain = \"text\" \xc3\xa9");
    CHECK(printable("a\nb\t\x1b[31m\x7f") == "a\\x0ab\\x09\\x1b[31m\\x7f");
    CHECK(printable(std::string("\0", 1)) == "\\x00");
  }

  TEST_CASE("a build with a newline does not begin a log line of its own") {
    set_log_sink([](LogLevel, std::string_view line) { g_line = line; });
    Log("test").warn("peer entered build=\"{}\"", "x\n2026-01-01 error: forged");
    set_log_sink(nullptr);
    CHECK(g_line == "test: peer entered build=\"x\\x0a2026-01-01 error: forged\"");
  }

  TEST_CASE("one line passes per interval, with the count of those that did not") {
    LineLimit lines(std::chrono::seconds(10));
    const TimePoint begin = TimePoint(std::chrono::seconds(100));
    CHECK(lines.pass(begin) == 0);
    for (int i = 0; i < 5; ++i) CHECK_FALSE(lines.pass(begin + std::chrono::seconds(i)));
    CHECK(lines.pass(begin + std::chrono::seconds(10)) == 5);
    CHECK_FALSE(lines.pass(begin + std::chrono::seconds(19)));
  }
}

}  // namespace
}  // namespace pegaflow
