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

/// The keys of one openNext. A call that waits counts against the server's limit of a connection's
/// calls, with all of its keys.
constexpr std::size_t kKeysPerQuestion = 256;

/// The pause after a server had too many waiting calls.
constexpr Duration kBusyPause = std::chrono::milliseconds(100);

/// The least time between two lines about wrong pages: failing memory causes many.
constexpr Duration kCorruptLineInterval = std::chrono::seconds(10);

std::uint32_t to_micros(Duration time) {
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(time).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(micros, 1, kWorthForever - 1));
}

/// Whether a read from another engine failed in a way that the next one most likely does, too.
bool is_broken(const LoadPart& part, const Error& error) {
  return part.is_late || error.code == Errc::kPeerLost || error.code == Errc::kTimeout;
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
  if (job.is_following()) return open_next(id);
  LoadPart& part = job.parts[id.index];
  const std::size_t left = part.count - part.done;
  auto request = link_.session().openRequest();
  write_id(job.token, request.initToken());
  request.setFirst(static_cast<std::uint32_t>(part.first + part.done));
  request.setCount(static_cast<std::uint32_t>(left));
  request.setPin(part.pin);
  request.setKind(static_cast<std::uint8_t>(part.kind));
  if (state_.reads_pools) {
    const std::vector<std::uint64_t> known = state_.pools.known();
    write_numbers(std::span(known), request.initKnown(static_cast<unsigned>(known.size())));
    request.setThroughPool(job.pool_only);
  }
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
                         Opened opened{.slots = std::move(slots),
                                       .checksums = std::move(checksums),
                                       .coming = answer.getComing(),
                                       .late = read_late(answer.getLate())};
                         PEGA_TRY_LET(opened.pages, read_numbers<std::uint32_t>(answer.getPages()));
                         opened.pool = answer.getSource();
                         if (answer.hasFabric()) {
                           PEGA_TRY_LET(opened.fabric, read_fabric(answer.getFabric()));
                         }
                         return opened;
                       })
                 .then([this, id](Result<Opened>&& opened) { on_opened(id, std::move(opened)); }));
}

bool Loads::is_asking(const PartId& id) {
  if (!state_.loads.contains(id.ticket)) return false;  // It ended with its connection.
  const LoadPart& part = part_of(id);
  if (part.phase == LoadPart::Phase::kEnded) return false;  // The same; other parts have not ended.
  PEGA_ASSERT(part.phase == LoadPart::Phase::kAsking, "load {} received slots twice", id.ticket);
  return true;
}

