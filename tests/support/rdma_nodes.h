#pragma once
/// \file
/// Nodes that read from each other over UCX: over the cards that PEGA_TEST_RDMA_CARDS names, one
/// for each node in turn ("rxe0,rxe1"), and over TCP on loopback without it.

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tests/support/nodes.h"

namespace pegaflow::testing {

inline std::vector<std::string> rdma_cards() {
  const char* const text = std::getenv("PEGA_TEST_RDMA_CARDS");
  std::vector<std::string> cards;
  std::string word;
  for (const char c : std::string(text == nullptr ? "" : text) + ",") {
    if (c != ',') {
      word += c;
    } else if (!word.empty()) {
      cards.push_back(std::exchange(word, {}));
    }
  }
  return cards;
}

/// Options of node number `number`, at `all[number]`.
inline ServerProcess::Options rdma_node(std::size_t number, const std::vector<std::string>& all,
                                        std::vector<std::string> more = {},
                                        const std::string& pool_size = "64mb") {
  const std::vector<std::string> cards = rdma_cards();
  const std::string card = cards.empty() ? "lo" : cards[number % cards.size()];
  more.insert(more.begin(), {"--nics", card});
  ServerProcess::Options options = node_options(all.at(number), all, std::move(more), pool_size);
  if (cards.empty()) options.command_prefix = {"env", "PEGAFLOW_TEST_UCX_OVER_TCP=lo"};
  return options;
}

inline std::string lane_sample(const std::string& address, const std::string& lane) {
  return fmt::format("pegaflow_peer_lane{{peer=\"{}\",lane=\"{}\"}}", address, lane);
}

/// Waits until `server` reads from the node at `address` over `lane`; false after kHang.
inline bool reads_over(const ServerProcess& server, const std::string& address,
                       const std::string& lane) {
  return server.metric_becomes(lane_sample(address, lane), 1);
}

}  // namespace pegaflow::testing
