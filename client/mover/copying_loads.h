#pragma once
/// \file
/// Loads whose copies may all be queued on the device, and their early completion.

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "client/mover_types.h"
#include "transport/device.h"

namespace pegaflow {

/// A load is here from the time at which its last batches go to the device until all of them have
/// completed. Thread-safe: follow() is called on the engine's thread, the rest on the mover's.
class CopyingLoads {
 public:
  /// Adds a load before the device has its last batches, because the engine may call follow() at
  /// once. `batches` are those that have not completed, in the order in which the device gets them;
  /// `report` is complete except for `took`.
  void add(std::uint64_t ticket, std::vector<std::uint64_t> batches, const FollowedLoad& report,
           TimePoint accepted);
  /// Removes a batch that has completed; `whole`: with all its pages. Returns whether the load was
  /// completed early.
  bool leave(std::uint64_t ticket, std::uint64_t batch, bool whole);
  /// Removes a load of which the device rejected a batch.
  void remove(std::uint64_t ticket);

  /// As Mover::follow().
  std::vector<FollowedLoad> follow(Device& device, Device::Queue queue, Duration within,
                                   TimePoint now);

 private:
  struct Load {
    std::uint64_t ticket = 0;
    std::vector<std::uint64_t> batches;
    FollowedLoad report;
    TimePoint accepted{};
    bool failed = false;
    bool followed = false;  ///< It was completed early.
  };
  std::mutex mutex_;
  std::vector<Load> loads_;
};

}  // namespace pegaflow
