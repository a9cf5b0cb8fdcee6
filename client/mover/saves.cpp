#include "client/mover/saves.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/room_time.h"
#include "client/mover/read_slots.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"mover"};

/// The server's value for a key that is to be skipped.
constexpr std::uint32_t kNoFrame = 0xFFFFFFFF;

/// The server's limit for the readers of a job that has ended.
constexpr Duration kReadsEnd = std::chrono::seconds(2);

}  // namespace

void Saves::begin(SaveJob&& accepted, std::optional<Error> refusal) {
  const std::uint64_t ticket = ++state_.last_ticket;
  SaveJob& job = state_.saves.emplace(ticket, std::move(accepted)).first->second;
  if (refusal) return finish(ticket, 0, std::move(refusal));
  const KindPages& kind = state_.kinds[job.kind];
  if (!state_.options.saves || kind.members.empty()) {
    // Another rank saves these bytes, and its report shows whether that succeeded; or no rank has
    // to save anything for this one.
    job.skipped = job.keys.size();
    return finish(ticket, 0, std::nullopt);
  }
  auto request = link_.session().reserveRequest(
      capnp::MessageSize{keys_words(job.keys.size(), BlockKey::kMaxBytes) + job.depths.size() / 8 +
                             job.blocks.size() / 2 + 36,
                         0});
  write_job(job.job, request.initJob());
  write_keys(job.keys, BlockKey::kMaxBytes, request.initKeys());
  request.setKind(static_cast<std::uint8_t>(job.kind));
  request.setMayRefuse(job.may_refuse);
  if (!job.depths.empty()) request.setDepths({job.depths.data(), job.depths.size()});
  if (is_offered(job)) job.guard = state_.guards->open();
  if (job.guard) {
    write_numbers<std::uint32_t>(job.blocks,
                                 request.initBlocks(static_cast<unsigned>(job.blocks.size())));
    request.setGuard(job.guard->place);
    request.setGuardValue(job.guard->value);
    request.setPending(job.computed != Device::Event::kNow &&
                       !state_.options.mistakes.ready_at_once);
  }
  const Duration deadline =
      state_.options.link.reserve_deadline + time_to_make_room(job.keys.size() * kind.page_bytes);
  tasks_.add(link_
                 .call(kj::mv(request), deadline, "reserve",
                       [](auto& answer) { return read_slots(answer); })
                 .then([this, ticket](Result<std::vector<std::uint32_t>>&& slots) {
                   on_slots(ticket, std::move(slots));
                 }));
}

bool Saves::is_offered(const SaveJob& job) const {
  // Blocks whose save may be refused are wanted by no other engine.
  const bool is_pending = job.computed != Device::Event::kNow;
  return state_.is_direct && !job.may_refuse && (!is_pending || link_.server_has(kFeaturePending));
}

void Saves::watch(std::uint64_t ticket, SaveJob& job) {
  if (!job.guard || job.computed == Device::Event::kNow) return;
  const std::uint64_t mark = ++state_.last_ticket;
  const Result<void> accepted = state_.device.submit(
      {.ticket = mark, .direction = Device::Direction::kSave, .after = job.computed, .copies = {}});
  if (!accepted) {  // Then they are read from the pool.
    kLog.debug("blocks are not offered error=\"{}\"", to_string(accepted.error()));
    return;
  }
  state_.batches.emplace(
      mark, BatchOwner{.direction = Device::Direction::kSave, .job = ticket, .is_mark = true});
}

void Saves::on_final(std::uint64_t ticket, const Device::Completion& completion) {
  const auto found = state_.saves.find(ticket);
  if (found == state_.saves.end() || completion.error) return;
  const SaveJob& job = found->second;
  if (job.is_ending || !link_.is_connected()) return;
  auto request = link_.session().readyRequest();
  write_job(job.job, request.initJob());
  tasks_.add(link_
                 .call(kj::mv(request), state_.options.link.open_deadline, "ready",
                       [](auto& answer) { return read_done(answer); })
                 .then([](Result<void>&& done) {
                   if (!done) kLog.debug("ready failed error=\"{}\"", to_string(done.error()));
                 }));
}

void Saves::on_slots(std::uint64_t ticket, Result<std::vector<std::uint32_t>>&& slots) {
  const auto found = state_.saves.find(ticket);
  if (found == state_.saves.end()) return;  // It ended with its connection.
  SaveJob& job = found->second;
  PEGA_ASSERT(job.phase == SaveJob::Phase::kAsking, "save {} received slots twice", ticket);
  if (!slots) {
    // After its deadline the server may still execute the call: the next call drops the result.
    if (slots.error().code == Errc::kTimeout) cleanup_.abandon(job.job);
    return finish(ticket, 0, std::move(slots.error()));
  }
  const std::optional<std::vector<PageCopies::Page>> pages = place(job, *slots);
  if (!pages) {
    Error error = bad_slots(slots->size(), job.keys.size());
    link_.drop(error);
    return finish(ticket, 0, std::move(error));
  }
  job.skipped = job.keys.size() - pages->size();
  if (!pages->empty()) return submit(ticket, job, *pages);
  // The job's other ranks wait for the end of this one.
  const std::uint32_t shards = state_.options.shards.value_or(state_.options.ranks);
  const std::uint32_t own = std::max(1U, state_.options.cells);
  if (shards > own) cleanup_.publish_nothing(job.job);
  finish(ticket, 0, std::nullopt);
}

