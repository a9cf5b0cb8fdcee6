#pragma once
/// \file
/// Reads of pages, and then of their guards, from the memory of engines on other hosts.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/os/event_fd.h"
#include "base/os/mailbox.h"
#include "transport/device.h"
#include "transport/fabric.h"
#include "transport/network_plan.h"

namespace pegaflow::network {

/// Carries out the reads of a NetworkDevice through a Fabric, which it owns.
///
/// A read has two steps: its pages, and the guards once the fabric has quiesced every chunk of the
/// pages and all of them arrived. The guards are read into memory of this object, where each read
/// has a place from start() on. A read ends when the fabric has quiesced all that was posted for
/// it; nothing writes to its pages after that.
///
/// Thread-safe, by one mutex. Each read is reported on the thread of this object, which sleeps
/// while nothing ends.
class Reads {
 public:
  using MakeFabric = std::function<Result<std::unique_ptr<Fabric>>(Fabric::CompletionSink)>;

  struct Options {
    Duration patience{};        ///< From the posting of a step to its deadline at the fabric.
    std::size_t max_reads = 0;  ///< Started and not yet reported; 1 to kMostPosted.
    bool guards_first = false;  ///< The wrong order, for tests: the guards prove nothing then.
    /// If set, it runs before the report of a read that brought bytes, and its error is that of the
    /// read.
    std::function<Result<void>()> show_bytes{};
  };

  struct Read {
    std::uint64_t ticket = 0;  ///< Unique among the reads in flight.
    Fabric::PeerId peer{};
    PagePlan pages{};
    RegionId guard_region{};
    std::vector<std::uint32_t> guards{};  ///< Numbers of words in the region, in any order.
    std::shared_ptr<const Device::CompletionSink> sink{};
  };

  /// Fabric batches that are accepted and not quiesced, at most.
  static constexpr std::size_t kMostPosted = 1024;
  /// Chunks of a fabric batch, at most: backends accept 65536.
  static constexpr std::size_t kPartChunks = 32768;
  /// Words that are read at once; more take several rounds.
  static constexpr std::size_t kRoundWords = 512;

  /// Makes the fabric and starts the thread. `clock` outlives it.
  /// Errors: kInvalidArgument for an option out of range; those of `make` and of
  /// Fabric::register_region(); kInternal when no thread can be started.
  static Result<std::unique_ptr<Reads>> create(const Options& options, const MakeFabric& make,
                                               const Clock& clock);
  /// Cancels all reads and waits until they are reported, then ends the fabric and the thread.
  ~Reads();
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;

  [[nodiscard]] Fabric& fabric() noexcept { return *fabric_; }

  /// Accepts a read. Errors: kBusy when there are too many reads, or those of Fabric::read() for
  /// its first chunks. A later error ends the read.
  Result<void> start(Read read);
  /// Cancels a read that is not over; false: there is none with this ticket. It continues until its
  /// deadline if the fabric is too busy for the request.
  bool cancel(std::uint64_t ticket);
  void cancel_all();
  /// Returns when no read is in flight and all are reported.
  void wait_until_idle();

 private:
  struct Job;
  struct Posted {
    Job* job = nullptr;
    std::size_t first_chunk = 0;  ///< Its number among those of the pages.
  };
  struct Ended {
    Device::Completion completion;
    std::shared_ptr<const Device::CompletionSink> sink;
  };

  Reads(const Options& options, const Clock& clock);

  Result<void> post(Job& job, std::vector<Fabric::Chunk> chunks, std::size_t first_chunk);
  Result<void> post_pages(Job& job);
  Result<void> post_guards(Job& job);
  void on_completion(Fabric::Completion&& completion);
  void begin_next_step(Job& job);
  void take_guards(Job& job);
  void end(Job& job);
  void cancel(Job& job);
  void run();
  void report();
  void show(Device::Completion& completion) const;

  const Options options_;
  const Clock& clock_;
  Mailbox<Fabric::Completion> mailbox_;
  EventFd wake_;
  std::atomic<bool> stop_{false};
  std::vector<std::uint64_t> words_;  ///< kRoundWords for each read.
  RegionId words_region_{};

  std::mutex mutex_;
  std::condition_variable idle_;  ///< active_ became 0.
  std::list<Job> jobs_;
  std::unordered_map<std::uint64_t, Posted> posted_;  ///< By the ticket at the fabric.
  std::vector<std::size_t> free_places_;              ///< In words_, by number.
  std::vector<Ended> ended_;                          ///< Not yet reported.
  std::size_t active_ = 0;                            ///< Started, until the sink has returned.
  std::uint64_t last_ticket_ = 0;

  std::unique_ptr<Fabric> fabric_;
  std::thread thread_;
};

}  // namespace pegaflow::network
