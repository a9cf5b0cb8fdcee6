#pragma once
/// \file
/// Copies between the pool and ordinary memory, with the threads of the CPU.

#include <memory>

#include "base/error.h"
#include "transport/device.h"

namespace pegaflow {

/// The Device of engines that keep their KV cache in ordinary memory.
///
/// Its threads take runs of pages from the batch at the head of two bounded queues; the queue of
/// loads is looked at first each time, so a load overtakes even a save that has begun. A run is one
/// page or some 256 KiB of smaller ones: what cancel() and detach() may have to wait for.
///
/// An engine on the CPU has done its work when it calls us, so every event is Event::kNow.
///
/// Thread-safe. After a fork the child has no copy threads: there submit() says kGone and the
/// destructor returns at once.
class HostDevice final : public Device {
 public:
  struct Options {
    int threads = 1;                 ///< One reaches what one core can copy; 1 to 64.
    std::size_t max_batches = 4096;  ///< Queued or under way, in each direction.
  };

  /// Starts the threads. Errors: kInvalidArgument for an option without sense, kInternal when no
  /// thread can start.
  static Result<std::unique_ptr<HostDevice>> create(const Options& options);

  /// detach(), then ends the threads.
  ~HostDevice() override;

  Result<void> attach(const PageLayout& layout, std::span<std::byte> pool,
                      CompletionSink sink) override;
  void detach() override;
  Result<Event> record_event(Queue queue) override;
  Result<void> submit(Batch batch) override;
  void cancel(std::uint64_t ticket) override;

 private:
  class Impl;
  explicit HostDevice(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pegaflow
