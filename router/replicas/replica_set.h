#pragma once
/// \file
/// Several routers share what they place and learn: the messages of this router, and those of its
/// siblings.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/id128.h"
#include "cluster/peer_proof.h"
#include "router/kv/kv_observer.h"
#include "router/replicas/replica_message.h"
#include "router/replicas/sibling.h"

namespace pegaflow::router {

class KvRouting;

/// Adds the placements of siblings to the accounts, so that routers do not choose the same idle
/// engine at one time, and their lessons to the texts. All of it is a hint: messages may be lost,
/// and each second a heartbeat replaces the sums. A sibling without heartbeats for kSilence is
/// forgotten; then its requests are visible only in what engines report.
///
/// Pure: the owner sends and receives the bytes, and gives the time. Thread-bound. Bounded: by
/// kMaxSiblings, by one message of pending records, and by byte rates for texts.
class ReplicaSet final : public KvObserver {
 public:
  static constexpr std::size_t kMaxSiblings = 15;
  static constexpr Duration kHeartbeat = std::chrono::seconds(1);
  static constexpr Duration kSilence = std::chrono::seconds(5);
  /// Records are sent when so many bytes of them wait, and else by flush().
  static constexpr std::size_t kFlushBytes = std::size_t{64} << 10U;

  struct Options {
    Id128 router{};  ///< This incarnation.
    /// Sends one message, or drops it; never waits.
    std::function<bool(std::string_view)> publish{};
    /// Called when the first record waits: call flush() soon.
    std::function<void()> on_pending{};
    /// Called when placements of a sibling have arrived.
    std::function<void()> on_placements{};
    std::function<std::uint64_t()> unix_ms{};
  };
  /// `routing` and `secrets` outlive the object. Without secrets, messages prove nothing: for
  /// routers on one host.
  ReplicaSet(KvRouting& routing, const std::optional<cluster::PeerSecrets>& secrets,
             Options options);
  ~ReplicaSet();
  ReplicaSet(const ReplicaSet&) = delete;
  ReplicaSet& operator=(const ReplicaSet&) = delete;

  /// Where this router serves GET /index/snapshot; 0: nowhere.
  void set_http_port(std::uint16_t port) { http_port_ = port; }
  /// Replaces the addresses. The state of an address that stays is kept; addresses beyond
  /// kMaxSiblings are left out and counted.
  void set_addresses(std::span<const std::string> addresses, TimePoint now);
  [[nodiscard]] const std::map<std::string, Sibling>& siblings() const { return siblings_; }
  [[nodiscard]] const Id128& router() const noexcept { return options_.router; }

  /// Bytes came from the address.
  void arrived(const std::string& address, std::span<const std::byte> bytes, TimePoint now);
  /// Sends the pending records.
  void flush();
  /// The heartbeat, and siblings that have become silent. Call it each kHeartbeat.
  void tick(TimePoint now);

  /// The start from a sibling's snapshot, for /health.
  struct Snapshot {
    std::string state = "waiting";  ///< waiting, loading, done or off.
    std::string reason = "no sibling that could send one was heard yet";
    std::uint64_t texts = 0;    ///< Learned from it.
    std::uint64_t engines = 0;  ///< Ranks whose blocks were taken from it.
  };
  [[nodiscard]] Snapshot& snapshot() noexcept { return snapshot_; }
  /// Whether the events of all engines were replayed, as far as engines answer; a snapshot then
  /// shows where it knows more.
  [[nodiscard]] bool is_settled() const;
  /// The rank with this name; nullptr: there is none here.
  KvFleet::Rank* rank_of(SharedName name);
  /// The live sibling that knows the most texts, at least one; nullptr: there is none.
  [[nodiscard]] const Sibling* best_source() const;
  /// The header of a message of this router that is not published, such as a part of a snapshot.
  [[nodiscard]] ReplicaHeader header(std::uint64_t sequence) const;
  /// The secrets, or those of routers without a file.
  [[nodiscard]] const cluster::PeerSecrets& secrets() const;
  [[nodiscard]] KvRouting& routing() noexcept { return routing_; }

  // KvObserver
  void placed(const index::PlacementRecord& record, const KvFleet::Rank& rank,
              std::span<const std::uint64_t> chunks) override;
  void first_token(std::uint64_t request) override;
  void ended(std::uint64_t request) override;
  void learned(const index::Text& text, std::span<const index::Key> keys) override;
  [[nodiscard]] std::string health(TimePoint now) const override;
  [[nodiscard]] bool is_good() const override;
  void metrics(MetricsPage& page) const override;

 private:
  void add(const ReplicaRecord& record);
  void send_heartbeat();
  void forget(Sibling& sibling, TimePoint now);
  /// The live siblings with a smaller name choose before this router.
  void order_routers();
  /// Whether the message is the next one of the sibling; counts it if not.
  bool accept(Sibling& sibling, const ReplicaHeader& header, TimePoint now);
  void apply(Sibling& sibling, const SharedPlacement& one, TimePoint now);
  void apply(Sibling& sibling, const SharedFirstToken& one, TimePoint now);
  void apply(Sibling& sibling, const SharedEnd& one, TimePoint now);
  /// A request of the sibling has come to a later stage.
  void reached(const Sibling& sibling, index::Stage stage, std::uint64_t request, TimePoint now);
  void apply(Sibling& sibling, const SharedHeartbeat& one, TimePoint now);
  void apply(Sibling& sibling, const SharedText& one, TimePoint now);
  // Records of snapshots are not published.
  void apply(Sibling& /*sibling*/, const SharedBlocks& /*one*/, TimePoint /*now*/) {}
  void apply(Sibling& /*sibling*/, const SharedSnapshotEnd& /*one*/, TimePoint /*now*/) {}
  void refresh_names();
  [[nodiscard]] SharedName name_of(index::NodeId node) const;

  KvRouting& routing_;
  const std::optional<cluster::PeerSecrets>& secrets_;
  const cluster::PeerSecrets no_secrets_{};
  const Options options_;
  const std::uint64_t began_;
  std::map<std::string, Sibling> siblings_;  // By address.
  std::uint16_t http_port_ = 0;
  std::string pending_;  // Records.
  std::uint64_t sequence_ = 0;
  TimePoint now_{};  // Of the last tick, for the budget.
  ByteBudget lessons_{4e6, 8e6};
  Snapshot snapshot_;
  std::unordered_map<SharedName, index::EngineId> engines_;
  std::uint64_t engines_version_ = 0;
  std::unordered_map<SharedName, index::NodeId> nodes_;

  std::uint64_t published_ = 0;
  std::uint64_t dropped_ = 0;            // Messages that the socket refused.
  std::uint64_t unpublished_texts_ = 0;  // Too long, or beyond the rate.
  std::uint64_t left_out_ = 0;           // Addresses beyond kMaxSiblings, now.
};

}  // namespace pegaflow::router
