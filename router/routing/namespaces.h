#pragma once
/// \file
/// Whether the engines behind a router share one namespace, according to their servers.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "router/routing/direct_report.h"
#include "router/routing/instance_namespace.h"

namespace pegaflow::router {

/// The connected instances of a response to GET /instances.
/// Errors: kCorrupt for an invalid list.
Result<std::vector<InstanceNamespace>> read_instances(std::string_view answer);

/// A factor with several values.
struct FactorDifference {
  struct Value {
    std::string value;
    std::vector<std::string> instances;
  };
  std::string factor;
  std::vector<Value> values;  ///< In the order of their instances.
};

/// The result of a comparison.
struct NamespaceReport {
  std::size_t instances = 0;
  std::size_t namespaces = 0;                 ///< Distinct namespaces; above 1 is a mistake.
  std::vector<FactorDifference> differences;  ///< Empty when all instances are equal.

  /// One line for logs; empty without a difference. Of long values with a common beginning it shows
  /// the part that differs, of many instances the first ones.
  [[nodiscard]] std::string text() const;
};

/// Compares all instances. Hashes that differ with equal factors are reported as a factor named
/// `namespace`.
NamespaceReport compare_namespaces(std::span<const InstanceNamespace> instances);

/// The state of the servers of --servers.
struct NamespaceView {
  struct Server {
    std::string url;
    bool is_up = false;
  };
  bool is_watched = false;  ///< --servers is set.
  std::vector<Server> servers;
  NamespaceReport report;
  bool wants_direct = false;  ///< --flow direct.
  DirectReport direct{};

  /// Whether every server responds and all engines share one namespace.
  [[nodiscard]] bool is_good() const;
  /// A JSON object for /health.
  [[nodiscard]] std::string json() const;
  /// Whether pages show `direct`.
  [[nodiscard]] bool shows_direct() const {
    return is_watched && (wants_direct || direct.has_groups);
  }
};

}  // namespace pegaflow::router
