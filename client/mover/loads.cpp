#include "client/mover/loads.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "base/units.h"
#include "capnp/wire/codec.h"
#include "client/mover/read_slots.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"mover"};

/// A copy may take this much longer than computing: the delay that a stuck source may add.
constexpr Duration kCutAfter = std::chrono::milliseconds(20);

/// The least time between two lines about wrong pages: failing memory causes many.
constexpr Duration kCorruptLineInterval = std::chrono::seconds(10);

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

}  // namespace

void Loads::begin(LoadJob&& accepted, std::optional<Error> refusal) {
  const std::uint64_t ticket = ++state_.last_ticket;
  accepted.pin = ticket;
  state_.loads.emplace(ticket, std::move(accepted));
  if (refusal) return finish(ticket, 0, 0, std::move(refusal));
  open(ticket);
}

void Loads::open(std::uint64_t ticket) {
  LoadJob& job = state_.loads.at(ticket);
  const std::size_t left = job.blocks.size() - job.done;
  auto request = link_.session().openRequest();
  write_id(job.token, request.initToken());
  request.setFirst(static_cast<std::uint32_t>(job.first + job.done));
  request.setCount(static_cast<std::uint32_t>(left));
  request.setPin(job.pin);
  Duration patience = Duration::zero();
  job.worth_until.reset();
  if (job.coming_until) {
    const TimePoint now = state_.clock.now();
    patience = std::max(Duration::zero(), *job.coming_until - now);
    if (const auto worth = job.pace.worth(left, now)) {
      job.worth_until = now + *worth;
      patience = std::min(patience, *worth + LoadPace::kSlack);
      request.setWorthMicros(to_micros(*worth));
      request.setComputeMicros(to_micros(job.pace.once_begun(left)));
    } else if (job.pace.is_judged()) {
      request.setWorthMicros(kWorthForever);
    }
    request.setPatienceMs(
        static_cast<std::uint32_t>(std::chrono::ceil<std::chrono::milliseconds>(patience).count()));
  }
  tasks_.add(
      link_
          .call(kj::mv(request), patience + state_.options.link.open_deadline, "open",
                [](auto& answer) -> Result<Opened> {
                  PEGA_TRY_LET(auto slots, read_slots(answer));
                  PEGA_TRY_LET(auto checksums, read_numbers<std::uint64_t>(answer.getChecksums()));
                  return Opened{.slots = std::move(slots),
                                .checksums = std::move(checksums),
                                .coming = answer.getComing(),
                                .late = read_late(answer.getLate())};
                })
          .then([this, ticket](Result<Opened>&& opened) { on_opened(ticket, std::move(opened)); }));
}

void Loads::on_opened(std::uint64_t ticket, Result<Opened>&& opened) {
  const auto found = state_.loads.find(ticket);
  if (found == state_.loads.end()) return;  // It ended with its connection.
  LoadJob& job = found->second;
  PEGA_ASSERT(job.phase == MoverJob::Phase::kAsking, "load {} received slots twice", ticket);
  if (!opened) {
    // After its deadline the server may still execute the call: the next call drops the result.
    if (opened.error().code == Errc::kTimeout) cleanup_.release(job.pin);
    if (job.gave_up) opened.error() = std::move(*job.gave_up);
    return finish(ticket, job.done, job.copied, std::move(opened.error()));
  }
  if (job.gave_up) {
    cleanup_.release(job.pin);
    return finish(ticket, job.done, job.copied, std::move(job.gave_up));
  }
  if (state_.options.verify != PageVerification::kOff) job.checksums = std::move(opened->checksums);
  std::optional<std::vector<Device::Copy>> copies = place(job, *opened);
  if (!copies) {
    Error error = bad_slots(opened->slots.size(), job.blocks.size());
    link_.drop(error);
    return finish(ticket, 0, 0, std::move(error));
  }
  if (opened->coming != 0 && !job.coming_until) {
    job.coming_until = state_.clock.now() + state_.options.coming_patience;
  }
  if (copies->empty()) return wait_for_coming(ticket, job, *opened);
  submit(ticket, job, std::move(*copies));
}

