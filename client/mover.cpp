#include "client/mover.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/os/numa.h"
#include "base/os/thread.h"
#include "base/os/unique_fd.h"
#include "capnp/wire/codec.h"
#include "client/loop.h"
#include "client/mover/mover_loop.h"
#include "client/mover/mover_state.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"mover"};

/// A descriptor of this process. Without one the server grants no pool: it could not detect the end
/// of this process's last copy.
UniqueFd open_own_pidfd() {
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!pidfd) {
    kLog.error("no pidfd from this kernel, the cache stays off error=\"{}\"", std::strerror(errno));
  }
  return pidfd;
}

/// The NUMA node to whose cores this process is bound, as operators bind an engine's workers to the
/// socket of their GPU; -1 if there is none.
int numa_node_of_process() {
  const NumaTopology topology = NumaTopology::read();
  if (topology.nodes().size() < 2) return -1;
  const auto node = topology.node_of(allowed_cores());
  return node ? static_cast<int>(*node) : -1;
}

}  // namespace

class Mover::Impl {
 public:
  Impl(const Options& options, PageLayout layout, Device& device)
      : state_(options, std::move(layout), device), pidfd_(open_own_pidfd()) {}

  Result<void> start() {
    PEGA_TRY_LET(thread_, start_thread("pega-mover", [this] { thread_main(); }));
    return {};
  }

  ~Impl() { close(); }

  [[nodiscard]] bool forked() const noexcept { return ::getpid() != pid_; }
  [[nodiscard]] const MoverState& state() const noexcept { return state_; }

  /// Stamps a job and queues it for the private thread.
  template <typename Job>
  Result<void> accept(Job&& job) {
    if (forked()) return fail(Errc::kPeerLost, "the mover belongs to the parent process");
    if (job.blocks.empty() || job.blocks.size() > kMaxKeysPerCall) {
      return fail(Errc::kInvalidArgument, "{} blocks in a job; 1 to {} are possible",
                  job.blocks.size(), kMaxKeysPerCall);
    }
    const std::uint64_t block_count = state_.layout.block_count();
    for (const std::uint32_t block : job.blocks) {
      if (block >= block_count) {
        return fail(Errc::kInvalidArgument, "block {} of {}", block, block_count);
      }
    }
    job.accepted = state_.clock.now();
    if constexpr (std::is_same_v<Job, LoadJob>) job.pace = LoadPace(job.computing, job.accepted);

    // The lock keeps jobs from being queued behind the command to close.
    const std::lock_guard lock(accept_mutex_);
    const LinkState stands = state_.board.state();
    if (closed_ || stands != LinkState::kReady) {
      return fail(Errc::kPeerLost, "the link to the server is {}", to_string(stands));
    }
    if (state_.places_taken.fetch_add(1) >= state_.options.max_jobs) {
      state_.places_taken.fetch_sub(1);
      return fail(Errc::kBusy, "{} jobs are in flight or not taken", state_.options.max_jobs);
    }
    if (!state_.commands.try_send(MoverCommand{std::forward<Job>(job)})) {
      state_.places_taken.fetch_sub(1);
      return fail(Errc::kBusy, "the queue of the mover's thread is full");
    }
    return {};
  }

  void cancel_load(std::uint64_t load) {
    if (forked()) return;
    if (!state_.commands.try_send(MoverCommand{CancelLoad{load}})) {
      kLog.warn("command queue full, a cancelled load ends at its deadline load={}", load);
    }
  }

  std::vector<Followed> follow(Device::Queue queue, Duration within) {
    std::vector<Followed> followed;
    if (forked()) return followed;
    const std::lock_guard lock(state_.copying_mutex);
    for (CopyingLoad& load : state_.copying) {
      if (load.followed) continue;
      // A broken device reports it in the completion.
      load.followed = state_.device.complete_early(load.ticket, queue, within).value_or(false);
      if (!load.followed) continue;
      load.report.took = state_.clock.now() - load.accepted;
      followed.push_back(load.report);
    }
    return followed;
  }

  std::vector<Finished> take_finished() {
    std::vector<Finished> taken;
    const std::lock_guard lock(take_mutex_);
    state_.finished.drain([&](Finished&& job) { taken.push_back(std::move(job)); });
    state_.places_taken.fetch_sub(taken.size());
    return taken;
  }

  void close() {
    if (forked()) return;
    const std::lock_guard closing(close_mutex_);
    {
      const std::lock_guard lock(accept_mutex_);
      closed_ = true;
    }
    if (!thread_.joinable()) return;
    // The thread takes commands until it ends, so room becomes free soon.
    while (!state_.commands.try_send(MoverCommand{})) std::this_thread::yield();
    thread_.join();
    if (state_.board.state() != LinkState::kRetired)
      state_.board.set(LinkState::kRetired, "closed");
  }

 private:
  void thread_main() {
    std::optional<Error> broken = run_loop([this](kj::AsyncIoContext& io) {
      MoverLoop loop(io, state_, Link::Identity{.side = "worker", .pidfd = pidfd_.get()});
      loop.run().wait(io.waitScope);
    });
    if (broken) retire(*broken);
  }

