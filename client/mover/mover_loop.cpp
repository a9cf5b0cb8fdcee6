#include "client/mover/mover_loop.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/os/thread.h"
#include "base/units.h"
#include "capnp/wire/carried_descriptor.h"
#include "capnp/wire/codec.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"mover"};

/// The target for the end of copies after a lost server; a longer time is logged.
constexpr Duration kSlowDetach = std::chrono::milliseconds(500);

/// How long a pool stays mapped without a server: longer than a restart takes, and shorter than a
/// server waits for the memory of another one.
constexpr kj::Duration kKeepMapping = 15 * kj::SECONDS;

/// Empty for one kind of full attention.
std::vector<RegisteredKind> registered_kinds(const KindTable& table) {
  // The two enumerations are one: see kinds.h.
  static_assert(static_cast<int>(BlockRule::kState) == static_cast<int>(wire::Kind::Rule::STATE) &&
                kMaxKinds == kMaxKindsOnWire);
  std::vector<RegisteredKind> kinds;
  for (std::size_t i = 0; table.has_kinds() && i < table.size(); ++i) {
    kinds.push_back({.rule = static_cast<wire::Kind::Rule>(table[i].rule),
                     .tokens = table[i].tokens,
                     .block_tokens = table[i].block_tokens,
                     .page_bytes = table[i].page_bytes});
  }
  return kinds;
}

ReadConsent consent_of(const MoverOptions& options) {
  if (options.direct_group.empty()) return {};
  return options.read_consent ? *options.read_consent : kernel_read_consent();
}

}  // namespace

struct MoverLoop::Registered {
  wire::Pool::Client pool;
  std::uint64_t pool_bytes = 0;
  std::string namespace_hash;
  Id128 kept_pool;

  static Result<Registered> read(capnp::Response<wire::Session::RegisterResults>& answer) {
    if (!answer.hasPool()) return tl::unexpected<Error>(read_error(answer.getRefused()));
    const capnp::Text::Reader hash = answer.getNamespace();
    return Registered{answer.getPool(), answer.getPoolBytes(),
                      std::string(hash.begin(), hash.size()),
                      answer.hasKeptPool() ? read_id(answer.getKeptPool()) : Id128{}};
  }
};

MoverLoop::MoverLoop(kj::AsyncIoContext& io, MoverState& state, const Link::Identity& identity)
    : state_(state),
      event_port_(io.unixEventPort),
      link_(io, state.options.link, identity, state.board, *this),
      cleanup_(link_, tasks_, state.options.link.open_deadline),
      saves_(state, link_, tasks_, cleanup_, [this] { end_if_quiet(); }),
      loads_(state, link_, tasks_, cleanup_, [this] { end_if_quiet(); }),
      consent_(link_, consent_of(state.options), state.options.link.connect_deadline),
      commands_(
          io.unixEventPort, state.commands.fd(),
          [this] {
            state_.commands.drain([this](MoverCommand&& command) { handle(std::move(command)); });
          }),
      events_(io.unixEventPort, state.events.fd(), [this] {
        state_.events.drain([this](MoverEvent&& event) { handle(std::move(event)); });
      }) {
  state_.sources.watch_with([this](int process) { return watch_source(process); });
}

MoverLoop::~MoverLoop() noexcept(false) {
  state_.sources.watch_with(nullptr);
  if (helper_.joinable()) helper_.join();
}

kj::Promise<void> MoverLoop::run() {
  return link_.run()
      .then([this] { return unmap_kept(); })
      .exclusiveJoin(commands_.run())
      .exclusiveJoin(events_.run())
      .exclusiveJoin(tasks_.failure());
}

// ---- the link's role

kj::Promise<Result<void>> MoverLoop::begin() {
  PEGA_ASSERT(pool_ != Pool::kMapping && pool_ != Pool::kMapped && !ending_,
              "a pool is mapped already");
  return register_rank();
}

