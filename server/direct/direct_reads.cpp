#include "server/direct/direct_reads.h"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "capnp/wire/carried_descriptor.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/kj_time.h"

namespace pegaflow::server {
namespace {

/// Readers map it, so it must not become shorter.
Result<void> check_guards(int fd, std::uint32_t guards) {
  struct stat status = {};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd, &status) != 0) {
    return fail(Errc::kInvalidArgument, "the guards of direct memory are no sealed memfd");
  }
  if (static_cast<std::uint64_t>(status.st_size) / sizeof(std::uint64_t) < guards) {
    return fail(Errc::kInvalidArgument, "{} guards of direct memory in {} bytes", guards,
                status.st_size);
  }
  return {};
}

/// Ends the waits for the former promise, and begins those for the next one.
void fire(kj::Own<kj::PromiseFulfiller<void>>& fulfiller, kj::ForkedPromise<void>& promise) {
  auto next = kj::newPromiseAndFulfiller<void>();
  if (fulfiller.get() != nullptr) fulfiller->fulfill();
  fulfiller = kj::mv(next.fulfiller);
  promise = next.promise.fork();
}

Result<UniqueFd> duplicate(int fd) {
  UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own) return fail_errno(errno, "duplicate a worker's descriptor");
  return own;
}

}  // namespace

/// A worker that waits for the next blocks of a prompt.
struct DirectReads::Opening {
  Id128 connection;
  OpenNext call;
  std::vector<BlockKey> keys{};
  engine::PinId pin{};
  TimePoint deadline{};
  bool is_cancelled = false;
  kj::Own<kj::PromiseFulfiller<void>> cancel{};  ///< While it waits.
};

DirectReads::DirectReads(CacheService& service, kj::Timer& timer, const Clock& clock)
    : service_(service), timer_(timer), clock_(clock), changed_(nullptr), read_ended_(nullptr) {
  fire(change_, changed_);
  fire(read_end_, read_ended_);
}

DirectReads::~DirectReads() noexcept(false) = default;

void DirectReads::changed() {
  if (waiting_.empty() || is_look_due_) return;
  is_look_due_ = true;
  const Duration pause =
      std::max<Duration>(Duration::zero(), last_look_ + kBetweenLooks - clock_.now());
  look_ = timer_.afterDelay(to_kj(pause))
              .then([this]() {
                is_look_due_ = false;
                last_look_ = clock_.now();
                fire(change_, changed_);
              })
              .eagerlyEvaluate(nullptr);
}

Result<void> DirectReads::joined(const Id128& connection, std::uint32_t shard,
                                 const OfferedMemory& memory, int guards, int process) {
  if (offers_.has(connection, shard, memory)) return {};
  PEGA_TRY(check_guards(guards, memory.guards));
  PEGA_TRY_LET(UniqueFd own_guards, duplicate(guards));
  PEGA_TRY_LET(UniqueFd own_process, duplicate(process));
  offers_.add(connection, shard, memory, std::move(own_guards), std::move(own_process));
  return {};
}

void DirectReads::left(const Id128& connection) {
  for (auto each = waiting_.lower_bound({connection, 0});
       each != waiting_.end() && each->first.first == connection; ++each) {
    each->second->is_cancelled = true;
    each->second->cancel->fulfill();
  }
  if (!offers_.has(connection)) return;
  offers_.remove(connection);
  fire(read_end_, read_ended_);
}

Result<void> DirectReads::reserved(const Id128& connection,
                                   wire::Session::ReserveParams::Reader params,
                                   std::span<const BlockKey> keys,
                                   std::span<const std::uint32_t> slots) {
  if (params.getGuardValue() == 0 || params.getKind() != 0) return {};
  const auto reach = service_.direct_reach(connection);
  const JobId job = read_job(params.getJob());
  // A reset may have come between: the job's blocks are of the former generation.
  if (!reach || service_.space_of_job(job) != reach->generation) return {};
  PEGA_TRY_LET(const std::vector<std::uint32_t> blocks,
               read_numbers<std::uint32_t>(params.getBlocks()));
  std::vector<bool> skipped;
  skipped.reserve(slots.size());
  for (const std::uint32_t slot : slots) skipped.push_back(slot == CacheService::kNoPage);
  PEGA_TRY(offers_.offer(connection, job, reach->generation, keys, blocks, skipped,
                         {.place = params.getGuard(), .value = params.getGuardValue()},
                         params.getPending()));
  changed();
  return {};
}

