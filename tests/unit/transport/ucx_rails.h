#pragma once
/// \file
/// The rails that the tests of the RDMA lane use.

#include <cstdlib>
#include <string>
#include <utility>

#include "transport/ucx/ucx_fabric.h"

namespace pegaflow::testing {

/// UCX over TCP on the loopback device; or, with PEGA_TEST_UCX_RAIL=rxe0:1, the card of that name.
/// PEGA_UCX_LIBRARY names another UCX than the installed one, as for our programs.
/// More patient than in production: a busy machine, and even more a card in software, responds
/// late.
inline UcxFabric::Options ucx_options(std::size_t rails = 1) {
  const char* const card = std::getenv("PEGA_TEST_UCX_RAIL");
  UcxFabric::Options options;
  options.rails.assign(rails, card == nullptr ? "lo" : card);
  options.sockets = card == nullptr;
  if (const char* const library = std::getenv("PEGA_UCX_LIBRARY")) options.library = library;
  options.connect_timeout = std::chrono::seconds(card == nullptr ? 10 : 20);
  options.stall_timeout = std::chrono::seconds(10);
  options.fence_timeout = std::chrono::seconds(10);
  return options;
}

}  // namespace pegaflow::testing
