#include "base/error.h"

#include <cerrno>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

Result<int> half(int number) {
  if (number % 2 != 0) return fail(Errc::kInvalidArgument, "{} is odd", number);
  return number / 2;
}

Result<int> quarter(int number) {
  PEGA_TRY_LET(const int once, half(number));
  PEGA_TRY(half(once));
  return once / 2;
}

TEST_SUITE("Error") {
  TEST_CASE("PEGA_TRY returns the first error unchanged") {
    CHECK(quarter(8).value() == 2);
    CHECK(quarter(7).error().detail == "7 is odd");
    CHECK(quarter(6).error().detail == "3 is odd");
  }

  TEST_CASE("an errno becomes the code that determines the caller's reaction") {
    CHECK(fail_errno(ENOMEM, "fallocate").value().code == Errc::kOutOfCapacity);
    CHECK(fail_errno(EACCES, "open /x").value().code == Errc::kRefused);
    CHECK(fail_errno(ECONNRESET, "send").value().code == Errc::kPeerLost);
    CHECK(fail_errno(EIO, "read").value().code == Errc::kIo);
    CHECK(fail_errno(EACCES, "open /x").value().detail == "open /x: Permission denied");
  }

  TEST_CASE("every code has a name of its own") {
    for (std::size_t a = 0; a < kErrcCount; ++a) {
      CHECK(to_string(static_cast<Errc>(a)) != "unknown");
      for (std::size_t b = 0; b < a; ++b) {
        CHECK(to_string(static_cast<Errc>(a)) != to_string(static_cast<Errc>(b)));
      }
    }
  }
}

}  // namespace
}  // namespace pegaflow
