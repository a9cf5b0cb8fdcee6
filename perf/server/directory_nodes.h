#pragma once
/// \file
/// Servers on this machine that know each other by a directory on real Redis servers, and two that
/// do without.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <kj/async-io.h>

#include "harness/child.h"
#include "harness/redis_process.h"
#include "harness/server_process.h"
#include "harness/wire_client.h"
#include "perf/lib/keys.h"

namespace pegaflow::perf {

/// Blocks of each node with a directory; 512 of them are announced.
inline constexpr std::uint64_t kDirectoryBlocks = 16384;

/// Three Redis servers and the nodes. Thread-bound.
class DirectoryNodes {
 public:
  struct Options {
    std::string program;  ///< Program of the servers; empty: that of this build.
    std::size_t nodes = 16;
    std::size_t redis = 3;
    std::size_t keys = 640;  ///< Keys of a request.
    std::uint64_t seed = 1;
  };
  /// The nodes of a measurement, by how they find blocks of others.
  enum class Way : std::uint8_t {
    kDirectory,  ///< Each of the nodes in turn.
    kListed,     ///< One that has all of them in --peers.
    kAlone,      ///< One without other nodes.
  };
  static Result<std::unique_ptr<DirectoryNodes>> start(const Options& options);

  /// Claims keys that no node has, new ones each time, at node `turn`; returns the microseconds.
  /// Errors: the server's; kInternal when a key was found.
  Result<double> claim_missing(Way way, std::size_t turn);
  /// Looks up a prompt of another node at node `turn`; returns whether all of it was found.
  Result<bool> find_elsewhere(std::size_t turn);

  [[nodiscard]] std::vector<harness::RedisProcess>& redis() noexcept { return redis_; }
  /// Keys of all Redis servers: nearly one for each anchor. Errors: those of RedisProcess::call().
  [[nodiscard]] Result<std::int64_t> stored_keys() const;
  /// Waits until all nodes use the directory, each of its servers. Errors: kTimeout after 60 s.
  Result<void> wait_until_used() const;
  /// The sum of a metric over all nodes with the directory.
  [[nodiscard]] Result<double> sum(std::string_view metric) const;
  [[nodiscard]] std::size_t count() const noexcept { return nodes_.size(); }

 private:
  struct Node {
    harness::ServerProcess server;
    std::unique_ptr<harness::WireClient> client;
  };
  explicit DirectoryNodes(const Options& options);
  Result<Node> serve(std::vector<std::string> arguments, std::uint64_t blocks);
  Result<void> start_redis();
  Result<void> start_nodes();
  Result<void> wait_until_announced() const;
  [[nodiscard]] KeySource keys_of(std::size_t node) const {
    return KeySource(options_.seed + node);
  }

  const Options options_;
  harness::TemporaryDirectory files_;
  std::vector<std::string> addresses_;
  kj::AsyncIoContext io_;
  KeySource missing_;
  std::vector<harness::RedisProcess> redis_;
  std::vector<Node> nodes_;
  std::vector<Node> others_;  ///< kListed, kAlone.
  std::uint64_t next_missing_ = 0;
};

}  // namespace pegaflow::perf
