#pragma once
/// \file
/// The announcements of this node: which anchors it has, and the writes that tell the servers.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/block_key.h"
#include "base/clock.h"
#include "directory/anchor.h"
#include "directory/messages.h"
#include "directory/node_leases.h"
#include "directory/servers.h"

namespace pegaflow::directory {

/// Knows all anchors of this node, so that writes that are lost can be repeated, and members that
/// are left behind recognized.
///
/// A change goes out within 20 ms. All anchors are written again in a circle, at `slow_rate`; to a
/// server that lost data they are written at `fast_rate`. While a server is away, or has no lease
/// of this node, its writes are dropped, and all are written when it is back. Beyond `most_anchors`
/// no anchor is added. Beyond `most_writes` that wait for a server, added anchors are left to such
/// a rebuilding, and removed ones to sweeps. Thread-bound; some 40 bytes an anchor.
class Announcer {
 public:
  struct Options {
    Duration collect = std::chrono::milliseconds(20);
    double slow_rate = 100;  ///< Anchors a second.
    double fast_rate = 5000;
    /// The shortest circle: few anchors are repeated less often.
    Duration least_circle = std::chrono::minutes(1);
    std::size_t most_anchors = std::size_t{1} << 22;
    std::size_t most_open = 512;                     ///< Commands at one server.
    std::size_t most_writes = std::size_t{1} << 17;  ///< Writes that wait for one server; 2 MiB.
    unsigned sweep_one_in = 16;  ///< Repeated anchors whose bucket is searched for dead members.
  };
  /// All references outlive it.
  Announcer(Servers& servers, NodeLeases& leases, const Keys& keys, const Options& options,
            const Clock& clock, Stats& stats, std::mt19937_64& random);

  void take(const Announcement& announcement);
  /// All names have changed: the anchors with former names are removed, some with each step.
  void forget();
  /// The data of that server, or writes to it, may be lost: all are written again.
  void rebuild(std::size_t server);
  /// The same for all servers.
  void rebuild();
  [[nodiscard]] bool has(Anchor anchor) const { return places_.contains(anchor); }
  /// Members of nodes that seem to be gone: one reader in eight removes them, if their leases are.
  void repair(std::size_t server, std::vector<Member> members);
  /// An invalid member in the bucket of that anchor: one reader in eight removes it.
  void remove_bad(std::size_t server, Anchor anchor, const std::string& text);

  void step();
  [[nodiscard]] TimePoint next_step() const;

 private:
  struct Own {
    Anchor anchor = 0;
    std::uint32_t space = 0;
    std::uint32_t round = 0;  ///< The last list that it was in.
  };
  struct Write {
    Anchor anchor = 0;
    bool is_added = false;
  };
  /// Anchors that may be written at a rate.
  struct Budget {
    double tokens = 0;
    TimePoint at{};
    void refill(TimePoint now, double rate);
  };
  struct Server {
    std::deque<Write> writes;
    std::size_t rebuilt = 0;  ///< Anchors of `own_` that were passed; at the end: all.
    bool is_rebuilding = false;
  };
  void add(Anchor anchor, std::uint32_t space);
  void remove(Anchor anchor);
  void remove_space(std::uint32_t space);
  void remove_unlisted();
  void queue(Anchor anchor, bool is_added);
  void write(std::size_t server, const Write& write);
  void flush(std::size_t server);
  void rebuild_some(std::size_t server);
  void repeat_some();
  void sweep(std::size_t server, Anchor anchor);
  void search(std::size_t server, Anchor anchor, std::string_view from);
  void clean(std::size_t server, Anchor anchor, const Reply& reply);
  void check_members(std::size_t server, std::vector<Member> members);
  void remove_member(std::size_t server, const Member& member);
  [[nodiscard]] bool has_room(std::size_t server);

  Servers& servers_;
  NodeLeases& leases_;
  const Keys& keys_;
  const Options options_;
  const Clock& clock_;
  Stats& stats_;
  std::mt19937_64& random_;
  std::vector<Own> own_;
  std::unordered_map<Anchor, std::uint32_t> places_;  ///< In `own_`.
  std::vector<Server> state_;                         ///< By server.
  std::uint32_t round_ = 0;
  std::size_t unlisted_ = 0;  ///< Anchors of `own_` that may be of a former round, and have to go.
  Budget fast_;
  Budget slow_;
  std::size_t next_repeat_ = 0;
  std::size_t turn_ = 0;
  TimePoint next_step_{};
};

}  // namespace pegaflow::directory
