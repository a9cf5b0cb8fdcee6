#include "client/mover/loads.h"

#include <algorithm>
#include <iterator>
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
  LoadJob& job = state_.loads.emplace(ticket, std::move(accepted)).first->second;
  job.error = std::move(refusal);
  bool asks = false;
  for (std::size_t i = 0; i < job.parts.size() && !job.error; ++i) {
    LoadPart& part = job.parts[i];
    part.pin = i == 0 ? ticket : ++state_.last_ticket;
    if (state_.kinds[part.kind].members.empty()) {  // This rank has no bytes of it.
      part.phase = LoadPart::Phase::kEnded;
      part.done = part.count;
      continue;
    }
    asks = true;
    open({ticket, i});
  }
  if (!asks) finish(ticket);
}

void Loads::open(const PartId& id) {
  LoadJob& job = state_.loads.at(id.ticket);
  LoadPart& part = job.parts[id.index];
  const std::size_t left = part.count - part.done;
  auto request = link_.session().openRequest();
  write_id(job.token, request.initToken());
  request.setFirst(static_cast<std::uint32_t>(part.first + part.done));
  request.setCount(static_cast<std::uint32_t>(left));
  request.setPin(part.pin);
  request.setKind(static_cast<std::uint8_t>(part.kind));
  Duration patience = Duration::zero();
  part.worth_until.reset();
  if (part.coming_until) {
    const TimePoint now = state_.clock.now();
    patience = std::max(Duration::zero(), *part.coming_until - now);
    if (const auto worth = job.pace.worth(left, now)) {
      part.worth_until = now + *worth;
      patience = std::min(patience, *worth + LoadPace::kSlack);
      request.setWorthMicros(to_micros(*worth));
      request.setComputeMicros(to_micros(job.pace.once_begun(left)));
    } else if (job.pace.is_judged()) {
      request.setWorthMicros(kWorthForever);
    }
    request.setPatienceMs(
        static_cast<std::uint32_t>(std::chrono::ceil<std::chrono::milliseconds>(patience).count()));
  }
  tasks_.add(link_
                 .call(kj::mv(request), patience + state_.options.link.open_deadline, "open",
                       [](auto& answer) -> Result<Opened> {
                         PEGA_TRY_LET(auto slots, read_slots(answer));
                         PEGA_TRY_LET(auto checksums,
                                      read_numbers<std::uint64_t>(answer.getChecksums()));
                         return Opened{.slots = std::move(slots),
                                       .checksums = std::move(checksums),
                                       .coming = answer.getComing(),
                                       .late = read_late(answer.getLate())};
                       })
                 .then([this, id](Result<Opened>&& opened) { on_opened(id, std::move(opened)); }));
}

void Loads::on_opened(const PartId& id, Result<Opened>&& opened) {
  const auto found = state_.loads.find(id.ticket);
  if (found == state_.loads.end()) return;  // It ended with its connection.
  LoadJob& job = found->second;
  LoadPart& part = job.parts[id.index];
  if (part.phase == LoadPart::Phase::kEnded) return;  // The same, but other parts have not ended.
  PEGA_ASSERT(part.phase == LoadPart::Phase::kAsking, "load {} received slots twice", id.ticket);
  if (!opened) {
    // After its deadline the server may still execute the call: the next call drops the result.
    if (opened.error().code == Errc::kTimeout) cleanup_.release(part.pin);
    return end_part(id, job.gave_up ? job.gave_up : std::move(opened.error()));
  }
  if (job.gave_up) {
    cleanup_.release(part.pin);
    return end_part(id, job.gave_up);
  }
  if (state_.options.verify != PageVerification::kOff) {
    part.checksums = std::move(opened->checksums);
  }
  const std::optional<std::vector<PageCopies::Page>> pages = place(part, *opened);
  if (!pages) {
    Error error = bad_slots(opened->slots.size(), part.count);
    link_.drop(error);
    job.in_doubt = true;
    return end_part(id, std::move(error));
  }
  if (opened->coming != 0 && !part.coming_until) {
    part.coming_until = state_.clock.now() + state_.options.coming_patience;
  }
  if (pages->empty()) return wait_for_coming(id, *opened);
  submit(id, *pages);
}

std::optional<std::vector<PageCopies::Page>> Loads::place(const LoadPart& part,
                                                          const Opened& opened) const {
  const std::vector<std::uint32_t>& slots = opened.slots;
  const std::size_t left = part.count - part.done;
  if (slots.size() > left) return std::nullopt;
  const std::size_t missing = left - slots.size();
  if (missing != 0 && (opened.coming == 0 || opened.coming > missing)) return std::nullopt;
  if (!part.checksums.empty() && part.checksums.size() != slots.size()) return std::nullopt;
  const std::uint64_t last_begin = state_.last_page_begin(part.kind);
  std::vector<PageCopies::Page> pages;
  pages.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::uint64_t offset = slots[i] * kSlotAlignment;
    if (offset > last_begin) return std::nullopt;
    const bool checksum = !part.checksums.empty() && part.checksums[i] != kNoChecksum;
    pages.push_back({.place = part.done + i, .pool_offset = offset, .checksum = checksum});
  }
  return pages;
}