void DirectReads::ready(const Id128& connection, const JobId& job) {
  if (offers_.ready(connection, job)) changed();
}

void DirectReads::job_ended(const Id128& connection, const JobId& job) {
  offers_.job_ended(connection, job);
  changed();
}

std::size_t DirectReads::offered(const Id128& connection, std::span<const BlockKey> beyond) {
  if (offers_.stats().blocks == 0 || beyond.empty()) return 0;
  const auto reach = service_.direct_reach(connection);
  return reach ? offers_.count(reach->workers, reach->generation, beyond) : 0;
}

// ---- readers

kj::Promise<Result<void>> DirectReads::open_next(const Id128& connection, OpenNext call) {
  const auto params = call.getParams();
  if (waiting_.contains({connection, params.getPin()})) {
    return Result<void>(
        fail(Errc::kInvalidArgument, "openNext: pin {} waits already", params.getPin()));
  }
  auto opening = std::make_shared<Opening>(Opening{.connection = connection, .call = call});
  std::vector<BlockKey> scratch;
  const auto keys = read_keys(params.getKeys(), scratch);
  if (!keys) return Result<void>(tl::unexpected<Error>(keys.error()));
  if (keys->empty()) return Result<void>(fail(Errc::kInvalidArgument, "openNext without a key"));
  const std::size_t count = std::min(keys->size(), CacheService::kClaimSlice);
  opening->keys.assign(keys->begin(), keys->begin() + static_cast<std::ptrdiff_t>(count));
  opening->pin = engine::PinId{params.getPin()};
  opening->deadline =
      clock_.now() +
      std::min<Duration>(std::chrono::milliseconds(params.getPatienceMs()), kLongestWait);
  return try_open(opening);
}

kj::Promise<Result<void>> DirectReads::try_open(const OneOpening& opening) {
  end_wait(*opening);
  if (opening->is_cancelled) {
    return Result<void>(fail(Errc::kCancelled, "pin {} was released before a block arrived",
                             static_cast<std::uint64_t>(opening->pin)));
  }
  auto in_pool = open_in_pool(*opening);
  if (!in_pool) return Result<void>(tl::unexpected<Error>(std::move(in_pool.error())));
  if (*in_pool || open_in_memory(*opening)) {
    write_gone(*opening);
    return Result<void>();
  }
  const TimePoint now = clock_.now();
  if (now >= opening->deadline) {
    return Result<void>(fail(Errc::kTimeout, "no block arrived"));
  }
  std::size_t& waits = waits_of_[opening->connection];
  if (waits >= kMostWaits) {
    return Result<void>(fail(Errc::kBusy, "{} calls wait for blocks already", waits));
  }
  ++waits;
  waiting_.emplace(Pin{opening->connection, static_cast<std::uint64_t>(opening->pin)}, opening);
  auto cancel = kj::newPromiseAndFulfiller<void>();
  opening->cancel = kj::mv(cancel.fulfiller);
  return changed_.addBranch()
      .exclusiveJoin(kj::mv(cancel.promise))
      .exclusiveJoin(timer_.afterDelay(to_kj(std::min<Duration>(opening->deadline - now, kRetry))))
      .then([this, opening]() { return try_open(opening); });
}

void DirectReads::end_wait(const Opening& opening) {
  if (waiting_.erase({opening.connection, static_cast<std::uint64_t>(opening.pin)}) == 0) return;
  const auto waits = waits_of_.find(opening.connection);
  if (--waits->second == 0) waits_of_.erase(waits);
}

