#pragma once
/// \file
/// An engine core as its pegaflow-server lists it.

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pegaflow::router {

/// The memory of an engine that others of its direct group on its host may read.
struct DirectMemory {
  std::string group;
  std::string lane;
  bool operator==(const DirectMemory&) const = default;
};

/// A connected engine core.
struct InstanceNamespace {
  std::string instance;
  std::string hash;
  std::vector<std::pair<std::string, std::string>> factors;  ///< Name and value.
  std::optional<DirectMemory> direct{};  ///< Unset: none, or its workers differ.
};

}  // namespace pegaflow::router
