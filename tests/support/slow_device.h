#pragma once
/// \file
/// A Device with delays and faults that a test injects.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "transport/device.h"
#include "transport/host/peer_reader.h"

namespace pegaflow::testing {

/// Copies like a HostDevice with one thread, but stops where the test says. Loads overtake saves.
/// Thread-safe.
class SlowDevice final : public Device {
 public:
  SlowDevice();
  /// Calls allow_all(), then detach().
  ~SlowDevice() override;

  // ---- faults

  /// Copies only the pages that were allowed so far. A page that is not allowed is in flight once
  /// the thread waits for it, like a DMA that was issued: detach() waits for it.
  void hold();
  void allow_pages(std::size_t more);
  /// Ends hold().
  void allow_all();
  /// Fails the n-th page from now, 0 for the next, and with it its batch.
  void fail_page(std::size_t n);
  /// The next attach() fails with this error.
  void fail_next_attach(Error error);
  /// The next submit() fails with this error.
  void fail_next_submit(Error error);
  /// record_event() fails with this error from now on.
  void fail_events(Error error);
  /// Reports early completion of loads that are held back, although no engine's work waits for
  /// them. From then on they cannot be cancelled.
  void allow_early_completion();
  /// The same for loads that still wait for the thread.
  void allow_early_completion_of_queued();
  /// Delivers the next completion twice, which no device may do.
  void complete_next_twice();

  // ---- observations

  /// Waits until a page is held back; false after `patience`.
  bool wait_held(std::chrono::milliseconds patience);
  /// Waits until it has copied this many pages in all.
  bool wait_copied(std::size_t pages, std::chrono::milliseconds patience);
  /// Waits until it is not attached, or a thread waits in detach().
  bool wait_detaching(std::chrono::milliseconds patience);
  /// Waits until cancel() was called this many times.
  bool wait_cancels(std::size_t calls, std::chrono::milliseconds patience);
  [[nodiscard]] std::size_t batches() const;
  [[nodiscard]] std::size_t attaches() const;
  [[nodiscard]] std::size_t peers() const;

  // ---- Device

  using Device::attach;
  Result<void> attach(std::span<const PageLayout> layouts, std::span<std::byte> pool,
                      CompletionSink sink) override;
  void detach() override;
  Result<void> add_peer(std::uint64_t peer, const PeerMemory& memory) override;
  void remove_peer(std::uint64_t peer) override;
  Result<Event> record_event(Queue queue) override;
  Result<void> submit(Batch batch) override;
  void cancel(std::uint64_t ticket) override;
  Result<bool> complete_early(std::uint64_t ticket, Queue queue, Duration within) override;

 private:
  void run();
  Completion copy(std::unique_lock<std::mutex>& lock, const Batch& batch);
  /// Copies one page and returns its checksum.
  Result<std::uint64_t> copy_page(const Batch& batch, const Copy& copy);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<PageLayout> layouts_;
  std::span<std::byte> pool_;
  CompletionSink sink_;
  std::deque<Batch> queue_;
  std::map<std::uint64_t, PeerReader> peers_;
  std::set<std::uint64_t> cancelled_;
  std::set<std::uint64_t> promised_;  ///< Their early completion was reported.
  bool busy_ = false;                 ///< The thread has a batch.
  bool attached_ = false;
  bool detaching_ = false;
  bool stopping_ = false;
  bool holding_ = false;
  bool page_waits_ = false;
  std::size_t allowed_ = 0;
  std::size_t copied_ = 0;
  std::size_t batches_ = 0;
  std::size_t attaches_ = 0;
  std::size_t cancels_ = 0;
  std::optional<std::size_t> fail_page_;
  std::optional<Error> fail_attach_;
  std::optional<Error> fail_submit_;
  std::optional<Error> fail_events_;
  bool complete_twice_ = false;
  bool may_complete_early_ = false;
  bool may_complete_queued_ = false;
  std::optional<std::uint64_t> load_;  ///< The load that the thread copies.
  std::thread thread_;
};

}  // namespace pegaflow::testing
