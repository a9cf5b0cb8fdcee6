#include "client/mover/mover_loop.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/os/thread.h"
#include "base/units.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/room_time.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"mover"};

/// What the server writes for a key that is to be skipped.
constexpr std::uint32_t kNoFrame = 0xFFFFFFFF;

/// The target for the end of copies after a lost server; longer is worth a line.
constexpr Duration kSlowDetach = std::chrono::milliseconds(500);

/// How much longer than computing a copy may take: what a stuck source may add.
constexpr Duration kCutAfter = std::chrono::milliseconds(20);

/// Between two lines about wrong pages: memory that goes bad gives many.
constexpr Duration kCorruptLineInterval = std::chrono::seconds(10);

struct Registered {
  wire::Pool::Client pool;
  std::uint64_t pool_bytes = 0;
  std::string namespace_hash;
};

Result<Registered> read_registered(capnp::Response<wire::Session::RegisterResults>& answer) {
  if (!answer.hasPool()) return tl::unexpected<Error>(read_error(answer.getRefused()));
  const capnp::Text::Reader hash = answer.getNamespace();
  return Registered{answer.getPool(), answer.getPoolBytes(),
                    std::string(hash.begin(), hash.size())};
}

std::uint32_t to_micros(Duration time) {
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(time).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(micros, 1, kWorthForever - 1));
}

std::optional<LoadPace::Cut> read_late(wire::Late late) {
  switch (late) {
    case wire::Late::NO:
      break;
    case wire::Late::STUCK:
      return LoadPace::Cut::kStuck;
    case wire::Late::SLOW:
      return LoadPace::Cut::kSlow;
  }
  return std::nullopt;
}

template <typename Answer>
Result<std::vector<std::uint32_t>> read_slots(Answer& answer) {
  if (answer.hasError()) return tl::unexpected<Error>(read_error(answer.getError()));
  const auto slots = answer.getSlots();
  std::vector<std::uint32_t> copied;
  copied.reserve(slots.size());
  for (const std::uint32_t slot : slots) copied.push_back(slot);
  return copied;
}

}  // namespace

MoverLoop::MoverLoop(kj::AsyncIoContext& io, MoverState& state, const Link::Identity& identity)
    : state_(state),
      link_(io, state.options.link, identity, state.board, *this),
      commands_(
          io.unixEventPort, state.commands.fd(),
          [this] {
            state_.commands.drain([this](MoverCommand&& command) { handle(std::move(command)); });
          }),
      events_(io.unixEventPort, state.events.fd(), [this] {
        state_.events.drain([this](MoverEvent&& event) { handle(std::move(event)); });
      }) {}

MoverLoop::~MoverLoop() noexcept(false) {
  if (helper_.joinable()) helper_.join();
}

kj::Promise<void> MoverLoop::run() {
  return link_.run()
      .exclusiveJoin(commands_.run())
      .exclusiveJoin(events_.run())
      .exclusiveJoin(tasks_.failure());
}

// ---- the link's role

kj::Promise<Result<void>> MoverLoop::begin() {
  PEGA_ASSERT(pool_ == Pool::kUnmapped && !ending_, "a pool is mapped already");
  return ask_to_register();
}

kj::Promise<Result<void>> MoverLoop::ask_to_register() {
  auto request = link_.session().registerRequest();
  const Mover::Options& options = state_.options;
  write_registration({.instance = options.link.instance,
                      .rank = options.rank,
                      .ranks = options.ranks,
                      .shard = options.shard.value_or(options.rank),
                      .shards = options.shards.value_or(options.ranks),
                      .node = options.numa_node,
                      .factors = options.factors,
                      .page_bytes = state_.layout.page_bytes(),
                      .block_count = state_.layout.block_count()},
                     request);
  return link_
      .call(kj::mv(request), options.link.connect_deadline, "register",
            [](auto& answer) { return read_registered(answer); })
      .then([this](Result<Registered>&& registered) -> kj::Promise<Result<void>> {
        if (!registered && registered.error().code == Errc::kBusy) {
          // Too much waits for processes to end: we ask again under this connection.
          link_.waits_for(to_string(registered.error()));
          return link_.timer()
              .afterDelay(state_.options.link.reconnect_interval.count() * kj::NANOSECONDS)
              .then([this] { return ask_to_register(); });
        }
        if (!registered) return Result<void>(tl::unexpected<Error>(registered.error()));
        pool_bytes_ = registered->pool_bytes;
        if (state_.layout.page_bytes() > pool_bytes_) {
          return Result<void>(fail(Errc::kRefused, "pages of {} bytes in a pool of {}",
                                   state_.layout.page_bytes(), pool_bytes_));
        }
        state_.board.set_namespace(std::move(registered->namespace_hash));
        return on_registered(kj::mv(registered->pool));
      });
}