std::optional<std::vector<Device::Copy>> Loads::place(const LoadJob& job,
                                                      const Opened& opened) const {
  const std::vector<std::uint32_t>& slots = opened.slots;
  const std::size_t left = job.blocks.size() - job.done;
  if (slots.size() > left) return std::nullopt;
  const std::size_t missing = left - slots.size();
  if (missing != 0 && (opened.coming == 0 || opened.coming > missing)) return std::nullopt;
  if (!job.checksums.empty() && job.checksums.size() != slots.size()) return std::nullopt;
  const std::uint64_t last_begin = state_.last_page_begin();
  std::vector<Device::Copy> copies;
  copies.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::uint64_t offset = slots[i] * kSlotAlignment;
    if (offset > last_begin) return std::nullopt;
    const bool checksum = !job.checksums.empty() && job.checksums[i] != kNoChecksum;
    copies.push_back({job.blocks[job.done + i], offset, checksum});
  }
  return copies;
}

void Loads::wait_for_coming(std::uint64_t ticket, LoadJob& job, const Opened& opened) {
  // The server delayed its response until a block arrived, or as long as waiting was useful.
  if (opened.late) return cut(ticket, job, *opened.late);
  const TimePoint now = state_.clock.now();
  // An older server does not judge.
  if (job.worth_until && now >= *job.worth_until) return cut(ticket, job, LoadPace::Cut::kSlow);
  if (now < *job.coming_until) return open(ticket);
  finish(ticket, job.done, job.copied,
         Error{Errc::kTimeout,
               fmt::format("{} blocks did not arrive from another node within {}", opened.coming,
                           format_duration(state_.options.coming_patience))});
}

void Loads::cut(std::uint64_t ticket, LoadJob& job, LoadPace::Cut why) {
  job.cut = why;
  finish(ticket, job.done, job.copied,
         Error{Errc::kTimeout, fmt::format("{} of {} blocks are computed sooner than they arrive",
                                           job.blocks.size() - job.done, job.blocks.size())});
}

void Loads::submit(std::uint64_t ticket, LoadJob& job, std::vector<Device::Copy>&& copies) {
  job.copies = copies.size();
  job.phase = MoverJob::Phase::kCopying;
  job.submitted = state_.clock.now();
  // Before the device has it, because the engine may call follow() at once.
  note_copying(ticket, job, copies);
  Result<void> accepted = state_.device.submit(
      {ticket, Device::Direction::kLoad, Device::Event::kNow, std::move(copies)});
  if (!accepted) {
    no_longer_copying(ticket);
    cleanup_.release(job.pin);
    return finish(ticket, job.done, job.copied, std::move(accepted.error()));
  }
  start_deadline(ticket, job);
}

