#include "server/direct/direct_reads.h"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/carried_descriptor.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/kj_time.h"
#include "capnp/wire/rpc_error.h"
#include "cluster/peers.h"
#include "server/direct/allocations.h"
#include "server/fetches/fetches.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"rpc"};

/// Descriptors that this process may have.
std::size_t descriptor_limit() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0;
}

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

  Id128 node{};            ///< Another node whose blocks count, too; none: only those of this one.
  std::uint64_t read = 0;  ///< The name of the question to that node; 0: it has none.
  kj::Maybe<kj::ForkedPromise<void>> asking{};  ///< Resolves with its answer.
  std::optional<Result<PeerPiece>> answer{};
  TimePoint ask_at{};  ///< That node is not asked before.
};

/// A claim on blocks of another node's pool.
struct DirectReads::Claim {
  Id128 token = Id128::random();
  TimePoint deadline{};    ///< For the blocks to arrive.
  std::size_t blocks = 0;  ///< Those of the claim, also the ones in flight.
};

DirectReads::DirectReads(CacheService& service, kj::Timer& timer, const Clock& clock)
    : service_(service),
      timer_(timer),
      clock_(clock),
      closer_(std::make_shared<AllocationCloser>(descriptor_limit() / 4)),
      changed_(nullptr),
      read_ended_(nullptr),
      turns_(nullptr),
      tasks_(*this) {
  fire(change_, changed_);
  fire(read_end_, read_ended_);
  fire(turn_, turns_);
}

DirectReads::~DirectReads() noexcept(false) = default;

void DirectReads::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "fetching blocks of another node failed: {}", error_from(exception).detail);
}

void DirectReads::use_nodes(const Id128& server, cluster::Peers& peers, Fetches& fetches) {
  server_ = server;
  fetches_ = &fetches;
  far_.emplace(service_, offers_, peers);
}

DirectStats DirectReads::stats() const {
  DirectStats stats = offers_.stats();
  stats.waits = watchers_;
  if (far_) far_->count(stats);
  return stats;
}

kj::Promise<void> DirectReads::next_change() {
  ++watchers_;
  return changed_.addBranch().attach(kj::defer([this]() { --watchers_; }));
}

void DirectReads::changed() {
  if (watchers_ == 0 || is_look_due_) return;
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
                                 const OfferedMemory& memory, const Descriptors& descriptors) {
  if (offers_.has(connection, shard, memory)) return {};
  PEGA_TRY(check_guards(descriptors.guards, memory.guards));
  PEGA_TRY_LET(UniqueFd guards, duplicate(descriptors.guards));
  PEGA_TRY_LET(UniqueFd process, duplicate(descriptors.process));
  std::shared_ptr<const Allocations> allocations;
  if (!memory.ranges.empty()) {
    std::size_t count = 0;
    for (const std::vector<std::uint64_t>& sizes : memory.ranges) count += sizes.size();
    PEGA_TRY_LET(allocations, Allocations::take(closer_, descriptors.exported, count));
  }
  offers_.add(connection, shard, memory, std::move(guards), std::move(process),
              std::move(allocations));
  look_for_readers();
  return {};
}

void DirectReads::left(const Id128& connection) {
  for (auto each = waiting_.lower_bound({connection, 0});
       each != waiting_.end() && each->first.first == connection; ++each) {
    each->second->is_cancelled = true;
    each->second->cancel->fulfill();
  }
  if (far_) far_->left(connection);
  offers_.remove(connection);
  fire(read_end_, read_ended_);
  pass_turns();
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
  // Its worker may not call await_reads(): it has abandoned the job, or its call came too late.
  if (offers_.is_read(connection, job)) {
    tasks_.add(timer_.afterDelay(to_kj(kReadPatience)).then([this, connection, job]() {
      end_turns(connection, job);
    }));
  }
  changed();
}

void DirectReads::end_turns(const Id128& connection, const JobId& job) {
  offers_.end_turns(connection, job);
  pass_turns();
}

