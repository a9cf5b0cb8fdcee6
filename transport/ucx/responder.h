#pragma once
/// \file
/// The serving side of a rail: which readers may read, and until when.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/id128.h"
#include "transport/region.h"
#include "transport/ucx/wire.h"
#include "transport/ucx/worker.h"

namespace pegaflow::ucx {

/// Answers readers that name this incarnation, and no others. It does not see their GETs: with a
/// card, no code on this side does.
///
/// So a lease ends by agreement: its readers receive a revocation, stop, and confirm. A reader that
/// has not confirmed after `fence_timeout` is cut off, by closing the endpoint that its card reads
/// through.
///
/// Thread-bound: to the rail's thread.
class Responder {
 public:
  struct Options {
    std::size_t readers = 1024;
    Duration fence_timeout{};
  };

  /// All references outlive it.
  Responder(const Options& options, Worker& worker, const Id128& incarnation, const Clock& clock);

  /// Sets the end of the leases that readers receive; TimePoint::min(): none.
  void lend(RegionId region, TimePoint until);
  /// Revokes the leases of the region. `done` is called when no reader uses an older one, which may
  /// be at once.
  void revoke(RegionId region, std::function<void()> done);
  void forget(RegionId region);

  void on_message(const Worker::Arrived& arrived);
  /// Closes paths to readers that are gone or do not respond.
  void check_paths();
  [[nodiscard]] TimePoint next_time() const noexcept { return next_check_; }

  void close_all();
  [[nodiscard]] bool all_closed();

 private:
  /// A reader's path to this node, as this side keeps it.
  struct Path {
    std::uint64_t remote_number = 0;  ///< The reader's number of it.
    std::vector<std::byte> address;
    std::unique_ptr<Endpoint> endpoint;
    std::set<std::uint32_t> promised;  ///< Regions with a lease.
    std::optional<TimePoint>
        close_at;  ///< After a rejection: leaves time for the response to be sent.
    bool closing = false;
  };
  struct Fence {
    std::int64_t number = 0;
    std::uint32_t region = 0;
    std::set<std::uint64_t> waits_for;  ///< Paths.
    TimePoint last;
    std::function<void()> done;
  };

  void on_hello(const Worker::Arrived& arrived);
  void on_lease_request(Path& path, const Message& message);
  void close(Path& path, Endpoint::Close how);
  void finish_fences();
  void check_by(TimePoint time) noexcept { next_check_ = std::min(next_check_, time); }

  const Options options_;
  Worker& worker_;
  const Id128 incarnation_;
  const Clock& clock_;
  std::unordered_map<std::uint32_t, TimePoint> lent_;
  std::unordered_map<std::uint64_t, Path> paths_;
  std::vector<Fence> fences_;
  std::uint64_t last_path_;
  std::int64_t last_fence_ = 0;
  TimePoint next_check_ = TimePoint::max();
};

}  // namespace pegaflow::ucx
