#pragma once
/// \file
/// Some nodes, their engines, and faults: one schedule, by its seed.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <kj/async.h>

#include "base/block_key.h"
#include "base/id128.h"
#include "base/job_id.h"
#include "harness/sim_cluster.h"

namespace pegaflow::sim {

/// Counts of the events in all schedules, which show that a run caused the faults it is meant to.
using NodesCoverage = std::map<std::string, std::uint64_t>;

/// Rules that are broken on purpose, to check that the violation is detected.
struct NodesMistakes {
  harness::SimCluster::Options::Mistakes nodes{};
  cluster::PeerSource::Options::Mistakes source{};
  server::Fetches::Options::Mistakes fetches{};
  /// The percentage of events in which a reader outlives its lease: a rare event is found sooner
  /// with more of them.
  std::size_t outlived_leases = 3;
};

/// The real services, fetches and stores of a few nodes with small pools, under engines that load
/// and save pages whose bytes follow from their keys and from the time of their save.
///
/// A reset at a node has a time. Blocks that any node saved before that time are never found again
/// at that node, in its present incarnation, by a claim made after it, and at no node that has
/// confirmed it. Where system clocks disagree that holds for resets that all nodes have confirmed.
/// Monotonic clocks have rates of their own and stop while a machine is paused, in all schedules.
///
/// Checks every page that an engine has pinned, when it is opened and when it is released, and at
/// the end every block of every node; every frame that is reserved, for processes and cards that
/// may still write to it or read it; and at the end that no resource is left. Throws at the first
/// violation.
class NodesWorld {
 public:
  NodesWorld(std::uint64_t seed, kj::WaitScope& scope, NodesCoverage& coverage,
             const NodesMistakes& mistakes = {});
  ~NodesWorld() noexcept(false);
  NodesWorld(const NodesWorld&) = delete;
  NodesWorld& operator=(const NodesWorld&) = delete;

  /// Runs the whole schedule, and its end.
  void run();
  /// The last events, oldest first.
  [[nodiscard]] const std::deque<std::string>& history() const noexcept { return history_; }

 private:
  struct Engine;
  struct Load;
  struct Page;
  /// The accesses of engines and cards to one page of a pool.
  struct Use {
    std::uint32_t readers = 0;
    bool is_written = false;
  };

  // ---- events
  void act();
  void reset(const std::shared_ptr<Engine>& engine);
  void kill_or_start();
  void cut_or_heal();
  void change_faults();
  void stand_still(std::size_t node);
  /// Draws the clocks of `nodes` machines.
  std::vector<harness::SimCluster::Options::Clocks> some_clocks(std::size_t nodes);
  [[nodiscard]] Duration some_system_time();
  void add_engine(std::size_t node);
  void end_engine();
  void forget_engines(std::size_t node);
  /// `is_new`: for blocks that no node has.
  void begin_request(std::optional<std::size_t> node, bool is_new);
  void outlive_a_lease();
  void end_all();

  // ---- requests of an engine
  kj::Promise<void> request(const std::shared_ptr<Engine>& engine, bool is_new);
  kj::Promise<void> load(const std::shared_ptr<Load>& load);
  kj::Promise<void> save(const std::shared_ptr<Engine>& engine, std::vector<BlockKey> keys);
  kj::Promise<void> pause(Duration longest);

  // ---- checks
  /// Only records it; the exception is thrown where no promise catches it.
  void wrong(const std::string& what);
  void stop_if_wrong();
  void look_at(const Engine& engine, std::uint32_t page, const Page& expected);
  void look_at_located(std::size_t owner, std::span<const BlockKey> found, std::uint64_t oldest);
  void look_at_free(std::size_t node, std::uint32_t page, const char* whose);
  void look_at_everything();
  /// After the end: readers return their leases.
  void give_back();
  [[nodiscard]] std::string unrest() const;

  [[nodiscard]] std::vector<BlockKey> some_keys(bool is_new);
  [[nodiscard]] BlockKey key(std::size_t chain, std::size_t block) const;
  [[nodiscard]] bool chance(double probability);
  [[nodiscard]] std::size_t pick(std::size_t count);
  [[nodiscard]] Duration some(Duration longest);
  [[nodiscard]] std::optional<std::size_t> living_node();
  void count_up(std::size_t node);

  template <typename... Args>
  void note(fmt::format_string<Args...> format, Args&&... args) {
    history_.push_back(fmt::format("{:>12.6f} ", seconds_now()) +
                       fmt::format(format, std::forward<Args>(args)...));
    if (history_.size() > 60) history_.pop_front();
  }
  [[nodiscard]] double seconds_now() const;

  std::mt19937_64 random_;
  NodesCoverage& coverage_;
  const std::uint64_t name_;  ///< Part of keys, so that no two schedules have the same.
  std::size_t chains_;
  std::size_t chain_blocks_;
  bool system_clocks_agree_ = true;
  std::deque<std::string> history_;
  std::string failure_;
  std::unique_ptr<harness::SimCluster> cluster_;
  std::vector<std::vector<Use>> uses_;                         ///< By node and page.
  std::vector<std::vector<std::shared_ptr<Engine>>> engines_;  ///< By node, dead ones included.
  std::vector<std::uint64_t> oldest_;  ///< By node: the time of the last reset that it knows.
  std::vector<std::uint64_t> lives_;   ///< By node: the number of times it was killed.
  std::uint64_t time_ = 0;             ///< Logical time of saves and resets.
  const std::size_t outlived_leases_;  ///< See NodesMistakes.
  std::uint64_t next_ = 1;             ///< The next token, pin, job or process.
};

}  // namespace pegaflow::sim
