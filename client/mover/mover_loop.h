#pragma once
/// \file
/// What a Mover does on its private thread: registers, asks for slots, hands copies to the device.

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/os/unique_fd.h"
#include "client/link.h"
#include "client/loop.h"
#include "client/mover/mover_state.h"

namespace pegaflow {

/// Bound to its KJ thread.
///
/// What may take long and cannot be cancelled (mapping a pool and attaching the device, waiting for
/// the last copies and unmapping) runs on a helper thread, so that jobs that have ended are
/// reported meanwhile. There is one helper at a time.
class MoverLoop final : private Link::Role {
 public:
  /// All outlive the loop.
  MoverLoop(kj::AsyncIoContext& io, MoverState& state, const Link::Identity& identity);
  /// Waits for the helper.
  ~MoverLoop() noexcept(false);

  /// Until a kClose command came and was carried out. Throws for a broken invariant.
  kj::Promise<void> run();

 private:
  enum class Pool : std::uint8_t { kUnmapped, kMapping, kMapped, kUnmapping };
  using Kind = Mover::Finished::Kind;
  using Phase = MoverJob::Phase;

  // The link's role.
  kj::Promise<Result<void>> begin() override;
  kj::Promise<void> end() override;

  kj::Promise<Result<void>> ask_to_register();
  kj::Promise<Result<void>> on_registered(wire::Pool::Client&& pool);
  kj::Promise<Result<void>> map_pool();
  void start_helper(std::function<void()> work);
  void on_helper_done();
  void unmap_pool();
  void end_if_quiet();

  // The way of a job. Each step finds its job by ticket: it may have ended meanwhile.
  void handle(MoverCommand&& command);
  void handle(MoverEvent&& event);
  void begin_save(std::uint64_t ticket);
  void begin_load(std::uint64_t ticket);
  /// What reserve or open gave.
  struct Granted {
    std::vector<std::uint32_t> slots;
    std::vector<std::uint64_t> checksums;  ///< Of a load; empty where there are none.
    std::size_t coming = 0;                ///< Of a load: blocks behind them that may still come.
    std::optional<LoadPace::Cut> late{};   ///< Of a load: why waiting for them is of no use.
  };
  void on_slots(std::uint64_t ticket, Result<Granted>&& granted);
  /// Nothing of the load is there yet.
  void wait_for_coming(std::uint64_t ticket, MoverJob& job, std::size_t coming,
                       const std::optional<LoadPace::Cut>& late);
  /// Whether a page that is being saved gets a checksum.
  bool takes_checksum();
  /// The places of a load's pages that are not what was saved.
  static std::vector<std::uint32_t> find_corrupt(MoverJob& job,
                                                 const Device::Completion& completion);
  void submit(std::uint64_t ticket, MoverJob& job, std::vector<Device::Copy>&& copies);
  void start_load_deadline(std::uint64_t ticket, const MoverJob& job);
  /// Ends a load whose other blocks are computed sooner than they arrive.
  void cut(std::uint64_t ticket, MoverJob& job, LoadPace::Cut why);
  void on_copied(const Device::Completion& completion);
  void settle_save(std::uint64_t ticket, MoverJob& job, const Device::Completion& completion);
  void settle_load(std::uint64_t ticket, MoverJob& job, const Device::Completion& completion);
  /// Shows a load's last piece to whoever asks what may be followed.
  void note_copying(std::uint64_t ticket, const MoverJob& job,
                    std::span<const Device::Copy> copies);
  /// The device has ended it. Whether the engine was told before that it need not wait.
  bool no_longer_copying(std::uint64_t ticket);
  void cancel_load(std::uint64_t load);
  /// Takes the job out of the table and reports it.
  void finish(std::uint64_t ticket, std::size_t good_blocks, std::size_t copied_pages,
              std::optional<Error> error);

  // Calls that nobody waits for.
  void abandon(const JobId& job);
  void publish_nothing(const JobId& job);
  void release(std::uint64_t pin);
  void report_corrupt(std::uint64_t pin, std::span<const std::uint32_t> places);
  void log_failure(const char* what, const Result<void>& done);

  MoverState& state_;
  Link link_;

  Pool pool_ = Pool::kUnmapped;
  UniqueFd pool_fd_;
  std::uint64_t pool_bytes_ = 0;
  std::thread helper_;
  Result<void> mapped_;  ///< What the helper found.
  TimePoint unmapping_since_{};
  kj::Own<kj::PromiseFulfiller<Result<void>>> on_mapped_;
  bool ending_ = false;
  kj::Own<kj::PromiseFulfiller<void>> on_end_;

  std::uint64_t load_bytes_queued_ = 0;
  TimePoint last_load_end_{};                        ///< Of the device's copies.
  std::minstd_rand chance_{std::random_device{}()};  ///< Which pages a sample takes.
  std::optional<TimePoint> last_corrupt_line_;
  std::uint64_t corrupt_pages_ = 0;
  std::unordered_map<std::uint64_t, kj::Promise<void>> load_deadlines_;
  MailboxPump commands_;
  MailboxPump events_;
  LoopTasks tasks_;  ///< Last: its steps use all of the above.
};

}  // namespace pegaflow