Result<void> MoverLoop::may_register() const {
  if (state_.options.cells != 0 && !link_.server_has(kFeatureCells)) {
    return fail(Errc::kRefused,
                "the server ({}) does not support blocks that engines of other tensor-parallel "
                "sizes share: upgrade the server",
                state_.board.get().server_build);
  }
  if (!state_.kinds.has_kinds() || link_.server_has(kFeatureKinds)) return {};
  return fail(Errc::kRefused,
              "the server ({}) does not support several kinds of blocks, which this model has: "
              "upgrade the server",
              state_.board.get().server_build);
}

Registration MoverLoop::registration(std::optional<OfferedMemory> offered) const {
  const MoverOptions& options = state_.options;
  const KindTable& kinds = state_.kinds;
  Registration made{.instance = options.link.instance,
                    .rank = options.rank,
                    .ranks = options.ranks,
                    .shard = options.shard.value_or(options.rank),
                    .shards = options.shards.value_or(options.ranks),
                    .node = options.numa_node,
                    .factors = options.factors,
                    .page_bytes = kinds.has_kinds() ? 0 : kinds[0].page_bytes,
                    .block_count = kinds.block_count(),
                    .kinds = registered_kinds(kinds),
                    .unit_tokens = kinds.unit_tokens(),
                    .alignment_tokens = kinds.alignment_tokens(),
                    .cells = options.cells,
                    .direct = std::move(offered)};
  // No checksum is compared of what a network card reads.
  made.reads_pools = made.direct && made.direct->network && link_.server_has(kFeaturePools) &&
                     options.verify == PageVerification::kOff;
  made.reads_pools_slowly = !options.is_network_fast;
  return made;
}

void MoverLoop::log_unsupported(std::string_view what) const {
  kLog.info(
      "the server does not support direct reads{}, blocks are loaded once they are saved "
      "instance={} server=\"{}\"",
      what, state_.options.link.instance, state_.board.get().server_build);
}

std::optional<PeerMemory> MoverLoop::shared() const {
  if (state_.guards == nullptr) return std::nullopt;
  const std::string& instance = state_.options.link.instance;
  if (!link_.server_has(kFeatureDirect)) {
    log_unsupported("");
    return std::nullopt;
  }
  Result<PeerMemory> shared =
      state_.device.share(state_.kinds.layouts().front(), state_.guards->bytes());
  if (shared && shared->mapped && !state_.options.has_fixed_memory) {
    shared = fail(Errc::kRefused,
                  "its allocator may put other memory at the same addresses while the engine runs, "
                  "which others would not see");
  }
  if (shared && shared->mapped && !shares_ranges_) {
    shared = fail(Errc::kRefused, "its registration with the server has failed before");
  }
  if (shared && shared->mapped && !link_.server_has(kFeatureRanges)) {
    log_unsupported(" of memory that consists of several allocations");
    return std::nullopt;
  }
  if (shared && shared->is_on_gpu() && !link_.server_has(kFeaturePending)) {
    log_unsupported(" between GPUs");
    return std::nullopt;
  }
  if (shared) return std::move(*shared);
  kLog.warn(
      "engines of the direct group cannot read this one's memory, nor does it read theirs: blocks "
      "are loaded once they are saved instance={} error=\"{}\"",
      instance, to_string(shared.error()));
  return std::nullopt;
}

OfferedMemory MoverLoop::offered_memory(const PeerMemory& shared) const {
  OfferedMemory memory{.group = state_.options.direct_group,
                       .blocks = shared.block_count,
                       .segments = {},
                       .guards = state_.guards->count()};
  if (!shared.is_on_gpu() && link_.server_has(kFeatureConsent)) {
    memory.needs_consent = consent_.is_needed();
    memory.reads_without_consent = consent_.reads_without();
  }
  for (std::size_t i = 0; i < shared.segments.size(); ++i) {
    const Segment& segment = shared.segments[i];
    OfferedMemory::Segment& offered =
        memory.segments.emplace_back(reinterpret_cast<std::uintptr_t>(segment.base),
                                     segment.block_stride_bytes, segment.size_bytes);
    if (!shared.handles.empty()) offered.handle = shared.handles[i];
    if (shared.mapped) offered.range = shared.mapped->range_of[i];
    if (!shared.network) continue;
    offered.region = shared.network->segments[i].region;
    offered.offset = shared.network->segments[i].offset;
  }
  if (shared.mapped) memory.ranges = shared.mapped->ranges;
  if (shared.network) {
    memory.network.emplace(OfferedMemory::Network{
        .fabric = shared.network->fabric, .guards = shared.network->guards.value_or(RegionId{})});
  }
  return memory;
}

