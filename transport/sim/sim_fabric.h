#pragma once
/// \file
/// A Fabric over a simulated network: it moves real bytes, in virtual time.

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

/// A fabric of simulated network cards, with the rails::Dealer that UcxFabric also uses.
///
/// A card (a *rail*) completes one read at a time, at its rate. It copies the first half of the
/// bytes midway through the read and the rest at the end, directly from the owner's memory. As with
/// one-sided reads, the reader receives a mix of old and new bytes when the owner changes a page
/// during the read. A read that has begun runs to its end even after its batch has completed, which
/// may take seconds (SimNetwork::Faults); only then is the batch quiesced.
///
/// Thread-safe, by the network's mutex. unregister_region() and the destructor, which wait for
/// reads in other backends, finish all reads of this fabric at once.
class SimFabric final : public Fabric {
 public:
  struct Options {
    std::vector<double> rails_bytes_per_s = {10e9};  ///< The rate of each card; 1 to 64.
    /// Added to the transfer time of each read, and the time to connect to a peer.
    Duration latency = std::chrono::microseconds(10);
    std::size_t piece_bytes = std::size_t{1} << 20;
    std::size_t window_bytes = std::size_t{16} << 20;  ///< In flight per peer and rail.
    std::size_t window_operations = 192;
    /// After this time a read from a peer that does not respond fails, and its path breaks.
    Duration stall_timeout = std::chrono::seconds(2);
    std::size_t batches = 1024;  ///< Limit of batches that are accepted and not quiesced.
    std::size_t chunks = 65536;  ///< Limit of chunks in a batch.
    std::size_t peers = 256;     ///< Limit of connected peers.
  };

  /// `network` outlives the fabric. `sink` is called by SimNetwork::run(), unregister_region() and
  /// the destructor.
  /// Errors: kInvalidArgument when an option is out of its range.
  static Result<std::unique_ptr<SimFabric>> create(const Options& options, SimNetwork& network,
                                                   CompletionSink sink);
  ~SimFabric() override;
  SimFabric(const SimFabric&) = delete;
  SimFabric& operator=(const SimFabric&) = delete;

  Result<RegionId> register_region(const Memory& memory) override;
  Result<void> lend(RegionId region, TimePoint until) override;
  void unregister_region(RegionId region) override;
  [[nodiscard]] FabricDescriptor describe() const override;
  Result<PeerId> connect(const FabricDescriptor& peer) override;
  Result<void> disconnect(PeerId peer) override;
  Result<void> read(Batch batch) override;
  Result<void> cancel(std::uint64_t ticket) override;

  /// Stops the simulated process for `time`: its cards continue, but it handles no result, no
  /// deadline and no new batch.
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
  std::map<std::uint64_t, Read> reads_;   ///< By their numbers.
  std::vector<rails::Outcome> outcomes_;  ///< Not reported to the dealer yet.
  std::uint64_t last_read_ = 0;
  std::uint32_t last_region_ = 0;
  std::uint32_t last_peer_ = 0;
  std::size_t open_batches_ = 0;
  TimePoint frozen_until_ = TimePoint::min();
  TimePoint iterate_at_ = TimePoint::max();  ///< The time of the earliest scheduled iterate().
};

}  // namespace pegaflow
