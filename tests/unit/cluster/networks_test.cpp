#include "cluster/found/networks.h"

#include <string>

#include <doctest/doctest.h>

namespace pegaflow::cluster {
namespace {

TEST_SUITE("Networks") {
  TEST_CASE("an address is in a network if its first bits are") {
    const Networks networks = Networks::parse({"10.2.0.0/15", "192.0.2.7", "fd00:1::/32"}).value();
    for (const char* const inside :
         {"10.2.0.1:1", "10.3.255.255:65535", "192.0.2.7:50055", "[fd00:1::7]:50055"}) {
      CHECK(networks.contains(inside));
    }
    for (const char* const outside :
         {"10.4.0.1:1", "192.0.2.8:1", "[fd00:2::7]:1", "127.0.0.1:1", "[::ffff:11.2.0.1]:1"}) {
      CHECK_FALSE(networks.contains(outside));
    }
    CHECK(Networks::parse({"0.0.0.0/0"}).value().contains("8.8.8.8:53"));
    CHECK_FALSE(Networks::parse({"0.0.0.0/0"}).value().contains("[fd00::1]:53"));
    CHECK_FALSE(Networks().contains("10.2.0.1:1"));
  }

  TEST_CASE("a text that is not an IP address with a port is in no network") {
    const Networks networks = Networks::parse({"0.0.0.0/0", "::/0"}).value();
    for (const std::string text :
         {"", "host:1", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:x",
          "fd00::1:1", "[10.0.0.1]:1", "[]:1", "10.0.0.1/8:1"}) {
      CHECK_FALSE(networks.contains(text));
    }
  }

  TEST_CASE("a network of another form is rejected") {
    for (const std::string text :
         {"", "host/8", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/x", "10.0.0.1/8", "fd00::/129"}) {
      const auto networks = Networks::parse({text});
      REQUIRE_FALSE(networks);
      CHECK(networks.error().code == Errc::kInvalidArgument);
    }
  }
}

}  // namespace
}  // namespace pegaflow::cluster