kj::Promise<Result<void>> MoverLoop::register_rank() {
  if (Result<void> may = may_register(); !may) return may;
  auto request = link_.session().registerRequest();
  const std::optional<PeerMemory> memory = shared();
  const Registration sent =
      registration(memory ? std::optional(offered_memory(*memory)) : std::nullopt);
  state_.reads_pools = sent.reads_pools;
  write_registration(sent, request);
  if (memory) {
    auto direct = request.getDirect();
    direct.setGuards(kj::heap<CarriedDescriptor<wire::Guards>>(state_.guards->fd()));
    if (memory->mapped) {
      // The server keeps a duplicate; here it ends with the call.
      const std::shared_ptr<const UniqueFd>& box = memory->mapped->descriptors;
      direct.setExported(kj::heap<CarriedDescriptor<wire::Exported>>(box->get(), box));
    }
  }
  return link_
      .call(kj::mv(request), state_.options.link.connect_deadline, "register",
            [](auto& answer) { return Registered::read(answer); })
      .then([this, is_direct = sent.direct.has_value(), has_ranges = memory && memory->mapped,
             needs_consent = sent.direct && sent.direct->needs_consent](
                Result<Registered>&& registered) -> kj::Promise<Result<void>> {
        // The kernel may refuse the message with the descriptors, which ends the connection.
        if (!registered && has_ranges) shares_ranges_ = false;
        if (!registered && registered.error().code == Errc::kBusy) {
          // Too much memory waits for processes to end: registers again on this connection.
          link_.waits_for(to_string(registered.error()));
          return link_.timer()
              .afterDelay(state_.options.link.reconnect_interval.count() * kj::NANOSECONDS)
              .then([this] { return register_rank(); });
        }
        if (!registered) return Result<void>(tl::unexpected<Error>(registered.error()));
        state_.pool_bytes = registered->pool_bytes;
        if (state_.kinds.largest_page() > state_.pool_bytes) {
          return Result<void>(fail(Errc::kRefused, "pages of {} bytes in a pool of {}",
                                   state_.kinds.largest_page(), state_.pool_bytes));
        }
        state_.may_follow = state_.guards != nullptr && link_.server_has(kFeatureDirect);
        state_.is_direct = is_direct;
        if (needs_consent) consent_.begin();
        state_.board.set_namespace(std::move(registered->namespace_hash));
        return on_registered(kj::mv(*registered));
      });
}

kj::Promise<Result<void>> MoverLoop::on_registered(Registered&& registered) {
  wire::Pool::Client pool = kj::mv(registered.pool);
  kj::Promise<kj::Maybe<int>> sent = pool.getFd();
  return sent
      .then(
          // The descriptor is closed with the capability, which therefore lives until here.
          [pool = kj::mv(pool)](kj::Maybe<int> fd) {
            KJ_IF_MAYBE (number, fd) {
              return ::fcntl(*number, F_DUPFD_CLOEXEC, 0);
            }
            return -1;
          },
          [](kj::Exception&&) { return -1; })
      .then([this, kept_pool = registered.kept_pool](int fd) -> kj::Promise<Result<void>> {
        UniqueFd sent_fd(fd);
        if (!sent_fd) {
          return Result<void>(fail(Errc::kRefused, "the server sent no descriptor of its pool"));
        }
        // A helper that unmaps another pool closes `pool_fd_` at its end.
        if (pool_ == Pool::kUnmapped || (pool_ == Pool::kKept && kept_pool == kept_pool_)) {
          pool_fd_ = std::move(sent_fd);
          return use_pool(kept_pool);
        }
        return unmap_kept().then([this, kept_pool, sent_fd = std::move(sent_fd)]() mutable {
          pool_fd_ = std::move(sent_fd);
          return use_pool(kept_pool);
        });
      });
}

