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
#include "base/printable.h"
#include "capnp/wire/codec.h"
#include "client/direct/guards.h"
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
  Impl(const Options& options, KindTable kinds, std::unique_ptr<Guards> guards, Device& device)
      : state_(options, std::move(kinds), std::move(guards), device), pidfd_(open_own_pidfd()) {}

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
    PEGA_TRY(check(job));
    job.accepted = state_.clock.now();
    if constexpr (std::is_same_v<Job, LoadJob>) {
      const bool is_paced =
          job.parts.size() == 1 && state_.kinds[job.parts.front().kind].rule == BlockRule::kPrefix;
      if (is_paced) job.pace = LoadPace(job.computing, job.accepted);
    }

    // The lock keeps jobs from being queued behind the command to close.
    const std::lock_guard lock(accept_mutex_);
    const LinkState stands = state_.board.state();
    if (closed_ || stands != LinkState::kReady) {
      return fail(Errc::kPeerLost, "the link to the server is {}", to_string(stands));
    }
    if constexpr (std::is_same_v<Job, LoadJob>) {
      if (job.is_following() && !state_.may_follow) {
        return fail(Errc::kRefused, "the server ({}) does not support direct reads",
                    state_.board.get().server_build);
      }
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
    if (forked()) return {};
    return state_.copying.follow(state_.device, queue, within, state_.clock.now());
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
    // No peer of another host reads the guards, or the engine's memory, from here on.
    state_.device.unshare();
    if (state_.board.state() != LinkState::kRetired)
      state_.board.set(LinkState::kRetired, "closed");
  }

 private:
  [[nodiscard]] Result<void> check(const SaveJob& job) const {
    PEGA_TRY(check_count(job.keys.size()));
    return state_.kinds.check(job.kind, job.keys.size(), job.blocks);
  }
  [[nodiscard]] Result<void> check(const LoadJob& job) const {
    for (const LoadPart& part : job.parts) {
      PEGA_TRY(check_count(part.count));
      PEGA_TRY(state_.kinds.check(part.kind, part.count, part.blocks));
    }
    return {};
  }
  static Result<void> check_count(std::size_t blocks) {
    if (blocks != 0 && blocks <= kMaxKeysPerCall) return {};
    return fail(Errc::kInvalidArgument, "{} blocks in a job; 1 to {} are possible", blocks,
                kMaxKeysPerCall);
  }

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
    state_.sources.clear();
    state_.pools.clear();
    if (state_.guards) state_.guards->close_all();
    state_.events.drain([](MoverEvent&&) {});
    for (auto& [ticket, job] : state_.saves) state_.report(job, 0, off);
    for (auto& [ticket, job] : state_.loads) report_failed(job, off);
    state_.saves.clear();
    state_.loads.clear();
    for (bool closing = false; !closing;) {
      state_.commands.drain([&](MoverCommand&& command) {
        closing = closing || std::holds_alternative<CloseMover>(command);
        if (const auto* const save = std::get_if<SaveJob>(&command)) {
          state_.report(*save, 0, off);
        } else if (auto* const load = std::get_if<LoadJob>(&command)) {
          report_failed(*load, off);
        }
      });
      pollfd wanted{state_.commands.fd(), POLLIN, 0};
      if (!closing) ::poll(&wanted, 1, -1);
    }
  }

  void report_failed(LoadJob& load, const Error& why) {
    load.error = why;
    load.in_doubt = true;
    state_.report(load);
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

namespace {

Result<void> validate(const MoverOptions& options) {
  PEGA_TRY(validate(options.link));
  if (options.rank >= options.ranks) {
    return fail(Errc::kInvalidArgument, "rank {} of {}", options.rank, options.ranks);
  }
  const std::uint32_t shards = options.shards.value_or(options.ranks);
  const std::uint32_t shard = options.shard.value_or(options.rank);
  const std::uint64_t own = std::max(1U, options.cells);
  if (shard >= shards || shards > options.ranks * own || shard % own != 0 || shards % own != 0) {
    return fail(Errc::kInvalidArgument, "shard {} of {} for rank {} of {} with {} cells", shard,
                shards, options.rank, options.ranks, options.cells);
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
  return {};
}

/// The guards of an engine with a direct group; none without one.
Result<std::unique_ptr<Guards>> make_guards(const MoverOptions& options, const KindTable& kinds) {
  const std::string& group = options.direct_group;
  if (group.empty()) return nullptr;
  if (group.size() > kMaxGroupBytes || printable(group) != group) {
    return fail(Errc::kInvalidArgument,
                "direct_group has {} bytes: 1 to {} printable characters are possible",
                group.size(), kMaxGroupBytes);
  }
  if (kinds.has_kinds() || options.cells != 0) {
    return fail(Errc::kInvalidArgument,
                "direct_group {} with {}: direct reads need one kind of blocks, without cells",
                group,
                kinds.has_kinds() ? fmt::format("{} kinds of blocks", kinds.size())
                                  : fmt::format("{} cells", options.cells));
  }
  const std::size_t segments = kinds.layouts().front().segments().size();
  if (segments > kMaxSegmentsOnWire) {
    return fail(Errc::kInvalidArgument,
                "direct_group {} for blocks of {} segments: {} are the limit", group, segments,
                kMaxSegmentsOnWire);
  }
  return Guards::create(static_cast<std::uint32_t>(std::min<std::size_t>(options.max_jobs, 65536)));
}

}  // namespace

Result<std::unique_ptr<Mover>> Mover::start(const Options& options, PageLayout layout,
                                            Device& device) {
  if (options.cells != 0) return start_cells(options, std::span(&layout, 1), device);
  return start(options, KindTable::plain(std::move(layout)), device);
}

Result<std::unique_ptr<Mover>> Mover::start_cells(const Options& options,
                                                  std::span<const PageLayout> cells,
                                                  Device& device) {
  if (cells.size() != options.cells) {
    return fail(Errc::kInvalidArgument, "{} layouts for {} cells", cells.size(), options.cells);
  }
  PEGA_TRY_LET(KindTable table,
               KindTable::of_cells(cells, options.verify != PageVerification::kOff));
  return start(options, std::move(table), device);
}

Result<std::unique_ptr<Mover>> Mover::start(const Options& options, const MoverKinds& kinds,
                                            Device& device) {
  if (options.cells != 0) {
    return fail(Errc::kInvalidArgument, "{} cells beside several kinds of blocks", options.cells);
  }
  PEGA_TRY_LET(KindTable table, KindTable::create(kinds));
  return start(options, std::move(table), device);
}

Result<std::unique_ptr<Mover>> Mover::start(const Options& options, KindTable kinds,
                                            Device& device) {
  PEGA_TRY(validate(options));
  Options own = options;
  if (own.numa_node < 0) own.numa_node = numa_node_of_process();
  PEGA_TRY_LET(auto guards, make_guards(options, kinds));
  auto impl = std::make_unique<Impl>(own, std::move(kinds), std::move(guards), device);
  PEGA_TRY(impl->start());
  return std::unique_ptr<Mover>(new Mover(std::move(impl)));
}

Mover::Mover(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Mover::~Mover() {
  // A child process does not have the thread: joining it, or destroying its mutexes, never returns.
  if (impl_->forked()) static_cast<void>(impl_.release());
}

Result<void> Mover::save(Id128 scheduler, std::uint64_t job, std::size_t kind,
                         std::span<const BlockKey> keys, std::span<const std::uint32_t> blocks,
                         Device::Event after, std::span<const std::uint8_t> depths, bool may_refuse,
                         std::optional<Device::Event> computed) {
  if (!depths.empty() && depths.size() != keys.size()) {
    return fail(Errc::kInvalidArgument, "{} depths for {} keys", depths.size(), keys.size());
  }
  SaveJob accepted;
  accepted.kind = kind;
  accepted.id = job;
  accepted.job = {scheduler, job};
  accepted.keys.assign(keys.begin(), keys.end());
  accepted.depths.assign(depths.begin(), depths.end());
  accepted.blocks.assign(blocks.begin(), blocks.end());
  accepted.may_refuse = may_refuse;
  accepted.after = after;
  accepted.computed = computed.value_or(after);
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
  accepted.parts.push_back(
      {.first = first, .count = blocks.size(), .blocks = {blocks.begin(), blocks.end()}});
  return impl_->accept(std::move(accepted));
}

Result<void> Mover::load(std::uint64_t load, const Id128& token, std::span<const LoadRange> ranges,
                         std::span<const KindRange> claimed,
                         const std::optional<LoadPace::Computing>& computing) {
  LoadJob accepted;
  accepted.computing = computing;
  accepted.id = load;
  accepted.token = token;
  if (ranges.empty()) return fail(Errc::kInvalidArgument, "a load without a range of blocks");
  for (const LoadRange& one : ranges) {
    const KindRange& range = one.range;
    const auto is_its_kind = [&](const auto& other) { return other.kind == range.kind; };
    const auto claim = std::find_if(claimed.begin(), claimed.end(), is_its_kind);
    if (claim == claimed.end() || range.first < claim->first || range.first > claim->end() ||
        range.count > claim->end() - range.first) {
      return fail(Errc::kInvalidArgument, "{} blocks of kind {} from {} on are not claimed ({})",
                  range.count, range.kind, range.first,
                  claim == claimed.end()
                      ? "none is"
                      : fmt::format("{} from {} on are", claim->count, claim->first));
    }
    if (std::any_of(accepted.parts.begin(), accepted.parts.end(), is_its_kind)) {
      return fail(Errc::kInvalidArgument, "a load has two ranges of kind {}", range.kind);
    }
    accepted.parts.push_back({.kind = range.kind,
                              .first = range.first - claim->first,
                              .count = range.count,
                              .blocks = {one.blocks.begin(), one.blocks.end()}});
  }
  return impl_->accept(std::move(accepted));
}

Result<void> Mover::load_following(std::uint64_t load, std::span<const BlockKey> keys,
                                   std::span<const std::uint32_t> blocks, Duration patience,
                                   const Id128& node) {
  if (impl_->state().options.direct_group.empty()) {
    return fail(Errc::kRefused, "load_following: the mover has no direct_group");
  }
  if (keys.empty() || patience < Duration::zero()) {
    return fail(Errc::kInvalidArgument, "load_following: {} keys and a patience of {} ns",
                keys.size(), patience.count());
  }
  LoadJob accepted;
  accepted.id = load;
  accepted.keys.assign(keys.begin(), keys.end());
  accepted.patience = patience;
  accepted.node = node;
  accepted.parts.push_back({.count = keys.size(), .blocks = {blocks.begin(), blocks.end()}});
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

std::vector<std::uint64_t> Mover::page_bytes() const {
  const KindTable& kinds = impl_->state().kinds;
  std::vector<std::uint64_t> bytes;
  for (std::size_t kind = 0; kind < kinds.size(); ++kind) bytes.push_back(kinds[kind].page_bytes);
  return bytes;
}

}  // namespace pegaflow
