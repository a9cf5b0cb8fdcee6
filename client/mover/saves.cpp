#include "client/mover/saves.h"

#include <utility>

#include "base/assert.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/room_time.h"
#include "client/mover/read_slots.h"

namespace pegaflow {
namespace {

/// The server's value for a key that is to be skipped.
constexpr std::uint32_t kNoFrame = 0xFFFFFFFF;

}  // namespace

void Saves::begin(SaveJob&& accepted, std::optional<Error> refusal) {
  const std::uint64_t ticket = ++state_.last_ticket;
  SaveJob& job = state_.saves.emplace(ticket, std::move(accepted)).first->second;
  if (refusal) return finish(ticket, 0, 0, std::move(refusal));
  if (!state_.options.saves) {
    // Another rank saves these bytes; its report shows whether that succeeded.
    job.skipped = job.blocks.size();
    return finish(ticket, 0, 0, std::nullopt);
  }
  auto request = link_.session().reserveRequest(
      capnp::MessageSize{keys_words(job.keys.size(), BlockKey::kMaxBytes) + 32, 0});
  write_job(job.job, request.initJob());
  write_keys(job.keys, BlockKey::kMaxBytes, request.initKeys());
  const Duration deadline = state_.options.link.reserve_deadline +
                            time_to_make_room(job.keys.size() * state_.layout.page_bytes());
  tasks_.add(link_
                 .call(kj::mv(request), deadline, "reserve",
                       [](auto& answer) { return read_slots(answer); })
                 .then([this, ticket](Result<std::vector<std::uint32_t>>&& slots) {
                   on_slots(ticket, std::move(slots));
                 }));
}

void Saves::on_slots(std::uint64_t ticket, Result<std::vector<std::uint32_t>>&& slots) {
  const auto found = state_.saves.find(ticket);
  if (found == state_.saves.end()) return;  // It ended with its connection.
  SaveJob& job = found->second;
  PEGA_ASSERT(job.phase == MoverJob::Phase::kAsking, "save {} received slots twice", ticket);
  if (!slots) {
    // After its deadline the server may still execute the call: the next call drops the result.
    if (slots.error().code == Errc::kTimeout) cleanup_.abandon(job.job);
    return finish(ticket, 0, 0, std::move(slots.error()));
  }
  std::optional<std::vector<Device::Copy>> copies = place(job, *slots);
  if (!copies) {
    Error error = bad_slots(slots->size(), job.blocks.size());
    link_.drop(error);
    return finish(ticket, 0, 0, std::move(error));
  }
  job.skipped = job.blocks.size() - copies->size();
  if (!copies->empty()) return submit(ticket, job, std::move(*copies));
  // The job's other ranks wait for the end of this one.
  if (state_.options.shards.value_or(state_.options.ranks) > 1) cleanup_.publish_nothing(job.job);
  finish(ticket, 0, 0, std::nullopt);
}

std::optional<std::vector<Device::Copy>> Saves::place(const SaveJob& job,
                                                      const std::vector<std::uint32_t>& slots) {
  if (slots.size() != job.blocks.size()) return std::nullopt;
  const std::uint64_t last_begin = state_.last_page_begin();
  std::vector<Device::Copy> copies;
  copies.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == kNoFrame) continue;
    const std::uint64_t offset = slots[i] * kSlotAlignment;
    if (offset > last_begin) return std::nullopt;
    copies.push_back({job.blocks[i], offset, takes_checksum()});
  }
  return copies;
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

void Saves::submit(std::uint64_t ticket, SaveJob& job, std::vector<Device::Copy>&& copies) {
  job.copies = copies.size();
  job.phase = MoverJob::Phase::kCopying;
  Result<void> accepted =
      state_.device.submit({ticket, Device::Direction::kSave, job.after, std::move(copies)});
  if (accepted) return;
  cleanup_.abandon(job.job);
  finish(ticket, 0, 0, std::move(accepted.error()));
}

void Saves::on_copied(const Device::Completion& completion) {
  const std::uint64_t ticket = completion.ticket;
  SaveJob& job = state_.saves.at(ticket);
  check_completion(job, completion);
  if (job.connection_lost || !link_.is_connected()) {
    return finish(ticket, 0, completion.copied,
                  Error{Errc::kPeerLost, "the connection to the server was lost"});
  }
  if (completion.error) {
    cleanup_.abandon(job.job);
    return finish(ticket, 0, completion.copied, completion.error);
  }
  publish(ticket, job, completion);
}

void Saves::publish(std::uint64_t ticket, SaveJob& job, const Device::Completion& completion) {
  job.phase = MoverJob::Phase::kPublishing;
  auto request = link_.session().publishRequest();
  write_job(job.job, request.initJob());
  const std::span<const std::uint64_t> checksums = completion.checksums;
  if (!checksums.empty()) {
    write_numbers(checksums, request.initChecksums(static_cast<unsigned>(checksums.size())));
  }
  const std::size_t copied = completion.copied;
  tasks_.add(link_
                 .call(kj::mv(request), state_.options.link.open_deadline, "publish",
                       [](auto& answer) { return read_done(answer); })
                 .then([this, ticket, copied](Result<void>&& done) {
                   if (!state_.saves.contains(ticket)) return;  // It ended with its connection.
                   if (done) return finish(ticket, copied, copied, std::nullopt);
                   finish(ticket, 0, copied, std::move(done.error()));
                 }));
}

void Saves::end(bool lost) {
  std::vector<std::uint64_t> unanswered;
  for (auto& [ticket, job] : state_.saves) {
    job.connection_lost = lost;
    if (job.phase == MoverJob::Phase::kAsking ||
        (lost && job.phase == MoverJob::Phase::kPublishing)) {
      unanswered.push_back(ticket);
    }
  }
  for (const std::uint64_t ticket : unanswered) {
    const SaveJob& job = state_.saves.at(ticket);
    if (!lost) cleanup_.abandon(job.job);
    finish(ticket, 0, job.phase == MoverJob::Phase::kPublishing ? job.copies : 0,
           unanswered_error(lost));
  }
}

void Saves::finish(std::uint64_t ticket, std::size_t sealed_blocks, std::size_t copied_pages,
                   std::optional<Error> error) {
  const auto node = state_.saves.extract(ticket);
  PEGA_ASSERT(!node.empty(), "save {} ended twice", ticket);
  state_.report(node.mapped(), sealed_blocks, copied_pages, std::move(error));
  on_end_();
}

}  // namespace pegaflow
