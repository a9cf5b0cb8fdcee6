#pragma once
/// \file
/// All servers of the directory, and which of them has which anchors.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "directory/anchor.h"
#include "directory/redis/commands.h"
#include "directory/stats.h"

namespace pegaflow::directory {

/// Each server has a marker: a random number, and the number of its buckets. The first node that
/// finds none writes it. A server without its former marker has lost its data.
///
/// Anchors are distributed over the servers by rendezvous hashing of their names, so that a server
/// that is added or removed moves only its own part. Thread-bound.
class Servers {
 public:
  struct Options {
    unsigned bucket_bits = 18;  ///< For a server that has no marker yet.
    Duration check = std::chrono::seconds(2);
  };
  /// All arguments outlive it.
  Servers(const std::vector<Commands*>& servers, const Options& options, const Clock& clock,
          Stats& stats);

  [[nodiscard]] std::size_t count() const noexcept { return servers_.size(); }
  [[nodiscard]] Commands& commands(std::size_t server) const noexcept {
    return *servers_[server].commands;
  }
  /// Connected, with a known marker.
  [[nodiscard]] bool is_ready(std::size_t server) const noexcept;
  /// Ready, and answers in time.
  [[nodiscard]] bool is_prompt(std::size_t server) const noexcept;
  [[nodiscard]] const std::string& why(std::size_t server) const noexcept {
    return servers_[server].why;
  }
  /// The server that has that anchor, if it has any owner.
  [[nodiscard]] std::size_t of(Anchor anchor) const noexcept { return slots_[anchor >> 48]; }
  [[nodiscard]] std::string bucket(std::size_t server, Anchor anchor) const {
    return bucket_of(anchor, servers_[server].bucket_bits);
  }

  /// `lost` is called for a server whose data, or writes of this node to it, may be lost.
  void on_loss(std::function<void(std::size_t server)> lost) { lost_ = std::move(lost); }
  /// Checks the markers that are due.
  void step();
  [[nodiscard]] TimePoint next_step() const;

  /// Counts a reply of another type than `wanted`; false then, and for an error.
  bool expect(const Result<Reply>& reply, Reply::Kind wanted);

 private:
  struct Server {
    Commands* commands = nullptr;
    std::uint64_t life = 0;  ///< In which the marker was read.
    bool is_checking = false;
    TimePoint next{};
    std::string marker{};  ///< Empty: unknown.
    unsigned bucket_bits = 0;
    std::string why;
  };
  void check(std::size_t server);
  void read(std::size_t server, std::uint64_t life, const Result<Reply>& reply);

  const Options options_;
  const Clock& clock_;
  Stats& stats_;
  std::vector<Server> servers_;
  std::vector<std::uint8_t> slots_;
  std::function<void(std::size_t)> lost_;
};

/// At most so many servers.
inline constexpr std::size_t kMostServers = 64;

}  // namespace pegaflow::directory
