#pragma once
/// \file
/// Which nodes are alive: the lease of this one, and those of all others.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "directory/anchor.h"
#include "directory/servers.h"

namespace pegaflow::directory {

/// The text that a node writes about itself. Sealed, so that only a node with the secret makes one.
struct Lease {
  Id128 node;           ///< Its incarnation.
  std::string address;  ///< IP:PORT of its --peer-listen.
  std::string lanes;    ///< For operators, such as "rdma,tcp".
  [[nodiscard]] std::string sealed(const Bytes32& key) const;
  /// No value for bytes that no node with one of the keys wrote.
  static std::optional<Lease> unsealed(std::span<const Bytes32> keys, std::string_view text);
  bool operator==(const Lease&) const = default;
};

/// Keeps a lease of this node at every server, under a number that no other node has, and reads
/// those of the others from one server at a time, each time another one.
///
/// The number follows from the address, so a node that restarts has the same one as before. Two
/// nodes that take one number at once see each other at their next renewal; the one with the
/// greater incarnation takes another. A full server takes no lease, but extends one that it has.
/// Thread-bound.
class NodeLeases {
 public:
  struct Options {
    Lease own;  ///< Without an address this node has no lease: it only reads.
    Duration length = std::chrono::seconds(10);
    Duration renewal = std::chrono::seconds(3);
    /// Between two reads of all leases, and at least this long for each of them.
    Duration refresh = std::chrono::seconds(2);
    Duration refresh_each = std::chrono::milliseconds(10);
  };
  struct Node {
    Lease lease;
    TimePoint until{};
  };

  /// All references outlive it.
  NodeLeases(Servers& servers, const Keys& keys, const Options& options, const Clock& clock,
             Stats& stats, std::mt19937_64& random);

  /// No value before the first renewal.
  [[nodiscard]] std::optional<NodeNumber> number() const noexcept { return number_; }
  [[nodiscard]] std::uint16_t life() const noexcept { return life_of(options_.own.node); }
  /// Called after the number has changed: members with the former one are void.
  void on_number(std::function<void()> changed) { changed_ = std::move(changed); }
  /// Called when the lease of this node at a server has run out, or could not be written there:
  /// others may have removed its members meanwhile.
  void on_lapse(std::function<void(std::size_t server)> lapsed) { lapsed_ = std::move(lapsed); }
  /// Whether the lease of this node was sent to that server: only then its members may follow,
  /// which others would else take for those of a node that is gone.
  [[nodiscard]] bool is_written(std::size_t server) const { return written_[server]; }
  /// The node of a member, if it is alive.
  [[nodiscard]] const Lease* find(NodeNumber number, std::uint16_t life) const;
  /// Whether the table is known: it was read at most one lease ago. Before that, nothing is said of
  /// a node that is not in it.
  [[nodiscard]] bool is_known() const noexcept { return clock_.now() < known_until_; }
  /// Reads the leases of those members' nodes, and passes on the members of nodes that are gone:
  /// whose number has no lease at that server, or that of another life. A node that is alive is
  /// known from then on.
  using Gone = std::function<void(const std::vector<Member>&)>;
  void check(std::size_t server, std::vector<Member> members, Gone gone);

  /// The data of that server, or the lease of this node there, may be lost.
  void lost(std::size_t server) {
    written_[server] = false;
    may_extend_[server] = true;
    renew_soon();
    if (!is_known()) next_refresh_ = clock_.now();
  }
  /// That server does not take writes: with the next renewal it is known whether it does.
  void doubt(std::size_t server) { written_[server] = false; }
  /// Whether another node has a lease, as far as is known.
  [[nodiscard]] bool knows_others() const;
  void renew_soon() { next_renewal_ = clock_.now(); }
  void step();
  [[nodiscard]] TimePoint next_step() const;

 private:
  struct Round;
  [[nodiscard]] NodeNumber candidate() const;
  void renew();
  void read_own(std::size_t server, Round& round, const Result<Reply>& reply);
  void note_twin(const Lease& other);
  void end_renewal(const Round& round);
  void set_lease(std::size_t server, NodeNumber number);
  void extend_lease(std::size_t server, NodeNumber number);
  void add_number(std::size_t server, NodeNumber number, bool is_extended);
  void lapse(std::size_t server);
  [[nodiscard]] std::string length_ms() const;
  void refresh();
  void read_numbers(std::size_t server, const Result<Reply>& reply);
  void read_leases(std::size_t server, std::span<const std::string> keys,
                   const Result<Reply>& reply);
  void end_refresh();
  void remove_number(std::size_t server, std::string_view number);

  Servers& servers_;
  const Keys& keys_;
  const Options options_;
  const Clock& clock_;
  Stats& stats_;
  std::mt19937_64& random_;
  std::function<void()> changed_;
  std::function<void(std::size_t)> lapsed_;
  std::vector<bool> written_;     ///< By server.
  std::vector<bool> may_extend_;  ///< By server: its ACL allows PEXPIRE.
  std::optional<NodeNumber> number_;
  std::uint64_t attempt_ = 0;
  Id128 twin_{};  ///< The last other node at this node's address.
  bool is_renewing_ = false;
  TimePoint next_renewal_;
  std::unordered_map<NodeNumber, Node> nodes_;
  std::size_t reading_ = 0;  ///< Requests of the present refresh.
  bool has_gap_ = false;     ///< One of them failed.
  std::size_t turn_ = 0;     ///< The server of the next one.
  TimePoint next_refresh_;
  TimePoint known_until_{};
};

}  // namespace pegaflow::directory
