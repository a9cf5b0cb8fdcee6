#include "base/units.h"

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

TEST_SUITE("units") {
  TEST_CASE("sizes are 1024-based whatever their spelling") {
    CHECK(parse_bytes("30gb").value() == 30ULL << 30);
    CHECK(parse_bytes("64 MiB").value() == 64ULL << 20);
    CHECK(parse_bytes("1.5k").value() == 1536);
    CHECK(parse_bytes("4096").value() == 4096);
    CHECK(parse_bytes("2TB").value() == 2ULL << 40);
  }

  TEST_CASE("the error for an invalid size gives an example") {
    CHECK(parse_bytes("much").error().detail ==
          "\"much\" is not a size; write for example 30gb, 512mb or 4096");
    CHECK(parse_bytes("-1gb").error().code == Errc::kInvalidArgument);
    CHECK(parse_bytes("nan").error().code == Errc::kInvalidArgument);
    CHECK(parse_bytes("").error().code == Errc::kInvalidArgument);
    CHECK(parse_bytes("30 gigs").error().detail.find("\"gigs\"") != std::string::npos);
    CHECK(parse_bytes("99999999tb").error().detail.find("exbibytes") != std::string::npos);
  }

  TEST_CASE("times need a unit") {
    CHECK(parse_duration("250ms").value() == std::chrono::milliseconds(250));
    CHECK(parse_duration("1.5s").value() == std::chrono::milliseconds(1500));
    CHECK(parse_duration("100 us").value() == std::chrono::microseconds(100));
    CHECK(parse_duration("2m").value() == std::chrono::minutes(2));
    CHECK(parse_duration("1h").value() == std::chrono::hours(1));
    CHECK(parse_duration("5").error().code == Errc::kInvalidArgument);
    CHECK(parse_duration("999999999999m").error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("printed sizes and times are short") {
    CHECK(format_bytes(512) == "512 B");
    CHECK(format_bytes(30ULL << 30) == "30 GiB");
    CHECK(format_bytes(1536) == "1.5 KiB");
    CHECK(format_duration(std::chrono::microseconds(37)) == "37 us");
    CHECK(format_duration(std::chrono::milliseconds(1500)) == "1.5 s");
    CHECK(format_duration(std::chrono::nanoseconds(0)) == "0 s");
    CHECK(format_duration(std::chrono::minutes(10)) == "10 min");
    CHECK(format_duration(std::chrono::hours(1)) == "1 h");
  }
}

}  // namespace
}  // namespace pegaflow
