#pragma once
/// \file
/// One disk of the SSD tier over a simulated drive, with random faults, and an oracle of its bytes.

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "server/ssd/ssd_disk.h"
#include "transport/disk/sim_disk.h"

namespace pegaflow::server {

/// Runs one random schedule of saves, reads, resets, frames that are used again, kills, power cuts
/// and faults of the drive. The oracle demands: a block that is delivered has the bytes that were
/// saved under its name, kind, epoch and key; after a confirmed reset no older block is delivered,
/// in this process or a later one; the same after all blocks are dropped; a block that was flushed
/// and not touched since is found again; every job ends once.
class SsdWorld {
 public:
  struct Counts {
    std::uint64_t schedules = 0;
    std::uint64_t writes = 0;
    std::uint64_t kept = 0;
    std::uint64_t loads = 0;
    std::uint64_t proven = 0;
    std::uint64_t failed_proofs = 0;
    std::uint64_t resets = 0;
    std::uint64_t kills = 0;
    std::uint64_t power_cuts = 0;
    std::uint64_t faults = 0;
    std::uint64_t durable_checks = 0;
    std::uint64_t damaged = 0;  ///< Writes refused for other bytes than their writer's.
    std::uint64_t drops = 0;
  };

  /// The share of the occasions for a reset or a restart that are taken.
  struct Rates {
    double reset = 0.2;
    double restart = 0.15;
  };

  SsdWorld(std::uint64_t seed, const SsdDisk::Options::Mistakes& mistakes, const Rates& rates,
           Counts& counts);
  ~SsdWorld();
  SsdWorld(const SsdWorld&) = delete;
  SsdWorld& operator=(const SsdWorld&) = delete;

  /// Runs the schedule; returns the first violation, or an empty text.
  std::string run();

 private:
  struct Name {
    engine::ssd::Origin origin;   ///< With the epoch that this process uses.
    std::uint64_t weights = 0;    ///< The engine's; a reset comes with others.
    std::uint64_t confirmed = 0;  ///< Those of the last confirmed reset.
  };
  struct Frame {
    std::unique_ptr<AlignedBuffer> memory;
    bool is_busy = false;
    std::optional<SsdDisk::WriteId> write;
    std::uint64_t read = 0;  ///< Distinguishes the reads into it.
  };
  using Key = std::pair<std::size_t, std::uint64_t>;  ///< Name, key.

  [[nodiscard]] std::uint64_t any(std::uint64_t below) { return random_() % below; }
  [[nodiscard]] bool happens(double probability) {
    return std::uniform_real_distribution<>(0, 1)(random_) < probability;
  }
  void start();
  void stop();
  void step();
  void advance();
  void run_until_idle();
  void set_faults();
  Frame* free_frame();
  [[nodiscard]] SsdDisk::Block block_of(std::size_t name, std::uint64_t key, Frame& frame);
  void fill(const SsdDisk::Block& block, std::uint64_t key);
  [[nodiscard]] bool is_whole(const SsdDisk::Block& block) const;
  [[nodiscard]] bool is_of(const SsdDisk::Block& block, std::uint64_t weights) const;
  void save();
  void load();
  void use_frame_again();
  void reset();
  void drop_all();
  void restart(bool is_power_cut);
  void check_durable();
  void fail(const std::string& what) {
    if (violation_.empty()) violation_ = what;
  }

  std::mt19937_64 random_;
  const SsdDisk::Options::Mistakes mistakes_;
  const Rates rates_;
  Counts& counts_;
  ManualClock clock_;
  SimDrive drive_;
  std::vector<Frame> frames_;  ///< The pool: it outlives the process.
  std::vector<Name> names_;
  std::unique_ptr<SsdDisk> disk_;
  std::uint64_t jobs_ = 0;
  bool had_power_cut_ = false;
  std::uint64_t drops_ = 0;      ///< Calls of drop_all().
  bool is_drop_durable_ = true;  ///< The last one.
  std::set<Key> dropped_;        ///< Blocks that it dropped and that were not kept since.
  std::string violation_;
};

}  // namespace pegaflow::server