kj::Promise<Result<void>> MoverLoop::on_registered(wire::Pool::Client&& pool) {
  kj::Promise<kj::Maybe<int>> sent = pool.getFd();
  return sent
      .then(
          // The descriptor is closed with the capability, so that is kept until here.
          [pool = kj::mv(pool)](kj::Maybe<int> fd) {
            KJ_IF_MAYBE (number, fd) {
              return ::fcntl(*number, F_DUPFD_CLOEXEC, 0);
            }
            return -1;
          },
          [](kj::Exception&&) { return -1; })
      .then([this](int fd) -> kj::Promise<Result<void>> {
        pool_fd_ = UniqueFd(fd);
        if (!pool_fd_) {
          return Result<void>(fail(Errc::kRefused, "the server sent no descriptor of its pool"));
        }
        return map_pool();
      });
}

kj::Promise<Result<void>> MoverLoop::map_pool() {
  auto done = kj::newPromiseAndFulfiller<Result<void>>();
  on_mapped_ = kj::mv(done.fulfiller);
  pool_ = Pool::kMapping;
  start_helper([this] {
    Result<PoolMapping> mapping = PoolMapping::map(pool_fd_.get(), pool_bytes_);
    mapped_ = mapping
                  ? state_.device.attach(
                        state_.layout, mapping->bytes(),
                        [&events = state_.events](Device::Completion&& completion) {
                          MoverEvent event{MoverEvent::Kind::kCompletion, std::move(completion)};
                          // There is a place for each accepted batch. What is not sent is not
                          // moved from. NOLINTNEXTLINE(bugprone-use-after-move)
                          while (!events.try_send(std::move(event))) {
                            std::this_thread::yield();
                          }
                        })
                  : Result<void>(tl::unexpected<Error>(mapping.error()));
    if (!mapped_) return;
    state_.mapping = std::move(*mapping);
    state_.mapping.populate();  // Not waited for: jobs that come meanwhile are copied.
  });
  return kj::mv(done.promise);
}

void MoverLoop::start_helper(std::function<void()> work) {
  PEGA_ASSERT(!helper_.joinable(), "two helpers at once");
  const auto body = [&events = state_.events, work = std::move(work)] {
    work();
    while (!events.try_send(MoverEvent{})) std::this_thread::yield();
  };
  Result<std::thread> thread = start_thread("pega-pool", body);
  if (thread) {
    helper_ = std::move(*thread);
  } else {
    body();  // Then this thread has to wait for it.
  }
}

void MoverLoop::on_helper_done() {
  if (helper_.joinable()) helper_.join();
  pool_fd_.reset();
  if (pool_ == Pool::kMapping) {
    pool_ = mapped_ ? Pool::kMapped : Pool::kUnmapped;
    if (mapped_ && !ending_ && link_.is_connected()) {
      const auto& describe = state_.options.describe_device;
      tasks_.add(link_.describe(describe ? describe() : DeviceReport()));
    }
    on_mapped_->fulfill(kj::mv(mapped_));  // A caller that left is no error: end() was called.
    if (ending_) unmap_pool();
  } else {
    PEGA_ASSERT(pool_ == Pool::kUnmapping, "nobody asked the helper");
    pool_ = Pool::kUnmapped;
    const Duration took = state_.clock.now() - unmapping_since_;
    if (took > kSlowDetach) {
      kLog.warn("copies of the last connection took long to end took=\"{}\"",
                format_duration(took));
    }
  }
  end_if_quiet();
}