void Loads::note_copying(std::uint64_t ticket, const LoadJob& job,
                         std::span<const Device::Copy> copies) {
  // No load is whole before its last piece, and pages are compared only after their copies.
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

bool Loads::no_longer_copying(std::uint64_t ticket) {
  const std::lock_guard lock(state_.copying_mutex);
  const auto load = std::find_if(state_.copying.begin(), state_.copying.end(),
                                 [&](const CopyingLoad& one) { return one.ticket == ticket; });
  if (load == state_.copying.end()) return false;
  const bool followed = load->followed;
  state_.copying.erase(load);
  return followed;
}

void Loads::start_deadline(std::uint64_t ticket, const LoadJob& job) {
  bytes_queued_ += job.copies * state_.layout.page_bytes();
  const double copy_seconds =
      static_cast<double>(bytes_queued_) / state_.options.load_bytes_per_second;
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
  deadlines_.emplace(
      ticket,
      link_.timer()
          .afterDelay(deadline.count() * kj::NANOSECONDS)
          .then([this, ticket, deadline, is_cut] {
            LoadJob& late = state_.loads.at(ticket);
            if (is_cut) late.cut = LoadPace::Cut::kSlow;
            late.gave_up = Error{Errc::kTimeout,
                                 fmt::format("not loaded within {}", format_duration(deadline))};
            state_.device.cancel(ticket);
          })
          .eagerlyEvaluate([this](kj::Exception&& exception) { tasks_.add(kj::mv(exception)); }));
}

void Loads::count_copied(std::uint64_t ticket, LoadJob& job) {
  deadlines_.erase(ticket);
  bytes_queued_ -= job.copies * state_.layout.page_bytes();
  const TimePoint now = state_.clock.now();
  // Loads overlap on the device: each counts from the end of the one before it.
  job.copying += now - std::max(job.submitted, last_end_);
  last_end_ = now;
}

void Loads::on_copied(const Device::Completion& completion) {
  const std::uint64_t ticket = completion.ticket;
  const auto found = state_.loads.find(ticket);
  PEGA_ASSERT(found != state_.loads.end(), "the device completed batch {}, which is unknown",
              ticket);
  LoadJob& job = found->second;
  check_completion(job, completion);
  count_copied(ticket, job);
  const bool followed = no_longer_copying(ticket);
  // Queries the kernel after the last copy: the loop may not have read the end of the stream yet.
  if (!followed && (job.connection_lost || !link_.is_up())) {
    return finish(
        ticket, 0, job.copied + completion.copied,
        Error{Errc::kPeerLost, "the connection to the server was lost before the last copy ended"});
  }
  const std::vector<std::uint32_t> corrupt = find_corrupt(job, completion);
  if (!corrupt.empty()) report_corrupt(job.pin, corrupt);
  cleanup_.release(job.pin);
  std::optional<Error> error = completion.error;
  if (error && job.gave_up) error = std::move(job.gave_up);
  std::size_t good = completion.copied;
  if (!corrupt.empty()) {
    good = corrupt.front();
    error = Error{Errc::kCorrupt, fmt::format("page {} of {} differs from the saved page",
                                              job.done + corrupt.front(), job.blocks.size())};
  }
  job.done += good;
  job.copied += completion.copied;
  if (error || job.done == job.blocks.size()) {
    return finish(ticket, job.done, job.copied, std::move(error));
  }
  // The next piece has a pin of its own.
  job.phase = MoverJob::Phase::kAsking;
  job.pin = ++state_.last_ticket;
  open(ticket);
}

std::vector<std::uint32_t> Loads::find_corrupt(LoadJob& job, const Device::Completion& completion) {
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

void Loads::report_corrupt(std::uint64_t pin, std::span<const std::uint32_t> places) {
  corrupt_pages_ += places.size();
  const TimePoint now = state_.clock.now();
  if (!last_corrupt_line_ || now - *last_corrupt_line_ >= kCorruptLineInterval) {
    last_corrupt_line_ = now;
    kLog.error(
        "loaded pages differ from the saved ones, they are computed instance={} pages={} "
        "since_start={}",
        state_.options.link.instance, places.size(), corrupt_pages_);
  }
  cleanup_.report_corrupt(pin, places);
}

void Loads::cancel(std::uint64_t load) {
  for (auto& [ticket, job] : state_.loads) {
    if (job.id != load) continue;
    if (!job.gave_up) job.gave_up = Error{Errc::kCancelled, "the engine cancelled the load"};
    if (job.phase == MoverJob::Phase::kCopying) state_.device.cancel(ticket);
    // The server may delay its response until a block arrives: the release makes it respond now.
    if (job.phase == MoverJob::Phase::kAsking && job.coming_until) cleanup_.release(job.pin);
  }
}

void Loads::end(bool lost) {
  std::vector<std::uint64_t> unanswered;
  for (auto& [ticket, job] : state_.loads) {
    job.connection_lost = lost;
    if (job.phase == MoverJob::Phase::kAsking) unanswered.push_back(ticket);
  }
  for (const std::uint64_t ticket : unanswered) {
    if (!lost) cleanup_.release(state_.loads.at(ticket).pin);
    finish(ticket, 0, 0, unanswered_error(lost));
  }
}

void Loads::finish(std::uint64_t ticket, std::size_t good_blocks, std::size_t copied_pages,
                   std::optional<Error> error) {
  auto node = state_.loads.extract(ticket);
  PEGA_ASSERT(!node.empty(), "load {} ended twice", ticket);
  state_.report(std::move(node.mapped()), good_blocks, copied_pages, std::move(error));
  on_end_();
}

}  // namespace pegaflow
