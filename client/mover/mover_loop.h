#pragma once
/// \file
/// The private thread of a Mover: registers, maps the pool, and runs save and load jobs.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/id128.h"
#include "base/os/unique_fd.h"
#include "capnp/wire/codec.h"
#include "client/direct/consent.h"
#include "client/link.h"
#include "client/loop.h"
#include "client/mover/cleanup_calls.h"
#include "client/mover/loads.h"
#include "client/mover/mover_state.h"
#include "client/mover/saves.h"

namespace pegaflow {

/// Bound to its KJ thread.
///
/// Operations that may take long and cannot be cancelled (mapping a pool and attaching the device,
/// waiting for the last copies and unmapping) run on a helper thread, so that jobs that have ended
/// are reported meanwhile. There is one helper at a time.
///
/// The mapping of a pool that outlives its server stays when the connection is lost: the next
/// server most likely has the same pool. It is unmapped when that has another one, or when no
/// server has answered for kKeepMapping.
class MoverLoop final : private Link::Role {
 public:
  /// All outlive the loop.
  MoverLoop(kj::AsyncIoContext& io, MoverState& state, const Link::Identity& identity);
  /// Waits for the helper.
  ~MoverLoop() noexcept(false);

  /// Resolves when a CloseMover command has been carried out. Throws for a broken invariant.
  kj::Promise<void> run();

 private:
  struct Registered;
  /// kKept: mapped, without a connection and without a copy in flight.
  enum class Pool : std::uint8_t { kUnmapped, kMapping, kMapped, kUnmapping, kKept };

  // The link's role.
  kj::Promise<Result<void>> begin() override;
  kj::Promise<void> end() override;

  kj::Promise<Result<void>> register_rank();
  /// `offered`: the memory that engines of the direct group may read.
  [[nodiscard]] Registration registration(std::optional<OfferedMemory> offered) const;
  /// That memory; none without a group, or where they cannot.
  [[nodiscard]] std::optional<PeerMemory> shared() const;
  [[nodiscard]] OfferedMemory offered_memory(const PeerMemory& shared) const;
  void log_unsupported(std::string_view what) const;
  /// Errors: kRefused when the server does not implement what the engine's kinds need.
  [[nodiscard]] Result<void> may_register() const;
  kj::Promise<Result<void>> on_registered(Registered&& registered);
  /// Takes the mapping that was kept if it is that of this pool, else maps it.
  kj::Promise<Result<void>> use_pool(const Id128& kept_pool);
  /// Resolves once no kept pool is mapped.
  kj::Promise<void> unmap_kept();
  void unmap_when_late();
  void describe_device();
  /// As Sources::Watch.
  std::shared_ptr<void> watch_source(int process);
  kj::Promise<Result<void>> map_pool();
  void start_helper(std::function<void()> work);
  void on_helper_done();
  void unmap_pool();
  /// Resolves end() when no job is left and the pool is unmapped, or kept without a copy in flight.
  void end_if_quiet();

  void handle(MoverCommand&& command);
  void handle(MoverEvent&& event);

  MoverState& state_;
  kj::UnixEventPort& event_port_;
  Link link_;
  CleanupCalls cleanup_;
  Saves saves_;
  Loads loads_;
  Consent consent_;

  Pool pool_ = Pool::kUnmapped;
  Id128 kept_pool_;               ///< The name of the mapped pool, if it outlives its server.
  std::uint64_t times_kept_ = 0;  ///< Distinguishes one wait for a server from a later one.
  std::vector<kj::Own<kj::PromiseFulfiller<void>>> on_unmapped_;
  bool shares_ranges_ = true;  ///< Until a registration with them has failed.
  UniqueFd pool_fd_;
  std::thread helper_;
  Result<void> mapped_;  ///< The helper's result.
  TimePoint unmapping_since_{};
  kj::Own<kj::PromiseFulfiller<Result<void>>> on_mapped_;
  bool ending_ = false;
  kj::Own<kj::PromiseFulfiller<void>> on_end_;

  MailboxPump commands_;
  MailboxPump events_;
  LoopTasks tasks_;  ///< Last: its steps use all of the above.
};

}  // namespace pegaflow