Result<bool> DirectReads::open_in_pool(Opening& opening) {
  const Id128 token = Id128::random();
  PEGA_TRY_LET(const CacheService::Found found,
               service_.claim(opening.connection, token, opening.keys));
  if (found.blocks == 0) {
    (void)service_.unclaim(opening.connection, token);
    return false;
  }
  auto opened = service_.open(opening.connection, token, 0, found.blocks, opening.pin);
  (void)service_.unclaim(opening.connection, token);
  if (!opened) return tl::unexpected<Error>(std::move(opened.error()));
  const std::size_t slots = opened->slots.size();
  const std::size_t checksums = opened->checksums.size();
  auto results = opening.call.getResults(capnp::MessageSize{slots / 2 + checksums + 16, 0});
  write_numbers<std::uint32_t>(opened->slots, results.initSlots(static_cast<unsigned>(slots)));
  if (checksums != 0) {
    write_numbers<std::uint64_t>(opened->checksums,
                                 results.initChecksums(static_cast<unsigned>(checksums)));
  }
  return true;
}

bool DirectReads::open_in_memory(Opening& opening) {
  const auto params = opening.call.getParams();
  if (params.getPoolOnly()) return false;
  const auto reach = service_.direct_reach(opening.connection);
  if (!reach) return false;
  const auto found = offers_.begin_read(opening.connection, reach->generation, opening.keys,
                                        static_cast<std::uint64_t>(opening.pin));
  if (!found) return false;
  const std::uint64_t source = static_cast<std::uint64_t>(found->source->id);
  auto results = opening.call.getResults();
  write_numbers<std::uint32_t>(found->blocks,
                               results.initBlocks(static_cast<unsigned>(found->blocks.size())));
  auto guards = results.initGuards(static_cast<unsigned>(found->guards.size()));
  for (unsigned i = 0; i < guards.size(); ++i) {
    guards[i].setPlace(found->guards[i].guard.place);
    guards[i].setValue(found->guards[i].guard.value);
    guards[i].setBlocks(found->guards[i].blocks);
  }
  results.setSource(source);
  for (const std::uint64_t known : params.getKnown()) {
    if (known == source) return true;
  }
  auto memory = results.initMemory();
  write_memory(found->source->memory, memory);
  memory.setGuards(
      kj::heap<CarriedDescriptor<wire::Guards>>(found->source->guards.get(), found->source));
  results.setProcess(kj::heap<CarriedDescriptor<wire::ProcessHandle>>(found->source->process.get(),
                                                                      found->source));
  return true;
}

void DirectReads::write_gone(Opening& opening) {
  std::vector<std::uint64_t> gone;
  for (const std::uint64_t known : opening.call.getParams().getKnown()) {
    if (!offers_.has(SourceId{known})) gone.push_back(known);
  }
  if (gone.empty()) return;
  write_numbers(std::span<const std::uint64_t>(gone),
                opening.call.getResults().initGone(static_cast<unsigned>(gone.size())));
}

void DirectReads::released(const Id128& connection, engine::PinId pin) {
  const Pin name{connection, static_cast<std::uint64_t>(pin)};
  if (offers_.end_read(connection, name.second)) fire(read_end_, read_ended_);
  const auto waits = waiting_.find(name);
  if (waits == waiting_.end()) return;
  waits->second->is_cancelled = true;
  waits->second->cancel->fulfill();
}

// ---- writers

kj::Promise<Result<void>> DirectReads::await_reads(const Id128& connection, const JobId& job) {
  return wait_for_readers(connection, job, clock_.now() + kReadPatience);
}

kj::Promise<Result<void>> DirectReads::wait_for_readers(const Id128& connection, const JobId& job,
                                                        TimePoint deadline) {
  const TimePoint now = clock_.now();
  if (!offers_.is_read(connection, job) || now >= deadline) return Result<void>();
  return read_ended_.addBranch()
      .exclusiveJoin(timer_.afterDelay(to_kj(deadline - now)))
      .then([this, connection, job, deadline]() {
        return wait_for_readers(connection, job, deadline);
      });
}

}  // namespace pegaflow::server
