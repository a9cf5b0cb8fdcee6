#pragma once
/// \file
/// Nodes in network namespaces of their own, and what may happen to the links between them.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/os/unique_fd.h"

namespace pegaflow::testing {

/// A bridge, and some nodes around it; tests/support/network.py is the same for Python.
///
/// Nothing is named or mounted: a namespace lives while a process in it or a descriptor on it does,
/// so that none is left behind. While this lives the thread that made it, and the threads and
/// processes that it starts, are in the namespace of the bridge: no network of the machine is in
/// reach. Whatever fails is thrown as std::runtime_error. Thread-bound.
class TestNetwork {
 public:
  /// What is missing here, in words; no value where networks can be made.
  static std::optional<std::string> why_not();

  explicit TestNetwork(std::size_t nodes);
  ~TestNetwork();
  TestNetwork(const TestNetwork&) = delete;
  TestNetwork& operator=(const TestNetwork&) = delete;

  class Node {
   public:
    /// To the other nodes; faults are on this way only.
    [[nodiscard]] std::string address() const;
    /// To the test, which asks for metrics here.
    [[nodiscard]] std::string control_address() const;
    /// What a command begins with that runs on this node.
    [[nodiscard]] std::vector<std::string> prefix() const;

    /// Bounds what the node sends to the others, as "20mbit"; empty: no bound.
    void limit_sent(const std::string& rate) const;
    /// Bounds what the others send to it.
    void limit_received(const std::string& rate) const;
    /// A black hole: packets from and to the node vanish, and nobody is told.
    void cut() const;
    void mend() const;
    /// As a cable that is pulled: the node sees that its link has no carrier.
    void pull_cable() const;
    void plug_cable() const;
    /// Bytes that it has sent to the others, headers included.
    [[nodiscard]] std::uint64_t sent_bytes() const;

   private:
    friend class TestNetwork;
    std::string port() const;

    std::size_t number_ = 0;
    UniqueFd namespace_;
  };
  [[nodiscard]] const Node& operator[](std::size_t number) const { return nodes_[number]; }

 private:
  UniqueFd outside_;
  std::vector<Node> nodes_;
};

}  // namespace pegaflow::testing