void MoverLoop::unmap_pool() {
  if (pool_ != Pool::kMapped) return;
  pool_ = Pool::kUnmapping;
  unmapping_since_ = state_.clock.now();
  start_helper([this] {
    state_.device.detach();
    state_.mapping = PoolMapping();
  });
}

kj::Promise<void> MoverLoop::end() {
  auto done = kj::newPromiseAndFulfiller<void>();
  on_end_ = kj::mv(done.fulfiller);
  ending_ = true;
  const bool lost = !link_.is_connected();
  std::vector<std::uint64_t> unanswered;
  for (auto& [ticket, job] : state_.jobs) {
    job.connection_lost = lost;
    if (job.phase == Phase::kAsking || (lost && job.phase == Phase::kSettling)) {
      unanswered.push_back(ticket);
    }
  }
  for (const std::uint64_t ticket : unanswered) {
    const MoverJob& job = state_.jobs.at(ticket);
    if (!lost) job.kind == Kind::kSave ? abandon(job.job) : release(job.pin);
    finish(ticket, 0, job.phase == Phase::kSettling ? job.copies : 0,
           lost ? Error{Errc::kPeerLost, "the server went away"}
                : Error{Errc::kCancelled, "the mover is closed"});
  }
  unmap_pool();
  end_if_quiet();
  return kj::mv(done.promise);
}

void MoverLoop::end_if_quiet() {
  if (!ending_ || pool_ != Pool::kUnmapped || !state_.jobs.empty()) return;
  ending_ = false;
  on_end_->fulfill();
}

// ---- the way of a job

void MoverLoop::handle(MoverCommand&& command) {
  switch (command.kind) {
    case MoverCommand::Kind::kClose:
      return link_.close();
    case MoverCommand::Kind::kCancelLoad:
      return cancel_load(command.load);
    case MoverCommand::Kind::kJob:
      break;
  }
  const std::uint64_t ticket = ++state_.last_ticket;
  const Kind kind = command.job.kind;
  command.job.pin = ticket;
  state_.jobs.emplace(ticket, std::move(command.job));
  Result<void> may = ending_ ? Result<void>(fail(Errc::kPeerLost, "no server")) : link_.may_ask();
  if (!may) return finish(ticket, 0, 0, std::move(may.error()));
  if (kind == Kind::kSave && !state_.options.saves) {
    // Another rank saves these bytes; whether it could is told by its report.
    MoverJob& job = state_.jobs.at(ticket);
    job.skipped = job.blocks.size();
    return finish(ticket, 0, 0, std::nullopt);
  }
  kind == Kind::kSave ? begin_save(ticket) : begin_load(ticket);
}

void MoverLoop::handle(MoverEvent&& event) {
  if (event.kind == MoverEvent::Kind::kHelperDone) return on_helper_done();
  on_copied(event.completion);
}

void MoverLoop::begin_save(std::uint64_t ticket) {
  const MoverJob& job = state_.jobs.at(ticket);
  using Answer = Result<Granted>;
  auto request = link_.session().reserveRequest(
      capnp::MessageSize{keys_words(job.keys.size(), BlockKey::kMaxBytes) + 32, 0});
  write_job(job.job, request.initJob());
  write_keys(job.keys, BlockKey::kMaxBytes, request.initKeys());
  const Duration deadline = state_.options.link.reserve_deadline +
                            time_to_make_room(job.keys.size() * state_.layout.page_bytes());
  tasks_.add(link_
                 .call(kj::mv(request), deadline, "reserve",
                       [](auto& answer) -> Answer {
                         PEGA_TRY_LET(auto slots, read_slots(answer));
                         return Granted{.slots = std::move(slots), .checksums = {}};
                       })
                 .then([this, ticket](Answer&& granted) { on_slots(ticket, std::move(granted)); }));
}

