#pragma once
/// \file
/// Copies between the pool and ordinary memory, on CPU threads.

#include <memory>

#include "base/error.h"
#include "transport/device.h"

namespace pegaflow {

/// The Device of engines that keep their KV cache in ordinary memory.
///
/// Its threads take runs of pages from the batch at the head of two bounded queues. They look at
/// the queue of loads first, so a load overtakes even a save that has begun. A run is one page or
/// some 256 KiB of smaller ones: the longest that cancel() and detach() wait for.
///
/// It reads the memory of peers with process_vm_readv(), which takes 2 to 4 times the CPU time of a
/// load from the pool (3.5 to 4.3 GB in a second of it, segments of 4 to 256 KiB). The kernel must
/// permit this process to trace the peer's, and both must be in one PID namespace.
///
/// An engine on the CPU has done its work when it calls, so every event is Event::kNow.
///
/// Thread-safe. After a fork the child has no copy threads: there submit() returns kGone and the
/// destructor returns at once.
class HostDevice final : public Device {
 public:
  struct Options {
    int threads = 1;                 ///< 1 to 64; each copies as fast as one core can.
    std::size_t max_batches = 4096;  ///< Queued or in flight, in each direction.
  };

  /// Starts the threads. Errors: kInvalidArgument for an option out of range, kInternal when no
  /// thread can be started.
  static Result<std::unique_ptr<HostDevice>> create(const Options& options);

  /// Calls detach(), then ends the threads.
  ~HostDevice() override;

  using Device::attach;
  Result<void> attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                      CompletionSink sink) override;
  void detach() override;
  Result<void> add_peer(std::uint64_t peer, const PeerMemory& memory) override;
  void remove_peer(std::uint64_t peer) override;
  Result<Event> record_event(Queue queue) override;
  Result<void> submit(Batch batch) override;
  void cancel(std::uint64_t ticket) override;

 private:
  class Impl;
  explicit HostDevice(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
