#pragma once
/// \file
/// Which engines can read each other's memory, according to their servers.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "router/routing/instance_namespace.h"

namespace pegaflow::router {

/// A connected instance and the server that lists it. Views both.
struct ServedInstance {
  std::string_view server;
  const InstanceNamespace* instance = nullptr;
};

/// The result of a comparison.
struct DirectReport {
  /// An instance that no other one reads, and that reads no other one.
  struct Alone {
    std::string instance;
    std::string server;
    std::string why;
  };
  std::size_t paired = 0;    ///< Instances with a partner: see pair_engines().
  std::vector<Alone> alone;  ///< All others.
  bool has_groups = false;   ///< An instance has registered its memory.

  /// One line for logs: the first ones of `alone`; empty if there is none.
  [[nodiscard]] std::string text() const;
  /// A JSON object for /health.
  [[nodiscard]] std::string json() const;
};

/// Two instances are partners if one server lists both, and they have the same group, lane and
/// namespace.
DirectReport pair_engines(std::span<const ServedInstance> instances);

}  // namespace pegaflow::router