void MoverLoop::begin_load(std::uint64_t ticket) {
  MoverJob& job = state_.jobs.at(ticket);
  using Answer = Result<Granted>;
  auto request = link_.session().openRequest();
  write_id(job.token, request.initToken());
  request.setFirst(static_cast<std::uint32_t>(job.first + job.done));
  request.setCount(static_cast<std::uint32_t>(job.blocks.size() - job.done));
  request.setPin(job.pin);
  Duration patience = Duration::zero();
  job.worth_until.reset();
  if (job.coming_until) {
    const TimePoint now = state_.clock.now();
    patience = std::max(Duration::zero(), *job.coming_until - now);
    if (const auto worth = job.pace.worth(job.blocks.size() - job.done, now)) {
      job.worth_until = now + *worth;
      patience = std::min(patience, *worth + LoadPace::kSlack);
      request.setWorthMicros(to_micros(*worth));
      request.setComputeMicros(to_micros(job.pace.once_begun(job.blocks.size() - job.done)));
    } else if (job.pace.is_judged()) {
      request.setWorthMicros(kWorthForever);
    }
    request.setPatienceMs(
        static_cast<std::uint32_t>(std::chrono::ceil<std::chrono::milliseconds>(patience).count()));
  }
  tasks_.add(link_
                 .call(kj::mv(request), patience + state_.options.link.open_deadline, "open",
                       [](auto& answer) -> Answer {
                         PEGA_TRY_LET(auto slots, read_slots(answer));
                         PEGA_TRY_LET(auto checksums,
                                      read_numbers<std::uint64_t>(answer.getChecksums()));
                         return Granted{.slots = std::move(slots),
                                        .checksums = std::move(checksums),
                                        .coming = answer.getComing(),
                                        .late = read_late(answer.getLate())};
                       })
                 .then([this, ticket](Answer&& granted) { on_slots(ticket, std::move(granted)); }));
}

bool MoverLoop::takes_checksum() {
  switch (state_.options.verify) {
    case Mover::Verify::kOff:
      return false;
    case Mover::Verify::kSample:
      return chance_() % state_.options.sample_one_in == 0;
    case Mover::Verify::kAll:
      return true;
  }
  return false;
}

void MoverLoop::on_slots(std::uint64_t ticket, Result<Granted>&& granted) {
  const auto found = state_.jobs.find(ticket);
  if (found == state_.jobs.end()) return;  // It ended with its connection.
  MoverJob& job = found->second;
  PEGA_ASSERT(job.phase == Phase::kAsking, "job {} was given slots twice", ticket);
  const bool is_save = job.kind == Kind::kSave;
  const auto give_back = [&] { is_save ? abandon(job.job) : release(job.pin); };

  if (!granted) {
    // Past its deadline the call may still be carried out: what it gives then is given back by the
    // call that is sent behind it.
    if (granted.error().code == Errc::kTimeout) give_back();
    if (job.gave_up) granted.error() = std::move(*job.gave_up);
    return finish(ticket, job.done, job.copied, std::move(granted.error()));
  }
  if (job.gave_up) {
    give_back();
    return finish(ticket, job.done, job.copied, std::move(job.gave_up));
  }
  const std::uint64_t last_begin = pool_bytes_ - state_.layout.page_bytes();
  const std::vector<std::uint32_t>& slots = granted->slots;
  if (!is_save && state_.options.verify != Mover::Verify::kOff) {
    job.checksums = std::move(granted->checksums);
  }
  const std::size_t asked = job.blocks.size() - job.done;
  bool sane = (slots.size() == asked || (!is_save && slots.size() < asked && granted->coming != 0 &&
                                         granted->coming <= asked - slots.size())) &&
              (job.checksums.empty() || job.checksums.size() == slots.size());
  std::vector<Device::Copy> copies;
  copies.reserve(slots.size());
  for (std::size_t i = 0; sane && i < slots.size(); ++i) {
    const std::uint32_t slot = slots[i];
    if (is_save && slot == kNoFrame) continue;
    const std::uint64_t offset = slot * kSlotAlignment;
    sane = offset <= last_begin;
    const bool checksum =
        is_save ? takes_checksum() : !job.checksums.empty() && job.checksums[i] != kNoChecksum;
    copies.push_back({job.blocks[job.done + i], offset, checksum});
  }
  if (!sane) {
    Error error{Errc::kInternal, fmt::format("{} slots for {} blocks, or one beyond the pool",
                                             slots.size(), job.blocks.size())};
    link_.drop(error);
    return finish(ticket, 0, 0, std::move(error));
  }
  if (!is_save) {
    job.coming = granted->coming;
    if (job.coming != 0 && !job.coming_until) {
      job.coming_until = state_.clock.now() + state_.options.coming_patience;
    }
    if (slots.empty()) return wait_for_coming(ticket, job, granted->coming, granted->late);
    return submit(ticket, job, std::move(copies));
  }
  job.skipped = job.blocks.size() - copies.size();
  if (copies.empty()) {
    // The job's other ranks wait for the end of this one.
    if (is_save && state_.options.shards.value_or(state_.options.ranks) > 1)
      publish_nothing(job.job);
    return finish(ticket, 0, 0, std::nullopt);
  }
  submit(ticket, job, std::move(copies));
}