void Loads::on_opened(const PartId& id, Result<Opened>&& opened) {
  if (!is_asking(id)) return;
  LoadJob& job = state_.loads.at(id.ticket);
  LoadPart& part = job.parts[id.index];
  if (!opened) {
    // After its deadline the server may still execute the call: the next call drops the result.
    if (opened.error().code == Errc::kTimeout) cleanup_.release(part.pin);
    return end_part(id, job.gave_up ? job.gave_up : std::move(opened.error()));
  }
  if (job.gave_up) {
    cleanup_.release(part.pin);
    return end_part(id, job.gave_up);
  }
  if (opened->pool != 0) return on_pages(id, *opened);
  if (state_.options.verify != PageVerification::kOff) {
    part.checksums = std::move(opened->checksums);
  }
  const std::optional<std::vector<PageCopies::Page>> pages = place(part, *opened);
  if (!pages) {
    return drop(id, bad_slots(opened->slots.size(), part.count));
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

// ---- pieces in the pool of another node

void Loads::on_pages(const PartId& id, const Opened& opened) {
  LoadPart& part = part_of(id);
  const std::size_t left = part.count - part.done;
  const bool fits =
      !opened.pages.empty() && opened.slots.empty() && opened.pages.size() + opened.coming == left;
  const bool asked = state_.reads_pools && !state_.loads.at(id.ticket).pool_only;
  if (!fits || !asked) return drop(id, bad_slots(opened.pages.size(), left));
  if (opened.fabric) {
    if (Result<void> added = state_.pools.add(opened.pool, *opened.fabric); !added) {
      return skip_pool(id, added.error());
    }
  }
  const Result<std::uint64_t> peer = state_.pools.begin(opened.pool, opened.pages);
  if (!peer && peer.error().code == Errc::kInternal) return drop(id, peer.error());
  if (!peer) return skip_pool(id, peer.error());
  part.pool = opened.pool;
  part.is_late = false;
  part.checksums.clear();
  std::vector<PageCopies::Page> pages;
  pages.reserve(opened.pages.size());
  for (std::size_t i = 0; i < opened.pages.size(); ++i) {
    pages.push_back({.place = part.done + i, .pool_offset = opened.pages[i]});
  }
  submit(id, pages, {.peer = *peer});
}

void Loads::skip_pool(const PartId& id, const Error& why) {
  kLog.debug("blocks are fetched through the pool of this node error=\"{}\"", to_string(why));
  state_.loads.at(id.ticket).pool_only = true;
  LoadPart& part = part_of(id);
  cleanup_.release(part.pin);
  // The wait for these blocks begins now.
  part.coming_until = state_.clock.now() + state_.options.coming_patience;
  go_on(id);
}

void Loads::confirm(const PartId& id) {
  LoadPart& part = part_of(id);
  std::optional<Error> error = part.copies.error();
  if (part.is_late) error = Error{Errc::kTimeout, "not read in time"};
  state_.pools.end(part.pool, error);
  part.phase = LoadPart::Phase::kConfirming;
  if (part.copies.good_pages() == 0) return on_confirmed(id, false);
  auto request = link_.session().confirmRequest();
  request.setPin(part.pin);
  tasks_.add(
      link_
          .call(kj::mv(request), state_.options.link.open_deadline + kLongestConfirm, "confirm",
                [](auto& answer) -> Result<bool> {
                  if (answer.hasError()) {
                    return tl::unexpected<Error>(read_error(answer.getError()));
                  }
                  return answer.getHeld();
                })
          .then([this, id](Result<bool>&& held) {
            // Otherwise the load has ended with its connection.
            const auto job = state_.loads.find(id.ticket);
            if (job == state_.loads.end()) return;
            const bool waits = job->second.parts[id.index].phase == LoadPart::Phase::kConfirming;
            if (waits) on_confirmed(id, held);
          }));
}

void Loads::on_confirmed(const PartId& id, const Result<bool>& held) {
  LoadJob& job = state_.loads.at(id.ticket);
  LoadPart& part = job.parts[id.index];
  const std::uint64_t pool = std::exchange(part.pool, 0);
  const std::size_t good = held.value_or(false) ? part.copies.good_pages() : 0;
  cleanup_.release(part.pin);
  part.done += good;
  job.direct_bytes += good * state_.kinds[part.kind].page_bytes;
  if (part.done == part.count) return end_part(id, std::nullopt);
  if (good != part.copies.pages()) {
    job.pool_only = true;
    // The wait for the others begins now.
    part.coming_until = state_.clock.now() + state_.options.coming_patience;
    kLog.debug("read {} of {} pages of another node's pool pool={} error=\"{}\"", good,
               part.copies.pages(), pool,
               part.copies.error() ? to_string(*part.copies.error())
               : held              ? "the pages were not kept in place"
                                   : to_string(held.error()));
  }
  go_on(id);
}

// ---- loads that follow their prefill

void Loads::open_next(const PartId& id) {
  const LoadJob& job = state_.loads.at(id.ticket);
  const LoadPart& part = job.parts[id.index];
  const Duration left = job.accepted + job.patience - state_.clock.now();
  const std::span<const BlockKey> keys = std::span(job.keys).subspan(part.done);
  const NextQuestion question{.pin = part.pin,
                              .keys = keys.first(std::min(keys.size(), kKeysPerQuestion)),
                              .patience = std::clamp(left, Duration::zero(), kLongestNextWait),
                              .pool_only = job.pool_next || job.pool_only,
                              .node = job.node};
  const auto is_wanted = [this, id] {
    return is_asking(id) && !state_.loads.at(id.ticket).gave_up;
  };
  tasks_.add(ask_next(link_, state_.sources, question, state_.options.link.open_deadline, is_wanted)
                 .then([this, id](Result<NextPiece>&& piece) { on_next(id, std::move(piece)); }));
}

void Loads::on_next(const PartId& id, Result<NextPiece>&& piece) {
  if (!is_asking(id)) return;
  LoadJob& job = state_.loads.at(id.ticket);
  LoadPart& part = job.parts[id.index];
  if (!piece) {
    // After its deadline the server may still execute the call: the next call drops the result.
    if (piece.error().code == Errc::kTimeout) cleanup_.release(part.pin);
    const bool is_over =
        job.gave_up || job.is_ending || state_.clock.now() - job.accepted >= job.patience;
    if (piece.error().code == Errc::kBusy && !is_over) return ask_later(id);
    return end_part(id, job.gave_up ? job.gave_up : std::move(piece.error()));
  }
  if (piece->is_late && state_.clock.now() - job.accepted >= job.patience) {
    return end_part(
        id, Error{Errc::kTimeout,
                  fmt::format("{} of {} blocks were not there within {}", part.count - part.done,
                              part.count, format_duration(job.patience))});
  }
  if (piece->is_late) return go_on(id);
  if (piece->unreadable) return skip_direct(id, *piece->unreadable);
  part.checksums.clear();
  if (state_.options.verify != PageVerification::kOff) {
    part.checksums = std::move(piece->checksums);
  }
  const std::optional<std::vector<PageCopies::Page>> pages = place(part, *piece);
  if (!pages) return drop(id, bad_slots(piece->slots.size() + piece->blocks.size(), part.count));
  if (job.gave_up) {
    cleanup_.release(part.pin);
    return end_part(id, job.gave_up);
  }
  if (piece->source != 0) return submit_direct(id, *pages, std::move(*piece));
  job.pool_next = false;
  submit(id, *pages);
}

void Loads::ask_later(const PartId& id) {
  tasks_.add(link_.timer().afterDelay(kBusyPause.count() * kj::NANOSECONDS).then([this, id] {
    if (is_asking(id)) go_on(id);
  }));
}

std::optional<std::vector<PageCopies::Page>> Loads::place(const LoadPart& part,
                                                          const NextPiece& piece) const {
  const bool is_direct = piece.source != 0;
  if (piece.slots.empty() != is_direct || piece.blocks.empty() == is_direct) return std::nullopt;
  const std::vector<std::uint32_t>& places = is_direct ? piece.blocks : piece.slots;
  if (places.size() > part.count - part.done) return std::nullopt;
  const std::size_t checksums = part.checksums.size();
  if (checksums != 0 && checksums != piece.slots.size()) return std::nullopt;
  const std::uint64_t last_begin = state_.last_page_begin(part.kind);
  std::vector<PageCopies::Page> pages;
  pages.reserve(places.size());
  for (std::size_t i = 0; i < places.size(); ++i) {
    PageCopies::Page& page = pages.emplace_back();
    page.place = part.done + i;
    page.pool_offset = is_direct ? places[i] : places[i] * kSlotAlignment;
    if (!is_direct && page.pool_offset > last_begin) return std::nullopt;
    page.checksum = checksums != 0 && part.checksums[i] != kNoChecksum;
  }
  return pages;
}

void Loads::submit_direct(const PartId& id, std::span<const PageCopies::Page> pages,
                          NextPiece&& piece) {
  Result<Sources::Reading> reading = state_.sources.begin(piece.source, piece.blocks, piece.guards);
  if (!reading && reading.error().code == Errc::kInternal) return drop(id, reading.error());
  if (!reading) return skip_direct(id, reading.error());
  LoadPart& part = part_of(id);
  part.source = piece.source;
  part.is_late = false;
  part.guards = std::move(piece.guards);
  submit(id, pages, std::move(*reading));
}

void Loads::skip_direct(const PartId& id, const Error& why) {
  LoadJob& job = state_.loads.at(id.ticket);
  job.pool_next = true;
  job.pool_only = job.pool_only || why.code == Errc::kRefused;
  cleanup_.release(part_of(id).pin);
  go_on(id);
}

void Loads::go_on(const PartId& id) {
  LoadJob& job = state_.loads.at(id.ticket);
  if (job.gave_up) return end_part(id, job.gave_up);
  if (job.is_ending) return end_part(id, unanswered_error(job.connection_lost));
  LoadPart& part = job.parts[id.index];
  part.phase = LoadPart::Phase::kAsking;
  part.pin = ++state_.last_ticket;
  open(id);
}

std::size_t Loads::end_direct(LoadJob& job, LoadPart& part) {
  const std::uint64_t source = std::exchange(part.source, 0);
  // In any case, and before the pin is released: then the other engine may close them.
  std::size_t guarded = state_.sources.end(source, part.guards, part.copies.guards());
  if (state_.options.mistakes.checks_guards_first) guarded = part.copies.pages();
  const std::size_t good = std::min(guarded, part.copies.good_pages());
  job.direct_bytes += good * state_.kinds[part.kind].page_bytes;
  if (good == part.copies.pages()) return good;
  job.pool_next = true;
  const std::optional<Error>& error = part.copies.error();
  if (error && error->code == Errc::kRefused) {
    state_.sources.refuse(source, *error);
    job.pool_only = true;
  } else if (error && is_broken(part, *error)) {
    job.pool_only = state_.sources.suspend(source, *error) || job.pool_only;
  }
  kLog.debug("read {} of {} pages of another engine engine={} error=\"{}\"", good,
             part.copies.pages(), source, error ? to_string(*error) : "their guards were closed");
  return good;
}

// ---- pieces of all loads

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

void Loads::drop(const PartId& id, Error why) {
  link_.drop(why);
  state_.loads.at(id.ticket).in_doubt = true;
  end_part(id, std::move(why));
}

void Loads::cut(const PartId& id, LoadPace::Cut why) {
  LoadJob& job = state_.loads.at(id.ticket);
  const LoadPart& part = job.parts[id.index];
  job.cut = why;
  end_part(id,
           Error{Errc::kTimeout, fmt::format("{} of {} blocks are computed sooner than they arrive",
                                             part.count - part.done, part.count)});
}

void Loads::submit(const PartId& id, std::span<const PageCopies::Page> pages,
                   Sources::Reading&& reading) {
  LoadJob& job = state_.loads.at(id.ticket);
  LoadPart& part = job.parts[id.index];
  part.phase = LoadPart::Phase::kCopying;
  part.submitted = state_.clock.now();
  part.copies =
      PageCopies(state_.kinds[part.kind], part.blocks, pages, part.pin, state_.last_ticket);
  note_copying(id.ticket, job);
  part.copies.submit(state_.device, Device::Event::kNow,
                     {.direction = Device::Direction::kLoad, .job = id.ticket, .part = id.index},
                     state_.batches, reading.peer, std::move(reading.guards));
  if (part.copies.error()) state_.copying.remove(id.ticket);
  if (part.copies.in_flight() != 0) return start_deadline(id);
  if (part.pool != 0) return confirm(id);
  const bool was_direct = part.source != 0;
  if (was_direct) end_direct(job, part);
  cleanup_.release(part.pin);
  if (was_direct) return go_on(id);
  end_part(id, part.copies.error());
}

void Loads::note_copying(std::uint64_t ticket, const LoadJob& job) {
  // The bytes of another engine count only after a look at its guards.
  if (job.is_following()) return;
  std::vector<std::uint64_t> batches;
  std::size_t blocks = 0;
  std::uint64_t bytes = job.bytes;
  for (const LoadPart& part : job.parts) {
    blocks += part.count;
    if (part.pool != 0) return;  // The bytes count only once they are confirmed.
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
          .then([this, id, deadline, is_cut] {
            LoadJob& late = state_.loads.at(id.ticket);
            // The pool of this node has these blocks soon, too.
            if (LoadPart& slow = late.parts[id.index]; slow.source != 0 || slow.pool != 0) {
              slow.is_late = true;
              return slow.copies.cancel(state_.device);
            }
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
  const bool was_direct = part.source != 0;
  const std::size_t whole = was_direct ? end_direct(job, part) : part.copies.good_pages();
  // Queries the kernel after the last copy: the loop may not have read the end of the stream yet.
  if (!followed && (job.connection_lost || !link_.is_up())) {
    job.in_doubt = true;
    if (part.pool != 0) state_.pools.end(std::exchange(part.pool, 0), std::nullopt);
    return end_part(id, Error{Errc::kPeerLost,
                              "the connection to the server was lost before the last copy ended"});
  }
  if (part.pool != 0) return confirm(id);
  const std::vector<std::uint32_t> corrupt = find_corrupt(job, part);
  if (!corrupt.empty()) report_corrupt(part.pin, corrupt);
  cleanup_.release(part.pin);
  std::optional<Error> error = part.copies.error();
  // What another engine did not have until the end is loaded once it is saved.
  if (was_direct) error.reset();
  if (error && job.gave_up) error = job.gave_up;
  std::size_t good = whole;
  if (!corrupt.empty()) {
    good = corrupt.front();
    error = Error{Errc::kCorrupt, fmt::format("page {} of {} differs from the saved page",
                                              part.done + corrupt.front(), part.count)};
  }
  part.done += good;
  if (error || part.done == part.count) return end_part(id, std::move(error));
  go_on(id);
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
    const bool waits = part.coming_until || job.is_following();
    if (part.phase == LoadPart::Phase::kAsking && waits) cleanup_.release(part.pin);
  }
}

void Loads::end(bool lost) {
  std::vector<PartId> unanswered;
  for (auto& [ticket, job] : state_.loads) {
    job.connection_lost = lost;
    job.is_ending = true;
    for (std::size_t i = 0; i < job.parts.size(); ++i) {
      const LoadPart::Phase phase = job.parts[i].phase;
      const bool is_unanswered =
          phase == LoadPart::Phase::kAsking || phase == LoadPart::Phase::kConfirming;
      if (is_unanswered) unanswered.push_back({ticket, i});
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
