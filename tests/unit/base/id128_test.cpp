#include "base/id128.h"

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

TEST_SUITE("Id128") {
  TEST_CASE("random ids are never zero and never equal") {
    const Id128 a = Id128::random();
    const Id128 b = Id128::random();
    CHECK_FALSE(a.is_none());
    CHECK(a != b);
    CHECK(Id128{}.is_none());
  }

  TEST_CASE("an id prints as 32 digits") {
    CHECK(to_string(Id128{0x1, 0xABCD}) == "0000000000000001000000000000abcd");
  }
}

}  // namespace
}  // namespace pegaflow