kj::Promise<Result<void>> MoverLoop::use_pool(const Id128& kept_pool) {
  kept_pool_ = kept_pool;
  if (pool_ != Pool::kKept) return map_pool();
  pool_ = Pool::kMapped;
  pool_fd_.reset();
  kLog.info("the server has the pool that is mapped already instance={}",
            state_.options.link.instance);
  describe_device();
  return Result<void>();
}

void MoverLoop::describe_device() {
  const auto& describe = state_.options.describe_device;
  tasks_.add(link_.describe(describe ? describe() : DeviceReport()));
}

std::shared_ptr<void> MoverLoop::watch_source(int process) {
  // The observer goes before its descriptor.
  struct Watched {
    Watched(kj::UnixEventPort& port, UniqueFd fd)
        : process(std::move(fd)),
          observer(port, process.get(), kj::UnixEventPort::FdObserver::OBSERVE_READ) {}
    UniqueFd process;
    kj::UnixEventPort::FdObserver observer;
    kj::Promise<void> end = kj::NEVER_DONE;
  };
  UniqueFd own(::fcntl(process, F_DUPFD_CLOEXEC, 0));
  if (!own) return nullptr;  // The next openNext finds its end.
  auto watched = std::make_shared<Watched>(event_port_, std::move(own));
  watched->end = watched->observer.whenBecomesReadable()
                     .then([this] {
                       // Later, since this promise ends with the source.
                       tasks_.add(kj::evalLater([this] { state_.sources.forget_ended(); }));
                     })
                     .eagerlyEvaluate(nullptr);
  return watched;
}

kj::Promise<Result<void>> MoverLoop::map_pool() {
  auto done = kj::newPromiseAndFulfiller<Result<void>>();
  on_mapped_ = kj::mv(done.fulfiller);
  pool_ = Pool::kMapping;
  start_helper([this] {
    Result<PoolMapping> mapping = PoolMapping::map(pool_fd_.get(), state_.pool_bytes);
    mapped_ = mapping
                  ? state_.device.attach(
                        state_.kinds.layouts(), mapping->bytes(),
                        [&events = state_.events](Device::Completion&& completion) {
                          MoverEvent event{MoverEvent::Kind::kCompletion, std::move(completion)};
                          // There is a place for each accepted batch. A rejected event is not
                          // moved from. NOLINTNEXTLINE(bugprone-use-after-move)
                          while (!events.try_send(std::move(event))) {
                            std::this_thread::yield();
                          }
                        })
                  : Result<void>(tl::unexpected<Error>(mapping.error()));
    if (!mapped_) return;
    state_.mapping = std::move(*mapping);
    state_.mapping.populate();  // In the background: jobs are copied meanwhile.
  });
  return kj::mv(done.promise);
}

void MoverLoop::start_helper(std::function<void()> work) {
  PEGA_ASSERT(!helper_.joinable(), "two helpers at the same time");
  const auto body = [&events = state_.events, work = std::move(work)] {
    work();
    while (!events.try_send(MoverEvent{})) std::this_thread::yield();
  };
  Result<std::thread> thread = start_thread("pega-pool", body);
  if (thread) {
    helper_ = std::move(*thread);
  } else {
    body();  // On this thread instead.
  }
}

