#pragma once
/// \file
/// Whether the engines behind a router share one namespace, by what their servers say.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pegaflow::router {

/// One connected engine core, as its pegaflow-server lists it.
struct InstanceNamespace {
  std::string instance;
  std::string hash;
  std::vector<std::pair<std::string, std::string>> factors;  ///< Name and value.
};

/// The connected instances of an answer to GET /instances.
/// Errors: kCorrupt for what is no such answer.
Result<std::vector<InstanceNamespace>> read_instances(std::string_view answer);

/// A factor that has several values.
struct FactorDifference {
  struct Value {
    std::string value;
    std::vector<std::string> instances;
  };
  std::string factor;
  std::vector<Value> values;  ///< In the order of their instances.
};

/// What a comparison found.
struct NamespaceReport {
  std::size_t instances = 0;
  std::size_t namespaces = 0;                 ///< Different ones; more than 1 is a mistake.
  std::vector<FactorDifference> differences;  ///< Of all instances; empty when they are equal.

  /// One line for people and logs; empty without a difference. Of long values that begin alike it
  /// shows where they part, of many instances the first ones.
  [[nodiscard]] std::string text() const;
};

/// Two hashes with equal factors differ in a factor of their own, `namespace`.
NamespaceReport compare_namespaces(std::span<const InstanceNamespace> instances);

/// What is known of the servers of --servers.
struct NamespaceView {
  struct Server {
    std::string url;
    bool is_up = false;
  };
  bool is_watched = false;  ///< Servers were named.
  std::vector<Server> servers;
  NamespaceReport report;

  /// Whether every server answers and all engines share one namespace.
  [[nodiscard]] bool is_good() const;
  /// A JSON object for /health.
  [[nodiscard]] std::string json() const;
};

}  // namespace pegaflow::router
