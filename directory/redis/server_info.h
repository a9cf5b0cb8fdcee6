#pragma once
/// \file
/// Version and settings of a server, as it tells them, for people.

#include <cstdint>
#include <string>
#include <string_view>

namespace pegaflow::directory {

/// The part of INFO that matters for the directory. A value; empty where the server did not tell.
struct ServerInfo {
  std::string version;          ///< Such as "Redis 7.0.15" or "Valkey 8.0.1".
  std::string mode;             ///< "standalone", "cluster" or "sentinel".
  std::string policy;           ///< Its maxmemory-policy.
  std::uint64_t max_bytes = 0;  ///< Its maxmemory; 0: no limit.

  /// Takes what a text of INFO has; other members stay. Any bytes are allowed.
  void read(std::string_view text);
  bool operator==(const ServerInfo&) const = default;
};

}  // namespace pegaflow::directory