void MoverLoop::wait_for_coming(std::uint64_t ticket, MoverJob& job, std::size_t coming,
                                const std::optional<LoadPace::Cut>& late) {
  // The server kept the question until something came, or as long as waiting was of use.
  if (late) return cut(ticket, job, *late);
  const TimePoint now = state_.clock.now();
  // An older server does not judge.
  if (job.worth_until && now >= *job.worth_until) return cut(ticket, job, LoadPace::Cut::kSlow);
  if (now < *job.coming_until) return begin_load(ticket);
  finish(
      ticket, job.done, job.copied,
      Error{Errc::kTimeout, fmt::format("{} blocks did not come from another node within {}",
                                        coming, format_duration(state_.options.coming_patience))});
}

void MoverLoop::cut(std::uint64_t ticket, MoverJob& job, LoadPace::Cut why) {
  job.cut = why;
  finish(ticket, job.done, job.copied,
         Error{Errc::kTimeout, fmt::format("{} of {} blocks are computed sooner than they arrive",
                                           job.blocks.size() - job.done, job.blocks.size())});
}

void MoverLoop::submit(std::uint64_t ticket, MoverJob& job, std::vector<Device::Copy>&& copies) {
  const bool is_save = job.kind == Kind::kSave;
  job.copies = copies.size();
  job.phase = Phase::kCopying;
  job.submitted = state_.clock.now();
  // Before the device has it, for the engine may ask at once.
  if (!is_save) note_copying(ticket, job, copies);
  Result<void> accepted =
      state_.device.submit({ticket, is_save ? Device::Direction::kSave : Device::Direction::kLoad,
                            job.after, std::move(copies)});
  if (!accepted) {
    no_longer_copying(ticket);
    is_save ? abandon(job.job) : release(job.pin);
    return finish(ticket, job.done, job.copied, std::move(accepted.error()));
  }
  if (!is_save) start_load_deadline(ticket, job);
}

void MoverLoop::note_copying(std::uint64_t ticket, const MoverJob& job,
                             std::span<const Device::Copy> copies) {
  // Before its last piece nothing is whole; and what is compared is compared when it is there.
  const bool compared = std::any_of(copies.begin(), copies.end(),
                                    [](const Device::Copy& copy) { return copy.checksum; });
  if (job.done + job.copies != job.blocks.size() || compared) return;
  const std::lock_guard lock(state_.copying_mutex);
  state_.copying.push_back({ticket,
                            {.load = job.id,
                             .blocks = job.blocks.size(),
                             .bytes = (job.copied + job.copies) * state_.layout.page_bytes()},
                            job.accepted});
}

bool MoverLoop::no_longer_copying(std::uint64_t ticket) {
  const std::lock_guard lock(state_.copying_mutex);
  const auto load = std::find_if(state_.copying.begin(), state_.copying.end(),
                                 [&](const CopyingLoad& one) { return one.ticket == ticket; });
  if (load == state_.copying.end()) return false;
  const bool followed = load->followed;
  state_.copying.erase(load);
  return followed;
}