std::size_t DirectReads::offered(const Id128& connection, std::span<const BlockKey> beyond) {
  if (offers_.stats().blocks == 0 || beyond.empty()) return 0;
  const auto reach = service_.direct_reach(connection);
  if (!reach) return 0;
  const auto readers = offers_.readers(reach->workers);
  return readers ? offers_.count(*readers, reach->generation, beyond) : 0;
}

kj::Maybe<kj::Promise<std::size_t>> DirectReads::offered_at(
    const Id128& node, const Id128& connection, std::span<const BlockKey> beyond) const {
  if (node.is_none() || node == server_ || beyond.empty()) return nullptr;
  if (!may_read_from(node, connection)) return nullptr;
  return far_->reach(connection, node, beyond);
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
  const Id128 node = params.hasNode() ? read_id(params.getNode()) : Id128{};
  if (far_ && node != server_) opening->node = node;
  return try_open(opening);
}

kj::Promise<Result<void>> DirectReads::try_open(const OneOpening& opening) {
  end_wait(*opening);
  if (opening->is_cancelled) {
    end_far(*opening);
    leave_queues(*opening);
    return Result<void>(fail(Errc::kCancelled, "pin {} was released before a block arrived",
                             static_cast<std::uint64_t>(opening->pin)));
  }
  auto in_pool = open_in_pool(*opening);
  if (!in_pool || *in_pool || open_in_memory(*opening) || open_far(opening)) {
    end_far(*opening);
    leave_queues(*opening);
    if (!in_pool) return Result<void>(tl::unexpected<Error>(std::move(in_pool.error())));
    write_gone(*opening);
    return Result<void>();
  }
  const TimePoint now = clock_.now();
  if (now >= opening->deadline) {
    end_far(*opening);
    leave_queues(*opening);
    return Result<void>(fail(Errc::kTimeout, "no block arrived"));
  }
  auto cancelled = begin_wait(opening);
  if (!cancelled) {
    end_far(*opening);
    return Result<void>(tl::unexpected<Error>(std::move(cancelled.error())));
  }
  if (opening->answer && *opening->answer && (*opening->answer)->sealed != 0) {
    return fetch(opening, kj::mv(*cancelled));
  }
  kj::Promise<void> news = next_change();
  KJ_IF_MAYBE (asking, opening->asking) news = news.exclusiveJoin(asking->addBranch());
  TimePoint until = std::min<TimePoint>(opening->deadline, now + kRetry);
  if (opening->ask_at > now) until = std::min(until, opening->ask_at);
  return news.exclusiveJoin(kj::mv(*cancelled))
      .exclusiveJoin(timer_.afterDelay(to_kj(until - now)))
      .then([this, opening]() { return try_open(opening); });
}

/// Adds the call to the waiting ones. The promise resolves when the worker releases its pin.
Result<kj::Promise<void>> DirectReads::begin_wait(const OneOpening& opening) {
  std::size_t& waits = waits_of_[opening->connection];
  if (waits >= kMostWaits) return fail(Errc::kBusy, "{} calls wait for blocks already", waits);
  ++waits;
  waiting_.emplace(Pin{opening->connection, static_cast<std::uint64_t>(opening->pin)}, opening);
  auto cancel = kj::newPromiseAndFulfiller<void>();
  opening->cancel = kj::mv(cancel.fulfiller);
  return kj::mv(cancel.promise);
}

void DirectReads::end_wait(const Opening& opening) {
  if (waiting_.erase({opening.connection, static_cast<std::uint64_t>(opening.pin)}) == 0) return;
  const auto waits = waits_of_.find(opening.connection);
  if (--waits->second == 0) waits_of_.erase(waits);
}

void DirectReads::leave_queues(const Opening& opening) {
  if (waits_of_.contains(opening.connection)) return;
  const auto worker = offers_.source_of(opening.connection);
  if (worker == nullptr) return;
  offers_.consents().gave_up(worker->id);
  pass_turns();
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
  answer_slots(opening, *opened);
  return true;
}

