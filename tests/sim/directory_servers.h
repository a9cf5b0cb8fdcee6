#pragma once
/// \file
/// Redis servers in memory, in virtual time, for simulations of many nodes with the real code of
/// the directory.

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "directory/anchor.h"
#include "directory/redis/commands.h"

namespace pegaflow::directory {

/// The data of one server: the commands of docs/directory.md, with their counts.
class SimulatedServer {
 public:
  struct Counts {
    std::uint64_t anchor_writes = 0;   ///< ZADD and ZREM of anchors.
    std::uint64_t anchor_lookups = 0;  ///< ZRANGEBYLEX of one anchor.
    std::uint64_t sweeps = 0;          ///< ZRANGEBYLEX up to the end of a bucket.
    std::uint64_t long_buckets = 0;    ///< Those that look at the rest of a long bucket.
    std::uint64_t other = 0;           ///< Markers, leases and epochs.
    std::uint64_t lease_bytes = 0;     ///< Bytes of leases in replies.
  };
  Reply run(const std::vector<std::string>& words, TimePoint now);
  /// As FLUSHALL.
  void flush();
  [[nodiscard]] std::size_t members() const noexcept { return members_; }
  [[nodiscard]] std::size_t buckets() const noexcept { return anchors_.size(); }
  [[nodiscard]] const Counts& counts() const noexcept { return counts_; }

 private:
  struct Text {
    std::string value;
    TimePoint until = TimePoint::max();
  };
  /// Sorted, as the members of a sorted set with equal scores.
  using Bucket = std::vector<std::array<char, kMemberBytes>>;
  Reply get(const std::string& key, TimePoint now);
  Reply set(const std::vector<std::string>& words, TimePoint now);
  bool extend(const std::string& key, std::int64_t ms, TimePoint now);
  Reply range(const std::vector<std::string>& words);
  bool change_anchor(const std::string& key, const std::string& member, bool is_added);

  std::unordered_map<std::string, Text> texts_;
  std::unordered_map<std::string, std::set<std::string>> sets_;
  std::unordered_map<std::string, Bucket> anchors_;
  std::size_t members_ = 0;
  Counts counts_;
};

/// The commands of all nodes that are not answered yet. Each is answered after kLatency, so that
/// they are in the order of their answers.
class SimulatedNetwork {
 public:
  static constexpr Duration kLatency = std::chrono::microseconds(200);
  class Connection;

  explicit SimulatedNetwork(ManualClock& clock) : clock_(clock) {}
  /// Advances the clock to `end` and answers what is due by then.
  void run_until(TimePoint end);

 private:
  struct Sent {
    TimePoint at{};
    std::shared_ptr<Connection*> from;  ///< Null once the connection is gone.
    SimulatedServer* server = nullptr;
    std::vector<std::string> words;
    Commands::Answer answer;
  };
  ManualClock& clock_;
  std::deque<Sent> sent_;
};

/// The connection of one node to one server.
class SimulatedNetwork::Connection final : public Commands {
 public:
  /// The references outlive it.
  Connection(SimulatedNetwork& network, SimulatedServer& server, std::string name)
      : network_(network), server_(server), name_(std::move(name)) {}
  ~Connection() override { *self_ = nullptr; }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] bool is_up() const noexcept override { return true; }
  [[nodiscard]] std::uint64_t life() const noexcept override { return 1; }
  [[nodiscard]] bool is_late() const noexcept override { return false; }
  [[nodiscard]] std::size_t open() const noexcept override { return open_; }
  void send(std::span<const std::string_view> arguments, Answer answer) override;

 private:
  friend class SimulatedNetwork;
  SimulatedNetwork& network_;
  SimulatedServer& server_;
  const std::string name_;
  std::size_t open_ = 0;
  std::shared_ptr<Connection*> self_ = std::make_shared<Connection*>(this);
};

}  // namespace pegaflow::directory
