#pragma once
/// \file
/// The Fabric over a simulated network: real bytes, in virtual time.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "transport/dealer.h"
#include "transport/fabric.h"
#include "transport/sim/sim_network.h"

namespace pegaflow {

/// A fabric of simulated cards, with the same dealer as the real ones.
///
/// A card (a *rail*) completes one read after the other at its rate. Meanwhile it copies the bytes
/// from the owner's memory, the first half midway and the rest at the end, without the owner's
/// involvement. As with one-sided reads, a reader receives mixed bytes when the owner changes a
/// page during the read. A read that has begun continues to its end even when its batch has
/// completed, and may take seconds longer (SimNetwork::Faults); its batch is quiesced only then.
///
/// Thread-safe: by the network's mutex. Calls that wait in other backends (unregister_region(), the
/// destructor) end all reads of the cards at once here.
class SimFabric final : public Fabric {
 public:
  struct Options {
    std::vector<double> rails_bytes_per_s = {10e9};  ///< The rate of each card; 1 to 64.
    /// Added to the transfer time of each read.
    Duration latency = std::chrono::microseconds(10);
    std::size_t piece_bytes = std::size_t{1} << 20;
    std::size_t window_bytes = std::size_t{16} << 20;  ///< In flight per peer and rail.
    std::size_t window_operations = 192;
    Duration stall_timeout = std::chrono::seconds(2);  ///< For a peer that does not respond.
    std::size_t batches = 1024;                        ///< Accepted and not quiesced.
    std::size_t chunks = 65536;                        ///< Per batch.
    std::size_t peers = 256;
  };

  /// `network` outlives the fabric. `sink` is called in SimNetwork::run(), and by the destructor.
  /// Errors: kInvalidArgument when an option is out of its range.
  static Result<std::unique_ptr<SimFabric>> create(const Options& options, SimNetwork& network,
                                                   CompletionSink sink);
  ~SimFabric() override;
  SimFabric(const SimFabric&) = delete;
  SimFabric& operator=(const SimFabric&) = delete;

  Result<RegionId> register_region(std::span<std::byte> memory) override;
  Result<void> lend(RegionId region, TimePoint until) override;
  void unregister_region(RegionId region) override;
  [[nodiscard]] FabricDescriptor describe() const override;
  Result<PeerId> connect(const FabricDescriptor& peer) override;
  Result<void> disconnect(PeerId peer) override;
  Result<void> read(Batch batch) override;
  Result<void> cancel(std::uint64_t ticket) override;

  /// Stops the simulated process for `time`: its cards continue, but their results, deadlines and
  /// new work are not handled.
  void freeze(Duration time);
  /// Whether a card may still write to `place`.
  [[nodiscard]] bool is_written(std::span<const std::byte> place) const;
  /// The number of batches that are accepted and not quiesced.
  [[nodiscard]] std::size_t batches() const;
  /// Bytes read by each rail so far.
  [[nodiscard]] std::vector<std::uint64_t> bytes_by_rail() const;

 private:
  friend class SimNetwork;
  struct Region {
    std::span<std::byte> memory;
    TimePoint until = TimePoint::min();
  };
  struct Rail {
    double bytes_per_s = 0;
    TimePoint free_at = TimePoint::min();  ///< When its last read in flight ends.
    std::uint64_t transferred = 0;
  };
  /// A rail's connection to a peer.
  struct Path {
    bool is_open = false;
    std::size_t operations = 0;
    std::uint64_t bytes = 0;
    std::size_t background = 0;
    std::uint64_t background_bytes = 0;
  };
  struct Peer {
    std::uint64_t fabric = 0;
    Id128 incarnation;
    std::vector<Path> paths;
  };
  /// A read in flight on a card.
  struct Read {
    rails::Operation operation;
    std::uint64_t fabric = 0;
    std::span<std::byte> place;
    std::uint64_t done = 0;  ///< Bytes copied so far.
    bool breaks = false;
    bool is_corrupt = false;
  };

  SimFabric(const Options& options, SimNetwork& network, CompletionSink sink);
  void schedule(void (SimFabric::*act)(), TimePoint when);
  void iterate();
  void greet(PeerId id, std::size_t rail);
  void fill(std::size_t rail);
  void begin(std::size_t rail, const rails::Operation& operation);
  void schedule_read(std::uint64_t read, TimePoint when, void (SimFabric::*act)(std::uint64_t));
  void transfer_half(std::uint64_t number);
  void finish(std::uint64_t number);
  enum class Reachability : std::uint8_t {
    kOpen,
    kSilent,    ///< Nothing arrives, and no error is reported.
    kBroken,    ///< The peer is gone.
    kNoRegion,  ///< The owner no longer has the region.
  };
  [[nodiscard]] Reachability find_source(const Read& read, const Region*& source) const;
  bool transfer(Read& read, std::uint64_t up_to) const;
  void end_read(std::uint64_t number, rails::Outcome outcome);
  void break_path(PeerId id, std::size_t rail, const Error& error, bool for_good);
  [[nodiscard]] rails::Outcome outcome_of(Read& read, bool breaks) const;
  void finish_all();
  void fence(std::uint64_t owner, RegionId region);
  void deliver();
  [[nodiscard]] rails::Dealer::Room room(PeerId id, std::size_t rail) const;
  [[nodiscard]] bool is_frozen() const { return network_.clock_.now() < frozen_until_; }

  const Options options_;
  SimNetwork& network_;
  const CompletionSink sink_;
  const Id128 incarnation_;
  std::uint64_t number_ = 0;
  rails::Dealer dealer_;
  std::map<std::uint32_t, Region> regions_;
  std::map<std::uint32_t, Peer> peers_;
  std::vector<Rail> rails_;
  std::map<std::uint64_t, Read> reads_;   ///< By a number of their own.
  std::vector<rails::Outcome> outcomes_;  ///< Not yet reported to the dealer.
  std::uint64_t last_read_ = 0;
  std::uint32_t last_region_ = 0;
  std::uint32_t last_peer_ = 0;
  std::size_t open_batches_ = 0;
  TimePoint frozen_until_ = TimePoint::min();
  TimePoint iterate_at_ = TimePoint::max();  ///< The time of the earliest scheduled iterate().
};

}  // namespace pegaflow