void Loads::wait_for_coming(const PartId& id, const Opened& opened) {
  // The server delayed its response until a block arrived, or as long as waiting was useful.
  if (opened.late) return cut(id, *opened.late);
  const LoadPart& part = part_of(id);
  const TimePoint now = state_.clock.now();
  // An older server does not judge.
  if (part.worth_until && now >= *part.worth_until) return cut(id, LoadPace::Cut::kSlow);
  if (now < *part.coming_until) return open(id);
  end_part(id, Error{Errc::kTimeout,
                     fmt::format("{} blocks did not arrive from another node within {}",
                                 opened.coming, format_duration(state_.options.coming_patience))});
}

void Loads::cut(const PartId& id, LoadPace::Cut why) {
  LoadJob& job = state_.loads.at(id.ticket);
  const LoadPart& part = job.parts[id.index];
  job.cut = why;
  end_part(id,
           Error{Errc::kTimeout, fmt::format("{} of {} blocks are computed sooner than they arrive",
                                             part.count - part.done, part.count)});
}

void Loads::submit(const PartId& id, std::span<const PageCopies::Page> pages) {
  LoadJob& job = state_.loads.at(id.ticket);
  LoadPart& part = job.parts[id.index];
  part.phase = LoadPart::Phase::kCopying;
  part.submitted = state_.clock.now();
  part.copies =
      PageCopies(state_.kinds[part.kind], part.blocks, pages, part.pin, state_.last_ticket);
  note_copying(id.ticket, job);
  part.copies.submit(state_.device, Device::Event::kNow,
                     {.direction = Device::Direction::kLoad, .job = id.ticket, .part = id.index},
                     state_.batches);
  if (part.copies.error()) state_.copying.remove(id.ticket);
  if (part.copies.in_flight() != 0) return start_deadline(id);
  cleanup_.release(part.pin);
  end_part(id, part.copies.error());
}

void Loads::note_copying(std::uint64_t ticket, const LoadJob& job) {
  std::vector<std::uint64_t> batches;
  std::size_t blocks = 0;
  std::uint64_t bytes = job.bytes;
  for (const LoadPart& part : job.parts) {
    blocks += part.count;
    if (part.phase == LoadPart::Phase::kEnded) continue;
    // No load is whole before its last pieces, and pages are compared only after their copies.
    const bool is_last =
        part.phase == LoadPart::Phase::kCopying && part.done + part.copies.pages() == part.count;
    if (!is_last || part.copies.wants_checksums()) return;
    std::ranges::copy(part.copies.tickets(), std::back_inserter(batches));
    bytes += part.copies.pages() * state_.kinds[part.kind].page_bytes;
  }
  state_.copying.add(ticket, std::move(batches), {.load = job.id, .blocks = blocks, .bytes = bytes},
                     job.accepted);
}

void Loads::start_deadline(const PartId& id) {
  LoadJob& job = state_.loads.at(id.ticket);
  const LoadPart& part = job.parts[id.index];
  bytes_queued_ += part.copies.pages() * state_.kinds[part.kind].page_bytes;
  const double copy_seconds =
      static_cast<double>(bytes_queued_) / state_.options.load_bytes_per_second;
  Duration deadline =
      state_.options.load_patience +
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(copy_seconds));
  bool is_cut = false;
  if (const auto computing = job.pace.computing(part.count)) {
    const Duration longest =
        std::max<Duration>(kCutAfter, *computing + kCutAfter - (state_.clock.now() - job.accepted));
    is_cut = longest < deadline;
    deadline = std::min(deadline, longest);
  }
  deadlines_.emplace(
      part.pin,
      link_.timer()
          .afterDelay(deadline.count() * kj::NANOSECONDS)
          .then([this, ticket = id.ticket, deadline, is_cut] {
            LoadJob& late = state_.loads.at(ticket);
            if (is_cut) late.cut = LoadPace::Cut::kSlow;
            give_up(late, {Errc::kTimeout,
                           fmt::format("not loaded within {}", format_duration(deadline))});
          })
          .eagerlyEvaluate([this](kj::Exception&& exception) { tasks_.add(kj::mv(exception)); }));
}

