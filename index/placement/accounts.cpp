#include "index/placement/accounts.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

namespace pegaflow::index {

namespace {

/// Seconds by which records of other routers may be late: of requests that were placed within this
/// time, the engine may have received either one first.
constexpr double kUncertainOrder = 0.1;

}  // namespace

Accounts::Accounts(const Options& options) : options_(options) {
  entries_.resize(options.max_requests);
  for (std::uint32_t i = 0; i < options.max_requests; ++i) {
    entries_[i].next = i + 1 < options.max_requests ? i + 1 : kNone;
  }
  free_ = options.max_requests > 0 ? 0 : kNone;
  places_.assign(std::bit_ceil(std::size_t{options.max_requests} * 2 + 2), kNone);
  queues_.resize(options.max_engines);
  shares_.resize(std::size_t{options.max_engines} * options.max_routers);
  missing_tokens_.resize(options.max_engines);
}

std::size_t Accounts::home(RouterId router, std::uint64_t id) const noexcept {
  std::uint64_t mixed = (id + router * 0x9E3779B97F4A7C15U) * 0xBF58476D1CE4E5B9U;
  mixed ^= mixed >> 29U;
  return static_cast<std::size_t>(mixed * 0x94D049BB133111EBU >> 16U) & (places_.size() - 1);
}

std::uint32_t Accounts::lookup(RouterId router, std::uint64_t id) const noexcept {
  for (std::size_t at = home(router, id); places_[at] != kNone;
       at = (at + 1) & (places_.size() - 1)) {
    const Request& request = entries_[places_[at]].request;
    if (request.id == id && request.router == router) return places_[at];
  }
  return kNone;
}

void Accounts::unlink_place(std::uint32_t index) noexcept {
  const std::size_t mask = places_.size() - 1;
  const Request& request = entries_[index].request;
  std::size_t hole = home(request.router, request.id);
  while (places_[hole] != index) hole = (hole + 1) & mask;
  // Later entries move into the hole unless it lies before their home.
  for (std::size_t at = (hole + 1) & mask; places_[at] != kNone; at = (at + 1) & mask) {
    const Request& other = entries_[places_[at]].request;
    const std::size_t its_home = home(other.router, other.id);
    if (((at - its_home) & mask) < ((at - hole) & mask)) continue;
    places_[hole] = places_[at];
    hole = at;
  }
  places_[hole] = kNone;
}

Result<void> Accounts::add(const Request& request) {
  if (request.engine >= options_.max_engines || request.router >= options_.max_routers) {
    return fail(Errc::kInvalidArgument, "account: request {} has engine {} and router {}",
                request.id, request.engine, request.router);
  }
  if (lookup(request.router, request.id) != kNone) {
    return fail(Errc::kInvalidArgument, "account: request {} of router {} is in flight already",
                request.id, request.router);
  }
  if (free_ == kNone) {
    return fail(Errc::kBusy, "account: {} requests are in flight, the limit", used_);
  }
  const std::uint32_t index = free_;
  Entry& entry = entries_[index];
  free_ = entry.next;
  ++used_;
  ever_used_ = std::max(ever_used_, index + 1);
  entry = {.request = request, .used = true};
  std::size_t at = home(request.router, request.id);
  while (places_[at] != kNone) at = (at + 1) & (places_.size() - 1);
  places_[at] = index;

  Share& of_router = share(request.router, request.engine);
  if (request.decodes) {
    ++of_router.decodes;
    return {};
  }
  ++of_router.prefills;
  of_router.tokens += request.uncached_tokens;
  Queue& queue = queues_[request.engine];
  entry.previous = queue.tail;
  if (queue.tail == kNone) {
    queue.head = index;
    queue.began = request.placed;
  } else {
    entries_[queue.tail].next = index;
  }
  queue.tail = index;
  ++queue.length;
  predict(request.engine);
  return {};
}

void Accounts::predict(EngineId engine) {
  Queue& queue = queues_[engine];
  double at = queue.began;
  queue.work = 0;
  for (std::uint32_t i = queue.head; i != kNone; i = entries_[i].next) {
    const Request& request = entries_[i].request;
    at = std::max(at, request.ready) + request.prefill;
    queue.work += request.prefill;
  }
  queue.drained = at;
  queue.behind = queue.head == kNone ? 0 : queue.work - entries_[queue.head].request.prefill;
}

void Accounts::leave_queue(std::uint32_t index, double now) {
  Entry& entry = entries_[index];
  const Request& request = entry.request;
  Share& of_router = share(request.router, request.engine);
  --of_router.prefills;
  of_router.tokens -= request.uncached_tokens;
  Queue& queue = queues_[request.engine];
  const bool was_head = queue.head == index;
  (was_head ? queue.head : entries_[entry.previous].next) = entry.next;
  (queue.tail == index ? queue.tail : entries_[entry.next].previous) = entry.previous;
  entry.next = entry.previous = kNone;
  --queue.length;
  if (was_head) queue.began = now;
  predict(request.engine);
}

bool Accounts::is_next(std::uint32_t index) const {
  const Request& request = entries_[index].request;
  for (std::uint32_t i = entries_[index].next; i != kNone; i = entries_[i].next) {
    const Request& behind = entries_[i].request;
    if (behind.placed - request.placed > kUncertainOrder) return true;
    if (behind.router != request.router) return false;
  }
  return true;
}

std::optional<Accounts::Served> Accounts::first_token(RouterId router, std::uint64_t id,
                                                      double now) {
  const std::uint32_t index = lookup(router, id);
  if (index == kNone || entries_[index].request.decodes) return std::nullopt;
  Request& request = entries_[index].request;
  const Queue& queue = queues_[request.engine];
  const Served served{.uncached_tokens = request.uncached_tokens,
                      .seconds = now - std::max({queue.began, request.ready, request.placed}),
                      .predicted = request.first - request.placed,
                      .measured = now - request.placed,
                      .in_order = queue.head == index && is_next(index)};
  leave_queue(index, now);
  // The engine computes one prefill at a time: whatever is next, it began with it now. Other
  // routers' records come late, so the order here need not be the engine's.
  queues_[request.engine].began = now;
  predict(request.engine);
  request.decodes = true;
  ++share(request.router, request.engine).decodes;
  return served;
}

void Accounts::set_work(RouterId router, std::uint64_t id, std::uint32_t uncached_tokens,
                        double prefill) {
  const std::uint32_t index = lookup(router, id);
  if (index == kNone || entries_[index].request.decodes) return;
  Request& request = entries_[index].request;
  Share& of_router = share(router, request.engine);
  of_router.tokens += uncached_tokens;
  of_router.tokens -= request.uncached_tokens;
  request.uncached_tokens = uncached_tokens;
  request.prefill = prefill;
  predict(request.engine);
}

void Accounts::remove(std::uint32_t index, double now) {
  Entry& entry = entries_[index];
  if (entry.request.decodes) {
    --share(entry.request.router, entry.request.engine).decodes;
  } else {
    leave_queue(index, now);
  }
  unlink_place(index);
  entry.used = false;
  entry.next = free_;
  free_ = index;
  --used_;
}

std::optional<Accounts::Request> Accounts::end(RouterId router, std::uint64_t id, double now) {
  const std::uint32_t index = lookup(router, id);
  if (index == kNone) return std::nullopt;
  const Request request = entries_[index].request;
  remove(index, now);
  return request;
}

const Accounts::Request* Accounts::find(RouterId router, std::uint64_t id) const noexcept {
  const std::uint32_t index = lookup(router, id);
  return index == kNone ? nullptr : &entries_[index].request;
}

Accounts::Request* Accounts::find(RouterId router, std::uint64_t id) noexcept {
  const std::uint32_t index = lookup(router, id);
  return index == kNone ? nullptr : &entries_[index].request;
}

bool Accounts::heal(const EngineSums& sums, double now) {
  if (sums.engine >= options_.max_engines || sums.router >= options_.max_routers) return false;
  Share& known = share(sums.router, sums.engine);
  bool changed = false;
  for (std::uint32_t i = queues_[sums.engine].head; i != kNone && known.prefills > sums.prefills;) {
    const std::uint32_t next = entries_[i].next;
    if (entries_[i].request.router == sums.router) {
      remove(i, now);
      changed = true;
    }
    i = next;
  }
  const std::int64_t tokens = known.prefills == sums.prefills
                                  ? 0
                                  : static_cast<std::int64_t>(sums.prefill_tokens) -
                                        static_cast<std::int64_t>(known.tokens);
  const std::int64_t missing_tokens = std::max<std::int64_t>(0, tokens);
  const std::int32_t missing_decodes =
      static_cast<std::int32_t>(sums.decodes) - static_cast<std::int32_t>(known.decodes);
  changed =
      changed || missing_tokens != known.missing_tokens || missing_decodes != known.missing_decodes;
  missing_tokens_[sums.engine] += missing_tokens - known.missing_tokens;
  known.missing_tokens = missing_tokens;
  known.missing_decodes = missing_decodes;
  return changed;
}

void Accounts::forget_router(RouterId router, double now) {
  if (router >= options_.max_routers) return;
  for (std::uint32_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].used && entries_[i].request.router == router) remove(i, now);
  }
  for (EngineId engine = 0; engine < options_.max_engines; ++engine) {
    missing_tokens_[engine] -= share(router, engine).missing_tokens;
    share(router, engine) = {};
  }
}

