// Workers that wait for blocks in flight: how long they wait, and when waiting stops being of use.
#include <algorithm>
#include <utility>

#include "capnp/wire/kj_time.h"
#include "server/fetches/fetches.h"
#include "server/fetches/fetches_impl.h"

namespace pegaflow::server {

kj::Promise<Result<Fetches::Arrived>> Fetches::open(const Id128& connection, const Id128& token,
                                                    std::size_t first, std::size_t count,
                                                    engine::PinId pin, const Wait& wait) {
  const auto in_pools = pools_.begin_of(token);
  if (!in_pools || first + count <= *in_pools) {
    return open_here(connection, token, first, count, 0, pin, wait);
  }
  if (first >= *in_pools) return open_in_pool(connection, token, first, count, pin, wait);
  const std::size_t here = *in_pools - first;
  return open_here(connection, token, first, here, count - here, pin, wait);
}

/// Opens blocks that are in the pool of another node.
kj::Promise<Result<Fetches::Arrived>> Fetches::open_in_pool(const Id128& connection,
                                                            const Id128& token, std::size_t first,
                                                            std::size_t count, engine::PinId pin,
                                                            const Wait& wait) {
  if (!wait.through_pool) {
    auto opened = pools_.open(connection, token, first, count, pin, wait.known);
    if (!opened) return Result<Arrived>(tl::unexpected<Error>(std::move(opened.error())));
    if (*opened) {
      Arrived arrived;
      arrived.opened.coming = count - (*opened)->pages.size();
      arrived.in_pool = std::move(*opened);
      return Result<Arrived>(std::move(arrived));
    }
  }
  if (wait.through_pool && !into_pool_.contains(token)) pools_.skip(token, first);
  fetch_into_pool(token);
  opening_.emplace(connection, pin);
  return await_pool(connection, token, first, count, pin, wait);
}

/// Waits until the blocks that its workers do not read have frames, and opens them.
kj::Promise<Result<Fetches::Arrived>> Fetches::await_pool(const Id128& connection,
                                                          const Id128& token, std::size_t first,
                                                          std::size_t count, engine::PinId pin,
                                                          const Wait& wait) {
  const auto found = into_pool_.find(token);
  const bool is_released = !opening_.contains({connection, pin});
  if (found != into_pool_.end() && !found->second.is_made && !is_released) {
    return progress().then([this, connection, token, first, count, pin, wait]() {
      return await_pool(connection, token, first, count, pin, wait);
    });
  }
  if (is_released) {
    return Result<Arrived>(fail(Errc::kCancelled, "pin {} was released before it had blocks",
                                static_cast<std::uint64_t>(pin)));
  }
  const std::size_t end = found == into_pool_.end() ? 0 : found->second.end;
  if (first < end) {
    const std::size_t here = std::min(count, end - first);
    return open_here(connection, token, first, here, count - here, pin, wait);
  }
  opening_.erase({connection, pin});
  return Result<Arrived>(
      fail(Errc::kGone, "blocks of another node could not be fetched into the pool"));
}

/// Extends the claim by the blocks that its workers do not read, once.
void Fetches::fetch_into_pool(const Id128& token) {
  if (!into_pool_.try_emplace(token).second) return;
  const Plan& claim = static_cast<const Plan&>(*pools_.request_of(token));
  auto plan = std::make_shared<Plan>();
  plan->space = claim.space;
  plan->page_bytes = claim.page_bytes;
  plan->keys.assign(claim.keys.begin(),
                    claim.keys.begin() + static_cast<std::ptrdiff_t>(pools_.end_of(token)));
  plan->deadline = clock_.now() + options_.deadline;
  plan->connection = claim.connection;
  plan->token = token;
  plan->generation = claim.generation;
  plan->ready = plan->claimed = *pools_.begin_of(token);
  plan->through_pool = true;
  extending_.insert(token);
  // Another claim may have brought some of them.
  tasks_.add(join_and_query(plan).then([this, plan]() {
    extending_.erase(plan->token);
    const auto made = into_pool_.find(plan->token);
    if (made != into_pool_.end()) made->second = {.is_made = true, .end = plan->claimed};
    wake_openings();
  }));
}

kj::Promise<Result<Fetches::Arrived>> Fetches::open_here(const Id128& connection,
                                                         const Id128& token, std::size_t first,
                                                         std::size_t count, std::size_t behind,
                                                         engine::PinId pin, const Wait& wait) {
  opening_.emplace(connection, pin);
  const TimePoint now = clock_.now();
  auto opening = std::make_shared<Opening>(Opening{.connection = connection,
                                                   .token = token,
                                                   .first = first,
                                                   .count = count,
                                                   .pin = pin,
                                                   .deadline = now + wait.patience,
                                                   .worth_until = {},
                                                   .computing = wait.computing,
                                                   .gathered_at = now + kGatherTime,
                                                   .behind = behind});
  if (wait.worth) {
    opening->worth_until = *wait.worth == Wait::kForever ? TimePoint::max() : now + *wait.worth;
  }
  return wait_and_open(opening);
}

kj::Promise<Result<Fetches::Arrived>> Fetches::wait_and_open(
    const std::shared_ptr<Opening>& opening) {
  const TimePoint now = clock_.now();
  if (const auto until = gathers_until(*opening, now)) return wait(opening, now, *until);
  auto opened = service_.open_arrived(opening->connection, opening->token, opening->first,
                                      opening->count, opening->pin);
  const bool is_waiting = opened && opened->slots.empty() && opened->coming != 0;
  const Late late = is_waiting ? is_late(*opening, now) : Late::kNo;
  if (!is_waiting || late != Late::kNo || now >= opening->deadline) {
    opening_.erase({opening->connection, opening->pin});
    if (late == Late::kStuck) note_recomputing(*opening, now);
    if (!opened) return Result<Arrived>(tl::unexpected<Error>(std::move(opened.error())));
    opened->coming += opening->behind;
    return Result<Arrived>(Arrived{.opened = std::move(*opened), .late = late});
  }
  return wait(opening, now, std::min(opening->deadline, judged_at(*opening)));
}

/// When this load stops waiting for more blocks than have arrived; no value: now, or none has.
std::optional<TimePoint> Fetches::gathers_until(Opening& opening, TimePoint now) {
  TimePoint until = std::min(opening.gathered_at, opening.deadline);
  if (opening.worth_until) until = std::min(until, *opening.worth_until);
  if (coming_.empty() || now >= until) return std::nullopt;
  const std::size_t most = std::min(opening.count, CacheService::kOpenSlice);
  const auto more =
      service_.arrived(opening.token, opening.first + opening.here, most - opening.here);
  if (!more) return std::nullopt;  // The next one will not arrive, or the claim has ended.
  opening.here += *more;
  if (opening.here == 0 || opening.here >= std::min(most, enough_for(opening))) return std::nullopt;
  return until;
}

/// The blocks for which the worker is answered although more are in flight.
std::size_t Fetches::enough_for(const Opening& opening) {
  const std::uint64_t page_bytes = service_.page_bytes(opening.connection, opening.token);
  if (opening.first == 0 || page_bytes == 0) return 1;
  return std::clamp<std::size_t>(std::min(opening.first, (opening.count + 1) / 2),
                                 std::max<std::uint64_t>(1, kLeastGathered / page_bytes),
                                 std::max<std::uint64_t>(1, kGatherBytes / page_bytes));
}

/// Looks again when the source has made progress, at the latest at `until`.
kj::Promise<Result<Fetches::Arrived>> Fetches::wait(const std::shared_ptr<Opening>& opening,
                                                    TimePoint now, TimePoint until) {
  return progress()
      .exclusiveJoin(timer_.afterDelay(to_kj(until - now)))
      .then([this, opening]() -> kj::Promise<Result<Arrived>> {
        if (!opening_.contains({opening->connection, opening->pin})) {
          return Result<Arrived>(fail(Errc::kCancelled,
                                      "pin {} was released before its blocks arrived",
                                      static_cast<std::uint64_t>(opening->pin)));
        }
        return wait_and_open(opening);
      });
}

/// Null: the block at that place of the claim is local, or will not arrive.
const Fetches::Coming* Fetches::coming(const Id128& token, std::size_t place) const {
  const std::optional<engine::FrameIndex> frame = service_.claimed_frame(token, place);
  if (!frame) return nullptr;
  const auto found = coming_.find(*frame);
  return found == coming_.end() ? nullptr : &found->second;
}

/// When the owner of the first block counts as stuck for this load; max: it is not in flight.
TimePoint Fetches::stuck_at(const Opening& opening) const {
  const Coming* const next = coming(opening.token, opening.first);
  if (next == nullptr) return TimePoint::max();
  const TimePoint stuck_at = next->rate->stuck_at();
  const auto found = recomputing_.find(opening.connection);
  return found == recomputing_.end() ? stuck_at : std::max(stuck_at, found->second.until);
}

/// A load ends because its owner is stuck. The next loads of its engine wait until it is computed,
/// and then end together if the owner is still stuck.
void Fetches::note_recomputing(const Opening& opening, TimePoint now) {
  if (opening.computing <= Duration::zero()) return;
  const TimePoint stuck_at = coming(opening.token, opening.first)->rate->stuck_at();
  const auto found = recomputing_.find(opening.connection);
  if (found != recomputing_.end() && found->second.stuck_at == stuck_at) return;
  std::erase_if(recomputing_, [&](const auto& each) { return each.second.until < now; });
  recomputing_[opening.connection] = {.stuck_at = stuck_at, .until = now + opening.computing};
}

/// Whether the blocks, of which none has arrived, are not worth waiting for.
Fetches::Late Fetches::is_late(const Opening& opening, TimePoint now) const {
  if (!opening.worth_until) return Late::kNo;
  if (now >= stuck_at(opening)) return Late::kStuck;
  if (now >= *opening.worth_until) return Late::kSlow;
  if (*opening.worth_until == TimePoint::max()) return Late::kNo;
  const Coming* const last = coming(opening.token, opening.first + opening.count - 1);
  // An older rate must not judge the probe that is to replace it.
  if (last == nullptr || !last->rate->is_fresh(now)) return Late::kNo;
  const Duration left = *opening.worth_until - now;
  return last->rate->until(last->end) > left ? Late::kSlow : Late::kNo;
}

/// When the result of is_late() may change although nothing has arrived.
TimePoint Fetches::judged_at(const Opening& opening) const {
  return opening.worth_until ? std::min(*opening.worth_until, stuck_at(opening)) : TimePoint::max();
}

void Fetches::released(const Id128& connection, engine::PinId pin) {
  pools_.released(connection, pin);
  if (opening_.erase({connection, pin}) != 0) wake_openings();
}

kj::Promise<void> Fetches::progress() {
  has_waiting_ = true;
  return progress_made_.addBranch();
}

/// Nothing is made anew for the blocks that arrive while no load waits, or none has looked yet.
void Fetches::wake_openings() {
  if (!std::exchange(has_waiting_, false)) return;
  auto pair = kj::newPromiseAndFulfiller<void>();
  progress_->fulfill();
  progress_ = kj::mv(pair.fulfiller);
  progress_made_ = pair.promise.fork();
}

}  // namespace pegaflow::server
