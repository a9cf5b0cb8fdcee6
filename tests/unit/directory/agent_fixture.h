#pragma once
/// \file
/// Nodes with the real agent over servers in memory, in time that a test owns.

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "directory/agent.h"
#include "tests/unit/directory/memory_server.h"

namespace pegaflow::directory::testing {

inline Bytes32 bytes_of(unsigned value) {
  Bytes32 bytes{};
  bytes[0] = static_cast<std::byte>(value);
  return bytes;
}

/// Keys of `blocks` blocks that are all anchors, wherever they are in a prompt.
inline std::vector<BlockKey> anchors_from(std::uint64_t first, std::size_t blocks) {
  std::vector<BlockKey> keys;
  for (std::uint64_t word = first << 32; keys.size() < blocks; ++word) {
    BlockKey key;
    std::memcpy(key.bytes.data(), &word, sizeof word);
    if (is_anchor(key, false)) keys.push_back(key);
  }
  return keys;
}

/// One node of the directory.
struct TestNode {
  struct Options {
    unsigned number = 1;  ///< The last part of its address.
    std::uint64_t life = 1;
    unsigned secret = 1;
    AgentOptions agent{};
  };
  TestNode(std::vector<Data>& data, ManualClock& time, const Options& options) : clock(time) {
    std::vector<Commands*> commands;
    for (std::size_t i = 0; i < data.size(); ++i) {
      servers.push_back(
          std::make_unique<MemoryServer>(data[i], clock, fmt::format("redis://{}", i)));
      commands.push_back(servers.back().get());
    }
    AgentOptions agent_options = options.agent;
    agent_options.seed = options.number;
    agent_options.servers.bucket_bits = 8;
    agent_options.leases.own = {.node = {options.number, options.life},
                                .address = fmt::format("10.0.0.{}:50055", options.number),
                                .lanes = "tcp"};
    const Bytes32 secret = bytes_of(options.secret);
    agent = std::make_unique<Agent>(
        commands, Keys{.anchors = secret, .all = {secret}}, agent_options, clock,
        Agent::Events{.found = [this](Found&& one) { found = std::move(one); },
                      .epochs = [this](const KnownEpochs& known) { epochs.push_back(known); }});
  }

  /// Lets this node and its servers do all that is due now.
  void step() {
    agent->step();
    for (const auto& server : servers) server->run();
    agent->step();
    for (const auto& server : servers) server->run();
  }
  void announce(const std::vector<BlockKey>& keys, bool is_findable = true,
                std::uint32_t space = 1) {
    Announcement made{.space = space, .name = bytes_of(7)};
    for (const BlockKey& key : keys) made.blocks.emplace_back(key, is_findable);
    agent->take(made);
  }
  /// The lives of the owners that it finds.
  std::vector<std::uint64_t> ask(const std::vector<BlockKey>& keys) {
    found.reset();
    agent->ask({.ticket = 1,
                .space = bytes_of(7),
                .candidates = candidates_of(keys),
                .deadline = clock.now() + std::chrono::milliseconds(5)});
    for (int i = 0; i < 4; ++i) {
      for (const auto& server : servers) server->run();
    }
    REQUIRE(found);
    std::vector<std::uint64_t> lives;
    for (const Found::Owner& owner : found->owners) lives.push_back(owner.node.low);
    return lives;
  }
  [[nodiscard]] std::size_t count(std::string_view command, std::string_view key = {}) const {
    std::size_t all = 0;
    for (const auto& server : servers) all += server->count(command, key);
    return all;
  }
  void forget_commands() const {
    for (const auto& server : servers) server->done.clear();
  }

  ManualClock& clock;
  std::vector<std::unique_ptr<MemoryServer>> servers;
  std::optional<Found> found;
  std::vector<KnownEpochs> epochs;
  std::unique_ptr<Agent> agent;
};

/// Some servers, the time, and steps of nodes in it.
struct TestDirectory {
  explicit TestDirectory(std::size_t servers = 1) : data(servers) {}
  TestNode node(const TestNode::Options& options) { return {data, clock, options}; }
  void pass(Duration time, const std::vector<TestNode*>& nodes) {
    constexpr Duration kStep = std::chrono::milliseconds(20);
    for (Duration passed{}; passed < time; passed += kStep) {
      for (TestNode* const each : nodes) each->step();
      clock.advance(kStep);
    }
    for (TestNode* const each : nodes) each->step();
  }
  [[nodiscard]] std::size_t members() const {
    std::size_t count = 0;
    for (const Data& each : data) count += each.members();
    return count;
  }
  std::vector<Data> data;
  ManualClock clock;
};

}  // namespace pegaflow::directory::testing