void DirectReads::answer_slots(Opening& opening, const CacheService::Opened& opened) {
  const std::size_t slots = opened.slots.size();
  const std::size_t checksums = opened.checksums.size();
  auto results = opening.call.getResults(capnp::MessageSize{slots / 2 + checksums + 16, 0});
  write_numbers<std::uint32_t>(opened.slots, results.initSlots(static_cast<unsigned>(slots)));
  if (checksums == 0) return;
  write_numbers<std::uint64_t>(opened.checksums,
                               results.initChecksums(static_cast<unsigned>(checksums)));
}

bool DirectReads::open_in_memory(Opening& opening) {
  const auto params = opening.call.getParams();
  if (params.getPoolOnly()) return false;
  const auto reach = service_.direct_reach(opening.connection);
  const auto reader = offers_.reader(opening.connection);
  if (!reach || !reader) return false;
  const auto found = offers_.begin_read(opening.connection, *reader, reach->generation,
                                        opening.keys, static_cast<std::uint64_t>(opening.pin));
  if (!found) {
    look_for_readers();
    return false;
  }
  const Offers::Source& source = *found->source;
  std::shared_ptr<const UniqueFd> box;
  const bool is_known = knows(opening, source.id);
  if (!is_known) {
    auto packed = box_of(source);
    if (!packed) {
      end_read(opening.connection, static_cast<std::uint64_t>(opening.pin));
      return false;  // It looks again.
    }
    box = std::move(*packed);
  }
  answer_blocks(opening, found->blocks, guards_of(*found), source.id);
  if (is_known) return true;
  auto results = opening.call.getResults();
  auto memory = results.initMemory();
  OfferedMemory offered = source.memory.for_this_node();
  offered.needs_consent = found->has_turn;
  write_memory(offered, memory);
  memory.setGuards(kj::heap<CarriedDescriptor<wire::Guards>>(source.guards.get(), found->source));
  results.setProcess(
      kj::heap<CarriedDescriptor<wire::ProcessHandle>>(source.process.get(), found->source));
  // Behind the others: clients without the feature take the first two descriptors of a message.
  if (box) memory.setExported(kj::heap<CarriedDescriptor<wire::Exported>>(box->get(), box));
  return true;
}

Result<std::shared_ptr<const UniqueFd>> DirectReads::box_of(const Offers::Source& source) {
  if (source.allocations == nullptr) return nullptr;
  Result<UniqueFd> box = source.allocations->pack();
  if (!box && !std::exchange(is_box_refused_, true)) {
    kLog.warn("a reader gets no descriptors of GPU memory, and asks again error=\"{}\"",
              box.error().detail);
  }
  if (!box) return tl::unexpected<Error>(std::move(box.error()));
  is_box_refused_ = false;
  return std::make_shared<const UniqueFd>(std::move(*box));
}