void MoverLoop::start_load_deadline(std::uint64_t ticket, const MoverJob& job) {
  load_bytes_queued_ += job.copies * state_.layout.page_bytes();
  const double copy_seconds =
      static_cast<double>(load_bytes_queued_) / state_.options.load_bytes_per_second;
  Duration deadline =
      state_.options.load_patience +
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(copy_seconds));
  bool is_cut = false;
  if (const auto computing = job.pace.computing(job.blocks.size())) {
    const Duration longest =
        std::max<Duration>(kCutAfter, *computing + kCutAfter - (state_.clock.now() - job.accepted));
    is_cut = longest < deadline;
    deadline = std::min(deadline, longest);
  }
  load_deadlines_.emplace(
      ticket,
      link_.timer()
          .afterDelay(deadline.count() * kj::NANOSECONDS)
          .then([this, ticket, deadline, is_cut] {
            MoverJob& late = state_.jobs.at(ticket);
            if (is_cut) late.cut = LoadPace::Cut::kSlow;
            late.gave_up = Error{Errc::kTimeout,
                                 fmt::format("not loaded within {}", format_duration(deadline))};
            state_.device.cancel(ticket);
          })
          .eagerlyEvaluate([this](kj::Exception&& exception) { tasks_.add(kj::mv(exception)); }));
}

void MoverLoop::on_copied(const Device::Completion& completion) {
  const auto found = state_.jobs.find(completion.ticket);
  PEGA_ASSERT(found != state_.jobs.end() && found->second.phase == Phase::kCopying,
              "the device completed batch {} that it does not have", completion.ticket);
  MoverJob& job = found->second;
  PEGA_ASSERT(
      completion.copied <= job.copies && (completion.copied == job.copies) == !completion.error,
      "the device copied {} of {} pages", completion.copied, job.copies);
  if (job.kind == Kind::kSave) {
    settle_save(completion.ticket, job, completion);
  } else {
    settle_load(completion.ticket, job, completion);
  }
}

void MoverLoop::settle_save(std::uint64_t ticket, MoverJob& job,
                            const Device::Completion& completion) {
  const std::size_t copied = completion.copied;
  if (job.connection_lost || !link_.is_connected()) {
    return finish(ticket, 0, copied, Error{Errc::kPeerLost, "the server went away"});
  }
  if (completion.error) {
    abandon(job.job);
    return finish(ticket, 0, copied, completion.error);
  }
  job.phase = Phase::kSettling;
  auto request = link_.session().publishRequest();
  write_job(job.job, request.initJob());
  const std::span<const std::uint64_t> checksums = completion.checksums;
  if (!checksums.empty()) {
    write_numbers(checksums, request.initChecksums(static_cast<unsigned>(checksums.size())));
  }
  tasks_.add(link_
                 .call(kj::mv(request), state_.options.link.open_deadline, "publish",
                       [](auto& answer) { return read_done(answer); })
                 .then([this, ticket, copied](Result<void>&& done) {
                   if (!state_.jobs.contains(ticket)) return;  // It ended with its connection.
                   if (done) return finish(ticket, copied, copied, std::nullopt);
                   finish(ticket, 0, copied, std::move(done.error()));
                 }));
}

void MoverLoop::settle_load(std::uint64_t ticket, MoverJob& job,
                            const Device::Completion& completion) {
  load_deadlines_.erase(ticket);
  load_bytes_queued_ -= job.copies * state_.layout.page_bytes();
  const TimePoint now = state_.clock.now();
  // Loads overlap on the device: each counts from the end of the one before it.
  job.copying += now - std::max(job.submitted, last_load_end_);
  last_load_end_ = now;
  const bool followed = no_longer_copying(ticket);
  // The kernel is asked, after the last copy: the loop may not have read the end of the stream yet.
  if (!followed && (job.connection_lost || !link_.is_up())) {
    return finish(ticket, 0, job.copied + completion.copied,
                  Error{Errc::kPeerLost, "the server went away before the last copy ended"});
  }
  const std::vector<std::uint32_t> corrupt = find_corrupt(job, completion);
  if (!corrupt.empty()) report_corrupt(job.pin, corrupt);
  release(job.pin);
  std::optional<Error> error = completion.error;
  if (error && job.gave_up) error = std::move(job.gave_up);
  std::size_t good = completion.copied;
  if (!corrupt.empty()) {
    good = corrupt.front();
    error = Error{Errc::kCorrupt, fmt::format("page {} of {} is not what was saved",
                                              job.done + corrupt.front(), job.blocks.size())};
  }
  job.done += good;
  job.copied += completion.copied;
  if (error || job.done == job.blocks.size()) {
    return finish(ticket, job.done, job.copied, std::move(error));
  }
  // The next piece, under a name of its own.
  job.phase = Phase::kAsking;
  job.pin = ++state_.last_ticket;
  begin_load(ticket);
}