  /// Handles a broken invariant: waits for the copies in flight, then reports every job as failed.
  void retire(const Error& why) {
    state_.board.set(LinkState::kRetired, to_string(why));
    kLog.error("internal error, the cache stays off instance={} error=\"{}\"",
               state_.options.link.instance, to_string(why));
    const Error off{Errc::kInternal, "the cache is off: " + why.detail};
    const ThrowOnAssert throw_on_assert;
    state_.device.detach();
    state_.mapping = PoolMapping();
    state_.events.drain([](MoverEvent&&) {});
    for (auto& [ticket, job] : state_.saves) state_.report(job, 0, 0, off);
    for (auto& [ticket, job] : state_.loads) state_.report(std::move(job), 0, 0, off);
    state_.saves.clear();
    state_.loads.clear();
    for (bool closing = false; !closing;) {
      state_.commands.drain([&](MoverCommand&& command) {
        closing = closing || std::holds_alternative<CloseMover>(command);
        if (const auto* const save = std::get_if<SaveJob>(&command)) {
          state_.report(*save, 0, 0, off);
        } else if (auto* const load = std::get_if<LoadJob>(&command)) {
          state_.report(std::move(*load), 0, 0, off);
        }
      });
      pollfd wanted{state_.commands.fd(), POLLIN, 0};
      if (!closing) ::poll(&wanted, 1, -1);
    }
  }

  MoverState state_;
  const pid_t pid_ = ::getpid();
  const UniqueFd pidfd_;
  std::mutex accept_mutex_;
  bool closed_ = false;  ///< Under accept_mutex_.
  std::mutex take_mutex_;
  std::mutex close_mutex_;
  std::thread thread_;
};

Result<std::unique_ptr<Mover>> Mover::start(const Options& options, PageLayout layout,
                                            Device& device) {
  PEGA_TRY(validate(options.link));
  if (options.rank >= options.ranks) {
    return fail(Errc::kInvalidArgument, "rank {} of {}", options.rank, options.ranks);
  }
  const std::uint32_t shards = options.shards.value_or(options.ranks);
  if (options.shard.value_or(options.rank) >= shards || shards > options.ranks) {
    return fail(Errc::kInvalidArgument, "shard {} of {} for rank {} of {}",
                options.shard.value_or(options.rank), shards, options.rank, options.ranks);
  }
  if (options.numa_node < -1) {
    return fail(Errc::kInvalidArgument, "NUMA node {}", options.numa_node);
  }
  if (options.max_jobs == 0 || options.load_patience <= Duration::zero() ||
      options.coming_patience < Duration::zero() || !(options.load_bytes_per_second > 0)) {
    return fail(Errc::kInvalidArgument,
                "max_jobs {}, load_patience {} ns and load_bytes_per_second {} must be positive",
                options.max_jobs, options.load_patience.count(), options.load_bytes_per_second);
  }
  if (options.sample_one_in == 0) {
    return fail(Errc::kInvalidArgument, "sample_one_in is 0; it must be 1 or more");
  }
  Options own = options;
  if (own.numa_node < 0) own.numa_node = numa_node_of_process();
  auto impl = std::make_unique<Impl>(own, std::move(layout), device);
  PEGA_TRY(impl->start());
  return std::unique_ptr<Mover>(new Mover(std::move(impl)));
}

Mover::Mover(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Mover::~Mover() {
  // A child process does not have the thread: joining it, or destroying its mutexes, never returns.
  if (impl_->forked()) static_cast<void>(impl_.release());
}

Result<void> Mover::save(Id128 scheduler, std::uint64_t job, std::span<const BlockKey> keys,
                         std::span<const std::uint32_t> blocks, Device::Event after) {
  if (keys.size() != blocks.size()) {
    return fail(Errc::kInvalidArgument, "{} keys for {} blocks", keys.size(), blocks.size());
  }
  SaveJob accepted;
  accepted.id = job;
  accepted.job = {scheduler, job};
  accepted.keys.assign(keys.begin(), keys.end());
  accepted.blocks.assign(blocks.begin(), blocks.end());
  accepted.after = after;
  return impl_->accept(std::move(accepted));
}

Result<void> Mover::load(std::uint64_t load, const Id128& token, std::size_t first,
                         std::span<const std::uint32_t> blocks,
                         const std::optional<LoadPace::Computing>& computing) {
  if (first > kMaxKeysPerCall) {
    return fail(Errc::kInvalidArgument, "block {} of a claim of at most {}", first,
                kMaxKeysPerCall);
  }
  LoadJob accepted;
  accepted.computing = computing;
  accepted.id = load;
  accepted.token = token;
  accepted.first = first;
  accepted.blocks.assign(blocks.begin(), blocks.end());
  return impl_->accept(std::move(accepted));
}

void Mover::cancel_load(std::uint64_t load) { impl_->cancel_load(load); }
std::vector<Mover::Followed> Mover::follow(Device::Queue queue, Duration within) {
  return impl_->follow(queue, within);
}
std::vector<Mover::Finished> Mover::take_finished() { return impl_->take_finished(); }
int Mover::finished_fd() const noexcept { return impl_->state().finished.fd(); }
void Mover::close() { impl_->close(); }
LinkStatus Mover::status() const { return impl_->state().board.get(); }
bool Mover::wait_for(LinkState state, Duration patience) const {
  return impl_->state().board.wait_for(state, patience);
}
const PageLayout& Mover::layout() const noexcept { return impl_->state().layout; }

}  // namespace pegaflow
