#pragma once
/// \file
/// Several nodes on one machine: real servers in one cluster, each with an engine.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tests/support/engine_memory.h"
#include "tests/support/server_process.h"
#include "tests/support/test_engine.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {

/// Addresses of nodes that need each other's before any of them runs: loopback ones that belong to
/// this process alone, so that no unique port is needed.
inline std::vector<std::string> node_addresses(std::size_t count) {
  static std::atomic<unsigned> clusters{0};
  const auto pid = static_cast<unsigned>(::getpid());
  const unsigned cluster = clusters++;
  std::vector<std::string> addresses;
  for (unsigned i = 0; i < count; ++i) {
    addresses.push_back(fmt::format("127.{}.{}.{}:{}", 1 + pid / 250 % 250, 1 + pid % 250, i + 1,
                                    20000 + (pid / 62500 + cluster) % 10000));
  }
  return addresses;
}

inline std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ",") + part;
  return text;
}

/// Options of the node at `address` among `all`, over sockets only unless `more` names --nics.
/// Deadlines are long enough that a busy machine does not turn a hit into a miss.
inline ServerProcess::Options node_options(const std::string& address,
                                           const std::vector<std::string>& all,
                                           std::vector<std::string> more = {},
                                           const std::string& pool_size = "64mb") {
  ServerProcess::Options options{.pool_size = pool_size};
  options.arguments = {"--peers",         joined(all), "--peer-listen",    address,
                       "--peer-deadline", "5s",        "--fetch-deadline", "8s"};
  const bool names_nics = std::find(more.begin(), more.end(), "--nics") != more.end();
  if (!names_nics) options.arguments.insert(options.arguments.end(), {"--nics", "none"});
  options.arguments.insert(options.arguments.end(), more.begin(), more.end());
  return options;
}

/// One engine at a server, with memory for `blocks` blocks of two segments each.
struct EngineAt {
  EngineAt(const ServerProcess& server, std::size_t piece_bytes, std::size_t blocks,
           Mover::Options mover = patient_mover())
      : memory(engine_memory(2, piece_bytes, blocks)) {
    mover.coming_patience = kHang;
    TestEngine::Options options;
    options.socket = server.socket();
    options.mover = std::move(mover);
    engine = std::make_unique<TestEngine>(std::move(options), memory, *device);
    engine->wait_ready();
  }

  /// Loads a claim of the blocks `first`, `first` + 1, ...: each is right, or named as failed.
  Mover::Finished load_and_check(const CacheSession::Answer& claimed, std::uint64_t first) const {
    const auto blocks = blocks_from(0, claimed.blocks);
    Mover::Finished loaded = engine->load(claimed.token, blocks);
    CHECK(loaded.blocks + loaded.failed_blocks.size() == claimed.blocks);
    CHECK(engine->wrong_blocks(numbers_from(first, claimed.blocks), blocks, loaded.failed_blocks) ==
          0);
    engine->session().unclaim(claimed.token);
    return loaded;
  }

  EngineMemory memory;
  std::unique_ptr<HostDevice> device = HostDevice::create({}).value();
  std::unique_ptr<TestEngine> engine;
};

/// Waits until `server` can send requests to the node at `address`; false after kHang.
inline bool sees(const ServerProcess& server, const std::string& address) {
  return server.metric_becomes(fmt::format("pegaflow_peer_ready{{peer=\"{}\"}}", address), 1);
}
inline bool sees_no_more(const ServerProcess& server, const std::string& address) {
  return server.metric_becomes(fmt::format("pegaflow_peer_ready{{peer=\"{}\"}}", address), 0);
}

/// Waits until the server has scanned the disk with that file. Before that another state is shown.
inline bool disk_is_ready(const ServerProcess& server, const std::filesystem::path& file) {
  const std::string ready =
      "pegaflow_ssd_disk_state{disk=\"" + file.string() + "\",state=\"ready\"} 1\n";
  const auto end = std::chrono::steady_clock::now() + kHang;
  while (server.get("/metrics").body.find(ready) == std::string::npos) {
    if (std::chrono::steady_clock::now() >= end) return false;
  }
  return true;
}

/// Waits until `server` holds nothing of its fetches and loans, and has one connection of each of
/// the `dialers`, if their number is given.
inline void check_nothing_is_left(const ServerProcess& server, std::optional<double> dialers) {
  for (const char* const name :
       {"pegaflow_fetch_batches", "pegaflow_fetch_bytes",
        "pegaflow_quarantine_slots{reason=\"fetch\"}", "pegaflow_claims", "pegaflow_pins"}) {
    CHECK_MESSAGE(server.metric_becomes(name, 0), name);
  }
  if (dialers) CHECK(server.metric_becomes("pegaflow_peer_connections", *dialers));
}

/// Writes a secret that only its owner may read.
inline std::string secret_file(const std::filesystem::path& directory, const std::string& secret) {
  std::string path = (directory / ("secret-" + secret.substr(0, 8))).string();
  std::ofstream(path) << secret << '\n';
  ::chmod(path.c_str(), 0600);
  return path;
}

}  // namespace pegaflow::testing