void Accounts::forget_engine(EngineId engine) {
  if (engine >= options_.max_engines) return;
  for (std::uint32_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].used && entries_[i].request.engine == engine) remove(i, 0);
  }
  for (std::uint32_t router = 0; router < options_.max_routers; ++router) {
    share(static_cast<RouterId>(router), engine) = {};
  }
  queues_[engine] = {};
  missing_tokens_[engine] = 0;
}

std::size_t Accounts::expire(double now, std::size_t limit) {
  std::size_t ended = 0;
  const std::size_t looks = std::min<std::size_t>(4 * limit, ever_used_);
  for (std::size_t i = 0; i < looks && ended < limit; ++i) {
    if (next_checked_ >= ever_used_) next_checked_ = 0;
    const Entry& entry = entries_[next_checked_];
    if (entry.used && entry.request.expires <= now) {
      remove(next_checked_, now);
      ++ended;
    }
    ++next_checked_;
  }
  return ended;
}

double Accounts::wait(EngineId engine, double now, double tokens_per_second) const noexcept {
  const Queue& queue = queues_[engine];
  // A head that takes longer than predicted delays everything behind it.
  const double listed = queue.head == kNone ? 0 : std::max(queue.drained - now, queue.behind);
  return listed + static_cast<double>(missing_tokens_[engine]) / tokens_per_second;
}

std::uint32_t Accounts::prefills(EngineId engine) const noexcept { return queues_[engine].length; }

std::uint32_t Accounts::decodes(EngineId engine) const noexcept {
  std::int64_t count = 0;
  for (std::uint32_t router = 0; router < options_.max_routers; ++router) {
    const Share& of_router = share(static_cast<RouterId>(router), engine);
    count += std::int64_t{of_router.decodes} + of_router.missing_decodes;
  }
  return static_cast<std::uint32_t>(std::max<std::int64_t>(0, count));
}

double Accounts::mean_prefill(EngineId engine) const noexcept {
  const Queue& queue = queues_[engine];
  return queue.length == 0 ? 0 : queue.work / queue.length;
}

EngineSums Accounts::sums(RouterId router, EngineId engine) const noexcept {
  const Share& of_router = share(router, engine);
  return {.router = router,
          .engine = engine,
          .prefills = of_router.prefills,
          .decodes = of_router.decodes,
          .prefill_tokens = of_router.tokens};
}

}  // namespace pegaflow::index