std::optional<std::vector<PageCopies::Page>> Saves::place(const SaveJob& job,
                                                          const std::vector<std::uint32_t>& slots) {
  if (slots.size() != job.keys.size()) return std::nullopt;
  const std::uint64_t last_begin = state_.last_page_begin(job.kind);
  std::vector<PageCopies::Page> pages;
  pages.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == kNoFrame) continue;
    const std::uint64_t offset = slots[i] * kSlotAlignment;
    if (offset > last_begin) return std::nullopt;
    pages.push_back({.place = i, .pool_offset = offset, .checksum = takes_checksum()});
  }
  return pages;
}

bool Saves::takes_checksum() {
  switch (state_.options.verify) {
    case PageVerification::kOff:
      return false;
    case PageVerification::kSample:
      return chance_() % state_.options.sample_one_in == 0;
    case PageVerification::kAll:
      return true;
  }
  return false;
}

void Saves::submit(std::uint64_t ticket, SaveJob& job, std::span<const PageCopies::Page> pages) {
  job.phase = SaveJob::Phase::kCopying;
  job.copies = PageCopies(state_.kinds[job.kind], job.blocks, pages, ticket, state_.last_ticket);
  job.copies.submit(state_.device, job.after,
                    {.direction = Device::Direction::kSave, .job = ticket}, state_.batches);
  if (!job.copies.error()) watch(ticket, job);
  if (job.copies.in_flight() == 0) on_all_copied(ticket, job);
}

void Saves::on_copied(const BatchOwner& owner, Device::Completion&& completion) {
  if (owner.is_mark) return on_final(owner.job, completion);
  SaveJob& job = state_.saves.at(owner.job);
  job.copies.take(owner.member, std::move(completion), state_.device);
  if (job.copies.in_flight() == 0) on_all_copied(owner.job, job);
}

void Saves::on_all_copied(std::uint64_t ticket, SaveJob& job) {
  if (job.connection_lost || !link_.is_connected()) {
    return finish(ticket, 0, Error{Errc::kPeerLost, "the connection to the server was lost"});
  }
  if (job.copies.error()) {
    cleanup_.abandon(job.job);
    return finish(ticket, 0, job.copies.error());
  }
  publish(ticket, job);
}

void Saves::publish(std::uint64_t ticket, SaveJob& job) {
  job.phase = SaveJob::Phase::kPublishing;
  auto request = link_.session().publishRequest();
  write_job(job.job, request.initJob());
  const std::vector<std::uint64_t> checksums = job.copies.checksums_of_shards();
  if (!checksums.empty()) {
    write_numbers(std::span(checksums),
                  request.initChecksums(static_cast<unsigned>(checksums.size())));
  }
  const std::size_t pages = job.copies.pages();
  tasks_.add(link_
                 .call(kj::mv(request), state_.options.link.open_deadline, "publish",
                       [](auto& answer) { return read_done(answer); })
                 .then([this, ticket, pages](Result<void>&& done) {
                   const auto found = state_.saves.find(ticket);
                   if (found == state_.saves.end()) return;  // It ended with its connection.
                   if (!done) return finish(ticket, 0, std::move(done.error()));
                   if (found->second.guard && !found->second.is_ending) {
                     return await_reads(ticket, found->second);
                   }
                   finish(ticket, pages, std::nullopt);
                 }));
}

void Saves::await_reads(std::uint64_t ticket, SaveJob& job) {
  job.phase = SaveJob::Phase::kReleasing;
  auto request = link_.session().awaitReadsRequest();
  write_job(job.job, request.initJob());
  const std::size_t pages = job.copies.pages();
  tasks_.add(link_
                 .call(kj::mv(request), kReadsEnd + state_.options.link.open_deadline,
                       "await_reads", [](auto& answer) { return read_done(answer); })
                 .then([this, ticket, pages](Result<void>&& done) {
                   if (!done) {
                     kLog.debug("await_reads failed error=\"{}\"", to_string(done.error()));
                   }
                   // In each case: an engine that still reads finds the guard closed.
                   if (state_.saves.contains(ticket)) finish(ticket, pages, std::nullopt);
                 }));
}

void Saves::end(bool lost) {
  std::vector<std::uint64_t> unanswered;
  std::vector<std::uint64_t> sealed;
  for (auto& [ticket, job] : state_.saves) {
    job.connection_lost = lost;
    job.is_ending = true;
    if (job.phase == SaveJob::Phase::kReleasing) sealed.push_back(ticket);
    if (job.phase == SaveJob::Phase::kAsking ||
        (lost && job.phase == SaveJob::Phase::kPublishing)) {
      unanswered.push_back(ticket);
    }
  }
  for (const std::uint64_t ticket : sealed) {
    finish(ticket, state_.saves.at(ticket).copies.pages(), std::nullopt);
  }
  for (const std::uint64_t ticket : unanswered) {
    if (!lost) cleanup_.abandon(state_.saves.at(ticket).job);
    finish(ticket, 0, unanswered_error(lost));
  }
}

void Saves::finish(std::uint64_t ticket, std::size_t sealed_blocks, std::optional<Error> error) {
  const auto node = state_.saves.extract(ticket);
  PEGA_ASSERT(!node.empty(), "save {} ended twice", ticket);
  // Before the report: from then on the engine may overwrite the blocks.
  const std::optional<Guard>& guard = node.mapped().guard;
  if (guard && !state_.options.mistakes.keeps_guards) state_.guards->close(*guard);
  state_.report(node.mapped(), sealed_blocks, std::move(error));
  on_end_();
}

}  // namespace pegaflow
