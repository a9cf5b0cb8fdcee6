#include "server/descriptors.h"

#include <doctest/doctest.h>

namespace pegaflow::server {
namespace {

/// Descriptors that connections take.
std::uint64_t descriptors_of(const Connections& connections) {
  return 4 * connections.clients + 5 * connections.from_nodes;
}

TEST_SUITE("descriptors") {
  TEST_CASE("every connection that is accepted is counted, with a directory 1,024 from nodes") {
    ServerOptions options;
    CHECK(connections_wanted(options) == Connections{.clients = 1024, .from_nodes = 0});
    CHECK(descriptors_for_dialed(options) == 0);
    options.peer_listen = "10.0.0.1:50055";
    CHECK(connections_wanted(options) == Connections{.clients = 1024, .from_nodes = 256});
    options.peers = {"10.0.0.2:50055"};
    CHECK(descriptors_for_dialed(options) == 5);
    options.directory = {"redis://a", "redis://b"};
    CHECK(connections_wanted(options) == Connections{.clients = 1024, .from_nodes = 1024});
    CHECK(descriptors_for_dialed(options) == 5 + 128 * 5 + 4);
  }

  TEST_CASE("with a directory and few descriptors, nodes give way first, down to a quarter") {
    const Connections wanted{.clients = 1000, .from_nodes = 1000};
    CHECK(connections_within(wanted, 20'000, 1000, {}) == wanted);
    CHECK(connections_within(wanted, 8000, 1000, {}) ==
          Connections{.clients = 1000, .from_nodes = 600});
    CHECK(connections_within(wanted, 5000, 1000, {}) ==
          Connections{.clients = 750, .from_nodes = 200});
    CHECK(connections_within({.clients = 1000}, 3000, 1000, {}) ==
          Connections{.clients = 500, .from_nodes = 0});
  }

  TEST_CASE("without a directory nodes keep two connections of each listed node, at most half") {
    const auto fit = [](std::size_t peers, std::uint64_t limit) {
      ServerOptions options;
      options.peer_listen = "10.0.0.1:50055";
      options.peers.resize(peers);
      return connections_within(connections_wanted(options), limit,
                                kOwnDescriptors + descriptors_for_dialed(options), peers);
    };
    // Three peers take six connections from the clients, not a quarter of all descriptors.
    CHECK(fit(3, 4096) == Connections{.clients = 948, .from_nodes = 6});
    CHECK(fit(3, 1024) == Connections{.clients = 180, .from_nodes = 6});
    CHECK(fit(64, 4096) == Connections{.clients = 720, .from_nodes = 128});
    CHECK(fit(64, 1024) == Connections{.clients = 57, .from_nodes = 44});
    // No node is listed: others may dial this one, with what the clients leave.
    CHECK(fit(0, 4096) == Connections{.clients = 958, .from_nodes = 1});
    CHECK(fit(0, 8192) == Connections{.clients = 1024, .from_nodes = 256});
  }

  TEST_CASE(
      "what fits stays within the limit, whatever is wanted, with one of each sort at least") {
    for (std::uint64_t limit = 0; limit < 12'000; limit += 61) {
      for (const std::uint64_t own : {0, 256, 1000}) {
        for (const Connections& wanted : {Connections{1024, 1024}, {10, 1024}, {4000, 5}, {1, 0}}) {
          for (const std::optional<std::size_t> listed :
               {std::optional<std::size_t>(), {0}, {64}}) {
            const Connections fit = connections_within(wanted, limit, own, listed);
            CHECK(fit.clients >= 1);
            CHECK(fit.clients <= wanted.clients);
            CHECK((fit.from_nodes >= 1 || wanted.from_nodes == 0));
            CHECK(fit.from_nodes <= wanted.from_nodes);
            if (limit >= own + 40) CHECK(descriptors_of(fit) + own <= limit);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace pegaflow::server