void Loads::count_copied(LoadJob& job, LoadPart& part) {
  deadlines_.erase(part.pin);
  bytes_queued_ -= part.copies.pages() * state_.kinds[part.kind].page_bytes;
  job.bytes += part.copies.bytes_copied();
  const TimePoint now = state_.clock.now();
  // Loads overlap on the device: each counts from the end of the one before it.
  job.copying += now - std::max(part.submitted, last_end_);
  last_end_ = now;
}

void Loads::on_copied(const BatchOwner& owner, Device::Completion&& completion) {
  const PartId id{owner.job, owner.part};
  LoadPart& part = part_of(id);
  const bool followed =
      state_.copying.leave(id.ticket, completion.ticket, !completion.error.has_value());
  part.copies.take(owner.member, std::move(completion), state_.device);
  if (part.copies.in_flight() == 0) on_all_copied(id, followed);
}

void Loads::on_all_copied(const PartId& id, bool followed) {
  LoadJob& job = state_.loads.at(id.ticket);
  LoadPart& part = job.parts[id.index];
  count_copied(job, part);
  // Queries the kernel after the last copy: the loop may not have read the end of the stream yet.
  if (!followed && (job.connection_lost || !link_.is_up())) {
    job.in_doubt = true;
    return end_part(id, Error{Errc::kPeerLost,
                              "the connection to the server was lost before the last copy ended"});
  }
  const std::vector<std::uint32_t> corrupt = find_corrupt(job, part);
  if (!corrupt.empty()) report_corrupt(part.pin, corrupt);
  cleanup_.release(part.pin);
  std::optional<Error> error = part.copies.error();
  if (error && job.gave_up) error = job.gave_up;
  std::size_t good = part.copies.good_pages();
  if (!corrupt.empty()) {
    good = corrupt.front();
    error = Error{Errc::kCorrupt, fmt::format("page {} of {} differs from the saved page",
                                              part.done + corrupt.front(), part.count)};
  }
  part.done += good;
  if (error || part.done == part.count) return end_part(id, std::move(error));
  // The next piece has a pin of its own.
  part.phase = LoadPart::Phase::kAsking;
  part.pin = ++state_.last_ticket;
  open(id);
}

std::vector<std::uint32_t> Loads::find_corrupt(LoadJob& job, const LoadPart& part) {
  std::vector<std::uint32_t> corrupt;
  const std::vector<std::uint64_t> loaded = part.copies.checksums();
  const std::size_t count =
      std::min({part.copies.good_pages(), part.checksums.size(), loaded.size()});
  for (std::size_t i = 0; i < count; ++i) {
    if (part.checksums[i] == kNoChecksum || loaded[i] == kNoChecksum) continue;
    ++job.verified;
    if (part.checksums[i] != loaded[i]) corrupt.push_back(static_cast<std::uint32_t>(i));
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
    if (job.id == load) give_up(job, {Errc::kCancelled, "the engine cancelled the load"});
  }
}

void Loads::give_up(LoadJob& job, const Error& why) {
  if (!job.gave_up) job.gave_up = why;
  for (const LoadPart& part : job.parts) {
    if (part.phase == LoadPart::Phase::kCopying) part.copies.cancel(state_.device);
    // The server may delay its response until a block arrives: the release makes it respond now.
    if (part.phase == LoadPart::Phase::kAsking && part.coming_until) cleanup_.release(part.pin);
  }
}

void Loads::end(bool lost) {
  std::vector<PartId> unanswered;
  for (auto& [ticket, job] : state_.loads) {
    job.connection_lost = lost;
    for (std::size_t i = 0; i < job.parts.size(); ++i) {
      if (job.parts[i].phase == LoadPart::Phase::kAsking) unanswered.push_back({ticket, i});
    }
  }
  for (const PartId& id : unanswered) {
    if (!lost) cleanup_.release(part_of(id).pin);
    state_.loads.at(id.ticket).in_doubt = true;
    end_part(id, unanswered_error(lost));
  }
}

void Loads::end_part(const PartId& id, std::optional<Error> error) {
  LoadJob& job = state_.loads.at(id.ticket);
  job.parts[id.index].phase = LoadPart::Phase::kEnded;
  if (error && !job.error) {
    job.error = std::move(error);
    give_up(job, *job.error);
  }
  const bool over = std::all_of(job.parts.begin(), job.parts.end(), [](const LoadPart& part) {
    return part.phase == LoadPart::Phase::kEnded;
  });
  if (over) finish(id.ticket);
}

void Loads::finish(std::uint64_t ticket) {
  const auto node = state_.loads.extract(ticket);
  PEGA_ASSERT(!node.empty(), "load {} ended twice", ticket);
  state_.report(node.mapped());
  on_end_();
}

}  // namespace pegaflow
