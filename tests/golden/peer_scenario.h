#pragma once
/// \file
/// The conversation of the transcripts between nodes: each call of peer.capnp, by two real servers.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/id128.h"
#include "tests/support/engine_memory.h"
#include "tests/support/server_process.h"
#include "tests/support/test_engine.h"
#include "transport/host/host_device.h"

namespace pegaflow::testing {

/// An engine at one of the two nodes, with a fixed namespace, fixed keys and a fixed scheduler.
class GoldenEngine {
 public:
  static constexpr Id128 kScheduler{.high = 0x676f6c64656e, .low = 1};
  static constexpr std::size_t kBlocks = 3;

  explicit GoldenEngine(const std::string& socket);
  /// Saves the blocks that the other node finds, as job 1.
  void save();
  [[nodiscard]] TestEngine& engine() { return *engine_; }
  [[nodiscard]] EngineMemory& memory() { return memory_; }

 private:
  EngineMemory memory_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<TestEngine> engine_;
};

/// Options of the owner, at `address`.
ServerProcess::Options golden_owner(const std::string& address);
/// Options of the reader that connects to `address`.
ServerProcess::Options golden_reader(const std::string& address);

/// The part of the engine at `reader`, which reads from the node at `owner`, whose incarnation is
/// `node`. GoldenEngine::save() was called there before.
/// Throws std::runtime_error that names the first unexpected result.
void run_peer_scenario(const ServerProcess& reader, const std::string& owner, const Id128& node);

}  // namespace pegaflow::testing
