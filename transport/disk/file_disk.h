#pragma once
/// \file
/// A Disk over a file of this machine.

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/mailbox.h"
#include "transport/disk/disk.h"
#include "transport/disk/disk_file.h"
#include "transport/disk/io_engine.h"
#include "transport/disk/io_queue.h"
#include "transport/disk/open_disk.h"

namespace pegaflow::disk {

/// Runs an IoQueue and an IoEngine on a thread of its own (`pega-disk`), which sleeps in the engine
/// while nothing ends and no command arrives; with a timeout only while writes wait for reads.
class FileDisk final : public Disk {
 public:
  /// `backend` is kUring or kThreads, and `reason` the one for the attributes.
  static Result<std::unique_ptr<FileDisk>> start(DiskFile file, const DiskOptions& options,
                                                 DiskBackend backend, std::string reason,
                                                 CompletionSink sink);
  ~FileDisk() override;
  FileDisk(const FileDisk&) = delete;
  FileDisk& operator=(const FileDisk&) = delete;

  [[nodiscard]] const Attributes& attributes() const noexcept override { return attributes_; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override {
    return size_bytes_.load(std::memory_order_relaxed);
  }
  Result<void> resize(std::uint64_t size_bytes) override;
  using Disk::submit;
  Result<void> submit(std::vector<Request> requests) override;
  Result<void> cancel(std::uint64_t ticket) override;
  [[nodiscard]] Stats stats() const override;

 private:
  struct Cancel {
    std::uint64_t ticket = 0;
  };
  struct Stop {};
  using Command = std::variant<std::monostate, std::vector<Request>, Cancel, Stop>;

  FileDisk(DiskFile file, const DiskOptions& options, CompletionSink sink);
  void run(IoEngine& engine);
  void carry_out(Command command);
  void begin_pieces(IoEngine& engine);
  void reap(IoEngine& engine, bool may_wait);
  void deliver(IoEngine& engine);
  void report(IoQueue::Finished finished);
  [[nodiscard]] bool may_hold_back() const;
  void pass_on();

  const SteadyClock clock_;
  const Limits limits_;
  const Duration report_interval_;
  const CompletionSink sink_;
  DiskFile file_;
  Attributes attributes_;
  std::atomic<std::uint64_t> size_bytes_;
  std::atomic<std::size_t> open_requests_{0};
  Mailbox<Command> mailbox_;
  IoQueue queue_;                            // The thread's, but for its counters.
  std::vector<IoEngine::Outcome> outcomes_;  // The thread's.
  std::vector<Completion> held_back_;        // The thread's: reads, see report_interval.
  std::uint64_t held_back_bytes_ = 0;        // The thread's.
  TimePoint next_report_{};                  // The thread's: from then on reads are reported.
  bool stop_ = false;                        // The thread's.
  std::thread thread_;
};

}  // namespace pegaflow::disk