std::vector<std::uint32_t> MoverLoop::find_corrupt(MoverJob& job,
                                                   const Device::Completion& completion) {
  std::vector<std::uint32_t> corrupt;
  const std::size_t count =
      std::min({completion.copied, job.checksums.size(), completion.checksums.size()});
  for (std::size_t i = 0; i < count; ++i) {
    if (job.checksums[i] == kNoChecksum || completion.checksums[i] == kNoChecksum) continue;
    ++job.verified;
    if (job.checksums[i] != completion.checksums[i]) {
      corrupt.push_back(static_cast<std::uint32_t>(i));
    }
  }
  job.corrupt += corrupt.size();
  return corrupt;
}

void MoverLoop::cancel_load(std::uint64_t load) {
  for (auto& [ticket, job] : state_.jobs) {
    if (job.kind != Kind::kLoad || job.id != load) continue;
    if (!job.gave_up) job.gave_up = Error{Errc::kCancelled, "the engine cancelled the load"};
    if (job.phase == Phase::kCopying) state_.device.cancel(ticket);
    // The server may keep our question until something comes: it answers it now.
    if (job.phase == Phase::kAsking && job.coming_until) release(job.pin);
  }
}

void MoverLoop::finish(std::uint64_t ticket, std::size_t good_blocks, std::size_t copied_pages,
                       std::optional<Error> error) {
  auto node = state_.jobs.extract(ticket);
  PEGA_ASSERT(!node.empty(), "job {} ended twice", ticket);
  state_.report(std::move(node.mapped()), good_blocks, copied_pages, std::move(error));
  end_if_quiet();
}

// ---- calls that nobody waits for

void MoverLoop::abandon(const JobId& job) {
  if (!link_.is_connected()) return;  // The next hello says it.
  auto request = link_.session().abandonRequest();
  write_job(job, request.initJob());
  tasks_.add(link_
                 .call(kj::mv(request), state_.options.link.open_deadline, "abandon",
                       [](auto& answer) { return read_done(answer); })
                 .then([this](Result<void>&& done) { log_failure("abandon", done); }));
}

void MoverLoop::publish_nothing(const JobId& job) {
  auto request = link_.session().publishRequest();
  write_job(job, request.initJob());
  tasks_.add(link_
                 .call(kj::mv(request), state_.options.link.open_deadline, "publish",
                       [](auto& answer) { return read_done(answer); })
                 .then([this](Result<void>&& done) { log_failure("publish", done); }));
}

void MoverLoop::release(std::uint64_t pin) {
  if (!link_.is_connected()) return;  // The next hello says it.
  auto request = link_.session().releaseRequest();
  request.setPin(pin);
  tasks_.add(link_
                 .call(kj::mv(request), state_.options.link.open_deadline, "release",
                       [](auto& answer) { return read_done(answer); })
                 .then([this](Result<void>&& done) { log_failure("release", done); }));
}

void MoverLoop::report_corrupt(std::uint64_t pin, std::span<const std::uint32_t> places) {
  corrupt_pages_ += places.size();
  const TimePoint now = state_.clock.now();
  if (!last_corrupt_line_ || now - *last_corrupt_line_ >= kCorruptLineInterval) {
    last_corrupt_line_ = now;
    kLog.error(
        "loaded pages are not what was saved, they are computed again instance={} pages={} "
        "since_start={}",
        state_.options.link.instance, places.size(), corrupt_pages_);
  }
  auto request = link_.session().corruptRequest();
  request.setPin(pin);
  write_numbers(places, request.initPages(static_cast<unsigned>(places.size())));
  tasks_.add(link_
                 .call(kj::mv(request), state_.options.link.open_deadline, "corrupt",
                       [](auto& answer) { return read_done(answer); })
                 .then([this](Result<void>&& done) { log_failure("corrupt", done); }));
}

void MoverLoop::log_failure(const char* what, const Result<void>& done) {
  // A slow server carries it out later, a lost one hears of it in the next hello.
  if (!done) kLog.debug("{} was not answered error=\"{}\"", what, to_string(done.error()));
}

}  // namespace pegaflow
