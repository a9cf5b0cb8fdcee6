#pragma once
/// \file
/// Nodes in network namespaces of their own, and faults of the links between them.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/os/unique_fd.h"

namespace pegaflow::testing {

/// A bridge, and some nodes around it; tests/support/network.py is the same for Python.
///
/// Nothing is named or mounted: a namespace lives as long as a process in it or a descriptor on it,
/// so that none is left behind. While this object lives the thread that made it, and the threads
/// and processes that it starts, are in the namespace of the bridge: they cannot reach the
/// machine's networks. All failures are thrown as std::runtime_error. Thread-bound.
class TestNetwork {
 public:
  /// The requirement that this machine lacks, in words; no value if networks can be made.
  static std::optional<std::string> why_not();

  explicit TestNetwork(std::size_t nodes);
  ~TestNetwork();
  TestNetwork(const TestNetwork&) = delete;
  TestNetwork& operator=(const TestNetwork&) = delete;

  class Node {
   public:
    /// Its address for the other nodes; faults are on this link only.
    [[nodiscard]] std::string address() const;
    /// Its address for the test, which reads metrics here.
    [[nodiscard]] std::string control_address() const;
    /// The prefix of a command that runs on this node.
    [[nodiscard]] std::vector<std::string> prefix() const;

    /// Limits the rate at which the node sends to the others, as "20mbit"; empty: no limit.
    void limit_sent(const std::string& rate) const;
    /// Limits the rate at which the others send to it.
    void limit_received(const std::string& rate) const;
    /// A black hole: packets from and to the node vanish without an error.
    void cut() const;
    void mend() const;
    /// The same between this node and one other only: others reach both.
    void cut_from(const Node& other) const;
    void mend_to(const Node& other) const;
    /// As if a cable was pulled: the node's link has no carrier.
    void pull_cable() const;
    void plug_cable() const;
    /// Bytes that it has sent to the others, headers included.
    [[nodiscard]] std::uint64_t sent_bytes() const;

   private:
    friend class TestNetwork;
    std::string port() const;
    void run_here(const std::vector<std::string>& command) const;

    std::size_t number_ = 0;
    UniqueFd namespace_;
  };
  [[nodiscard]] const Node& operator[](std::size_t number) const { return nodes_[number]; }

 private:
  UniqueFd outside_;
  std::vector<Node> nodes_;
};

}  // namespace pegaflow::testing