void DirectReads::answer_blocks(Opening& opening, std::span<const std::uint32_t> blocks,
                                std::span<const PeerPiece::Guard> guards, SourceId source) {
  auto results = opening.call.getResults();
  write_numbers(blocks, results.initBlocks(static_cast<unsigned>(blocks.size())));
  auto list = results.initGuards(static_cast<unsigned>(guards.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    list[i].setPlace(guards[i].place);
    list[i].setValue(guards[i].value);
    list[i].setBlocks(guards[i].blocks);
  }
  results.setSource(static_cast<std::uint64_t>(source));
}

bool DirectReads::knows(const Opening& opening, SourceId source) {
  OpenNext call = opening.call;
  for (const std::uint64_t known : call.getParams().getKnown()) {
    if (SourceId{known} == source) return true;
  }
  return false;
}

// ---- blocks of another node

bool DirectReads::open_far(const OneOpening& opening) {
  if (opening->node.is_none()) return false;
  Opening& one = *opening;
  if (one.answer && *one.answer) {
    PeerPiece& piece = **one.answer;
    far_->forget(one.node, piece.gone);
    if (!piece.blocks.empty() && pass_on(one, piece)) return true;
    if (piece.sealed != 0) return false;  // They are fetched.
  }
  const TimePoint now = clock_.now();
  // An answer of no use: a node that answers at once is not asked in a loop.
  if (one.answer) one.ask_at = now + kRetry;
  if (one.answer) end_far(one);
  if (one.read == 0 && now >= one.ask_at && now < one.deadline) ask_far(one);
  return false;
}

bool DirectReads::pass_on(Opening& opening, PeerPiece& piece) {
  const auto source = far_->source_of(opening.node, piece);
  if (!source) return false;
  answer_blocks(opening, piece.blocks, piece.guards, source->name);
  if (!knows(opening, source->name)) {
    write_memory(*source->memory, opening.call.getResults().initMemory());
  }
  far_->began(opening.connection, static_cast<std::uint64_t>(opening.pin), opening.node,
              std::exchange(opening.read, 0), piece.blocks.size());
  return true;
}

void DirectReads::ask_far(Opening& opening) {
  opening.read = far_->new_read();
  PeerQuestion question{
      .read = opening.read,
      .patience = std::chrono::ceil<std::chrono::milliseconds>(opening.deadline - clock_.now()),
      .pool_only = opening.call.getParams().getPoolOnly()};
  // The promise ends with `opening`.
  opening.asking =
      far_->ask(opening.connection, opening.node, opening.keys, std::move(question))
          .then([&opening](Result<PeerPiece>&& answer) { opening.answer = std::move(answer); })
          .fork();
}

void DirectReads::end_far(Opening& opening) {
  opening.asking = nullptr;
  opening.answer.reset();
  if (opening.read != 0) far_->end(opening.node, std::exchange(opening.read, 0));
}

kj::Promise<Result<void>> DirectReads::fetch(const OneOpening& opening,
                                             kj::Promise<void>&& cancelled) {
  end_far(*opening);
  const auto claim = std::make_shared<Claim>();
  claim->deadline = std::min<TimePoint>(opening->deadline, clock_.now() + kFetchTime);
  kj::Promise<void> extended = kj::READY_NOW;
  if (const auto found = service_.claim(opening->connection, claim->token, opening->keys)) {
    claim->blocks = found->blocks;
    KJ_IF_MAYBE (more, fetches_->extend(opening->connection, claim->token, opening->keys,
                                        found->blocks, {}, {.nodes = {opening->node}})) {
      // It runs to its end in any case, because it takes frames.
      auto forked =
          more->then([claim](const Fetches::Extension& each) { claim->blocks += each.blocks; })
              .fork();
      tasks_.add(forked.addBranch());
      extended = forked.addBranch();
    }
  }
  return extended.then([this, claim]() { return await_arrival(claim); })
      .exclusiveJoin(timer_.afterDelay(to_kj(claim->deadline - clock_.now())))
      .exclusiveJoin(kj::mv(cancelled))
      .then([this, opening, claim]() -> kj::Promise<Result<void>> {
        const bool has_answer = open_claimed(*opening, *claim);
        fetches_->ended(claim->token);
        (void)service_.unclaim(opening->connection, claim->token);
        if (!has_answer) {
          opening->ask_at = clock_.now() + kRetry;
          return try_open(opening);
        }
        end_wait(*opening);
        leave_queues(*opening);
        write_gone(*opening);
        return Result<void>();
      });
}

/// Answers with the blocks of the claim that have arrived.
bool DirectReads::open_claimed(Opening& opening, const Claim& claim) {
  if (opening.is_cancelled || claim.blocks == 0) return false;
  const auto opened =
      service_.open_arrived(opening.connection, claim.token, 0, claim.blocks, opening.pin);
  if (!opened || opened->slots.empty()) return false;
  answer_slots(opening, *opened);
  return true;
}

kj::Promise<void> DirectReads::await_arrival(const std::shared_ptr<const Claim>& claim) {
  if (claim->blocks == 0 || clock_.now() >= claim->deadline) return kj::READY_NOW;
  const auto here = service_.arrived(claim->token, 0, claim->blocks);
  if (!here || *here >= claim->blocks) return kj::READY_NOW;
  return fetches_->progress().then([this, claim]() { return await_arrival(claim); });
}

void DirectReads::write_gone(Opening& opening) {
  std::vector<std::uint64_t> gone;
  for (const std::uint64_t known : opening.call.getParams().getKnown()) {
    const SourceId source{known};
    if (!offers_.has(source) && !(far_ && far_->has(source))) gone.push_back(known);
  }
  if (gone.empty()) return;
  write_numbers(std::span<const std::uint64_t>(gone),
                opening.call.getResults().initGone(static_cast<unsigned>(gone.size())));
}

void DirectReads::end_read(const Id128& connection, std::uint64_t read) {
  if (!offers_.end_read(connection, read)) return;
  fire(read_end_, read_ended_);
  pass_turns();
}

void DirectReads::released(const Id128& connection, engine::PinId pin) {
  const Pin name{connection, static_cast<std::uint64_t>(pin)};
  end_read(connection, name.second);
  if (far_) far_->ended(connection, name.second);
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
  // The turns of those that still read end behind job_ended().
  if (!offers_.is_read(connection, job) || now >= deadline) return Result<void>();
  return read_ended_.addBranch()
      .exclusiveJoin(timer_.afterDelay(to_kj(deadline - now)))
      .then([this, connection, job, deadline]() {
        return wait_for_readers(connection, job, deadline);
      });
}

// ---- consent

kj::Promise<Result<void>> DirectReads::await_reader(const Id128& connection, AwaitReader call) {
  const auto source = offers_.source_of(connection);
  if (source == nullptr || !source->memory.needs_consent) {
    return Result<void>(
        fail(Errc::kInvalidArgument, "awaitReader: the memory of this worker needs no consent"));
  }
  const TimePoint now = clock_.now();
  const std::uint64_t wait =
      offers_.consents().permitted(source->id, SourceId{call.getParams().getPermitted()},
                                   SourceId{call.getParams().getRefused()}, now);
  fire(turn_, turns_);  // An earlier call ends.
  changed();            // The reader may begin.
  return wait_for_reader(source->id, wait, call, now + kLongestWait);
}

kj::Promise<Result<void>> DirectReads::wait_for_reader(SourceId source, std::uint64_t wait,
                                                       AwaitReader call, TimePoint deadline) {
  Consents& consents = offers_.consents();
  if (!offers_.has(source)) return Result<void>(fail(Errc::kGone, "the worker has left"));
  if (!consents.is_waiting(source, wait)) {
    return Result<void>(fail(Errc::kCancelled, "awaitReader was called again"));
  }
  const TimePoint now = clock_.now();
  // First, so that an event of which this wait was not told shows as a timeout.
  if (now >= deadline) return Result<void>(fail(Errc::kTimeout, "no other process is to read"));
  if (const auto next = consents.next(source, now)) {
    auto results = call.getResults();
    results.setReader(static_cast<std::uint64_t>(*next));
    if (const auto reader = offers_.find_source(*next)) {
      results.setProcess(
          kj::heap<CarriedDescriptor<wire::ProcessHandle>>(reader->process.get(), reader));
    }
    return Result<void>();
  }
  const TimePoint until = std::min(deadline, consents.look_again(source));
  return turns_.addBranch()
      .exclusiveJoin(timer_.afterDelay(to_kj(until - now)))
      .then([this, source, wait, call, deadline]() {
        return wait_for_reader(source, wait, call, deadline);
      });
}

bool DirectReads::look_for_readers() {
  if (!offers_.consents().take_news()) return false;
  fire(turn_, turns_);
  return true;
}

void DirectReads::pass_turns() {
  if (look_for_readers()) changed();
}

}  // namespace pegaflow::server