void MoverLoop::on_helper_done() {
  if (helper_.joinable()) helper_.join();
  pool_fd_.reset();
  if (pool_ == Pool::kMapping) {
    pool_ = mapped_ ? Pool::kMapped : Pool::kUnmapped;
    if (mapped_ && !ending_ && link_.is_connected()) describe_device();
    on_mapped_->fulfill(kj::mv(mapped_));  // A dropped promise is no error: end() was called.
    if (ending_) unmap_pool();
  } else {
    PEGA_ASSERT(pool_ == Pool::kUnmapping, "the helper ended without a task");
    pool_ = Pool::kUnmapped;
    const Duration took = state_.clock.now() - unmapping_since_;
    if (took > kSlowDetach) {
      kLog.warn("the last copies after a lost connection were slow took=\"{}\"",
                format_duration(took));
    }
    for (auto& waiter : std::exchange(on_unmapped_, {})) waiter->fulfill();
  }
  end_if_quiet();
}

void MoverLoop::unmap_pool() {
  if (pool_ != Pool::kMapped && pool_ != Pool::kKept) return;
  pool_ = Pool::kUnmapping;
  unmapping_since_ = state_.clock.now();
  start_helper([this] {
    state_.device.detach();
    state_.mapping = PoolMapping();
  });
}

kj::Promise<void> MoverLoop::unmap_kept() {
  unmap_pool();
  if (pool_ != Pool::kUnmapping) return kj::READY_NOW;
  auto done = kj::newPromiseAndFulfiller<void>();
  on_unmapped_.push_back(kj::mv(done.fulfiller));
  return kj::mv(done.promise);
}

void MoverLoop::unmap_when_late() {
  tasks_.add(link_.timer().afterDelay(kKeepMapping).then([this, time = ++times_kept_] {
    if (pool_ == Pool::kKept && time == times_kept_) unmap_pool();
  }));
}

kj::Promise<void> MoverLoop::end() {
  auto done = kj::newPromiseAndFulfiller<void>();
  on_end_ = kj::mv(done.fulfiller);
  ending_ = true;
  const bool lost = !link_.is_connected();
  state_.may_follow = false;
  state_.is_direct = false;
  // Else behind the saves, which wait for the readers of their blocks.
  if (lost) consent_.end();
  saves_.end(lost);
  loads_.end(lost);
  if (!lost || kept_pool_.is_none()) unmap_pool();
  end_if_quiet();
  return kj::mv(done.promise);
}

void MoverLoop::end_if_quiet() {
  if (!ending_ || state_.has_jobs()) return;
  if (pool_ == Pool::kMapped && state_.batches.empty()) {
    pool_ = Pool::kKept;
    unmap_when_late();
  }
  if (pool_ != Pool::kUnmapped && pool_ != Pool::kKept) return;
  state_.sources.clear();
  state_.pools.clear();
  consent_.end();
  ending_ = false;
  on_end_->fulfill();
}

// ---- jobs

void MoverLoop::handle(MoverCommand&& command) {
  if (std::holds_alternative<CloseMover>(command)) return link_.close();
  if (const auto* const cancelled = std::get_if<CancelLoad>(&command)) {
    return loads_.cancel(cancelled->load);
  }
  Result<void> may = ending_ ? Result<void>(fail(Errc::kPeerLost, "no server")) : link_.may_ask();
  std::optional<Error> refusal;
  if (!may) refusal = std::move(may.error());
  if (auto* const save = std::get_if<SaveJob>(&command)) {
    return saves_.begin(std::move(*save), std::move(refusal));
  }
  loads_.begin(std::move(std::get<LoadJob>(command)), std::move(refusal));
}

void MoverLoop::handle(MoverEvent&& event) {
  if (event.kind == MoverEvent::Kind::kHelperDone) return on_helper_done();
  const auto batch = state_.batches.extract(event.completion.ticket);
  PEGA_ASSERT(!batch.empty(), "the device completed batch {}, which is not in flight",
              event.completion.ticket);
  const BatchOwner owner = batch.mapped();
  if (owner.direction == Device::Direction::kSave) {
    saves_.on_copied(owner, std::move(event.completion));
  } else {
    loads_.on_copied(owner, std::move(event.completion));
  }
  end_if_quiet();
}

}  // namespace pegaflow
