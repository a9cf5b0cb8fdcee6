#pragma once
/// \file
/// The Fabric of a simulated network: real bytes, in times that the network gives them.

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

/// A fabric of simulated cards, with the dealer of the real ones.
///
/// A card (a *rail*) brings one read after the other at its rate. It takes the bytes out of the
/// owner's memory while it does so, half of them halfway and the rest at the end, and nobody there
/// is asked: as with one-sided reads, whoever changes a page while it is read gives the reader
/// others. A read that was begun goes on to its end whatever its batch was told, and may take
/// seconds longer (SimNetwork::Faults); until then its batch is not settled.
///
/// Thread-safe: by the network's mutex. What waits in other backends (unregister_region(), the end)
/// lets the cards finish at once here.
class SimFabric final : public Fabric {
 public:
  struct Options {
    std::vector<double> rails_bytes_per_s = {10e9};    ///< The rate of each card; 1 to 64.
    Duration latency = std::chrono::microseconds(10);  ///< Of a read, beside its bytes.
    std::size_t piece_bytes = std::size_t{1} << 20;
    std::size_t window_bytes = std::size_t{16} << 20;  ///< Under way to a peer, a rail.
    std::size_t window_operations = 192;
    Duration stall_timeout = std::chrono::seconds(2);  ///< Of a peer that does not answer.
    std::size_t batches = 1024;                        ///< Accepted and not settled.
    std::size_t chunks = 65536;                        ///< Of one batch.
    std::size_t peers = 256;
  };

  /// `network` outlives it. `sink` is called in SimNetwork::run(), and by the fabric's end.
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

  /// The process stands still for so long: its cards go on, and nobody looks what they did, at
  /// deadlines, or at what is to be done next.
  void freeze(Duration time);
  /// Whether a card may still write there.
  [[nodiscard]] bool is_written(std::span<const std::byte> place) const;
  /// Accepted and not settled.
  [[nodiscard]] std::size_t batches() const;
  /// Brought by each rail so far, by what the dealer was told.
  [[nodiscard]] std::vector<std::uint64_t> bytes_by_rail() const;

 private:
  friend class SimNetwork;
  struct Region {
    std::span<std::byte> memory;
    TimePoint until = TimePoint::min();
  };
  struct Rail {
    double bytes_per_s = 0;
    TimePoint free_at = TimePoint::min();  ///< When it has brought all that it has.
    std::uint64_t transferred = 0;
  };
  /// A rail's way to a peer.
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
  /// A read that a card has begun.
  struct Read {
    rails::Operation operation;
    std::uint64_t fabric = 0;
    std::span<std::byte> place;
    std::uint64_t done = 0;  ///< Bytes that are there.
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
    kSilent,    ///< Nothing comes, and nobody says so.
    kBroken,    ///< There is nobody any more.
    kNoRegion,  ///< The owner does not have it any more.
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
  std::vector<rails::Outcome> outcomes_;  ///< That the dealer was not told yet.
  std::uint64_t last_read_ = 0;
  std::uint32_t last_region_ = 0;
  std::uint32_t last_peer_ = 0;
  std::size_t open_batches_ = 0;
  TimePoint frozen_until_ = TimePoint::min();
  TimePoint iterate_at_ = TimePoint::max();  ///< Of the earliest turn() that is to come.
};

}  // namespace pegaflow
