#include "transport/ucx/rail.h"

#include <algorithm>
#include <array>
#include <optional>

#include <poll.h>

#include "base/log.h"
#include "base/os/numa.h"
#include "base/os/thread.h"

namespace pegaflow::ucx {
namespace {

constexpr Log kLog{"ucx"};
/// While GETs are in flight the thread polls UCX at least this often, with or without an event:
/// missed events have been seen in the field.
constexpr Duration kLongestSleep = std::chrono::milliseconds(100);
/// The wait for callbacks at the end. The worker is destroyed afterwards, with or without them.
constexpr Duration kCloseTimeout = std::chrono::seconds(10);

}  // namespace

/// In the order of construction; destroyed in reverse.
struct Rail::Loop {
  std::unique_ptr<Context> context;
  std::unique_ptr<Worker> requester_worker;
  std::unique_ptr<Worker> responder_worker;
  LocalRegions regions;
  std::optional<Requester> requester;
  std::optional<Responder> responder;
  TimePoint last_progress;
  bool progressed = false;
};

Result<std::unique_ptr<Rail>> Rail::open(const Options& options, const UcpApi& api,
                                         const Id128& incarnation, Dealer& dealer,
                                         const Clock& clock, Hooks hooks) {
  std::unique_ptr<Rail> rail(new Rail(options, api, incarnation, dealer, clock, std::move(hooks)));
  // Shared: the rail may be gone before the thread has left set_value().
  const auto started = std::make_shared<std::promise<Result<void>>>();
  PEGA_TRY_LET(rail->thread_, start_thread("pega-ucx", [at = rail.get(), started] {
                 // A worker belongs to the thread that made it.
                 Result<void> ready = at->start();
                 const bool good = ready.has_value();
                 started->set_value(std::move(ready));
                 if (good) at->run();
                 at->loop_.reset();
               }));
  PEGA_TRY(started->get_future().get());
  return rail;
}

Rail::Rail(const Options& options, const UcpApi& api, const Id128& incarnation, Dealer& dealer,
           const Clock& clock, Hooks hooks)
    : options_(options),
      api_(api),
      incarnation_(incarnation),
      dealer_(dealer),
      clock_(clock),
      hooks_(std::move(hooks)),
      mailbox_(options.commands) {}

Rail::~Rail() { stop(); }

void Rail::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_release);  // Pairs with the load in run().
  wake_.signal();
  thread_.join();
}

// ---- callers

void Rail::hand_over(const Command& command) {
  // Commands are few and short, and the thread empties the mailbox in every case, so a full one is
  // retried.
  while (!mailbox_.try_send(command)) std::this_thread::yield();
  commanded_.store(true, std::memory_order_release);  // Pairs with the exchange in iterate().
}

std::future<Result<std::vector<std::byte>>> Rail::map(RegionId region, const Memory& memory) {
  const auto done = std::make_shared<std::promise<Result<std::vector<std::byte>>>>();
  hand_over(Map{region, memory, done});
  return done->get_future();
}

std::future<void> Rail::unmap(RegionId region) {
  const auto done = std::make_shared<std::promise<void>>();
  hand_over(Unmap{region, done});
  return done->get_future();
}

void Rail::lend(RegionId region, TimePoint until, bool revoke,
                std::shared_ptr<std::promise<void>> done) {
  hand_over(Lend{region, until, revoke, std::move(done)});
}

void Rail::connect(Fabric::PeerId id, std::shared_ptr<const PeerAddress> where) {
  hand_over(Connect{id, std::move(where)});
}

void Rail::disconnect(Fabric::PeerId id) { hand_over(Disconnect{id}); }

void Rail::nudge() {
  // Pairs with the exchange in iterate(): it sees all work that the dealer received before.
  if (!nudged_.exchange(true, std::memory_order_acq_rel)) wake_.signal();
}

// ---- the thread

Result<void> Rail::start() {
  if (!options_.cores.empty() && !keep_thread_on(options_.cores)) {
    kLog.debug("cannot bind a rail's thread to the cores of its card device={}", options_.device);
  }
  // Before UCX is opened, which may look for the context, and then for each copy.
  if (options_.gpu) PEGA_TRY(options_.gpu->make_current());
  loop_ = std::make_unique<Loop>();
  Loop& loop = *loop_;
  PEGA_TRY_LET(loop.context, Context::open(api_, {.device = options_.device,
                                                  .sockets = options_.sockets,
                                                  .gpu = options_.gpu.has_value(),
                                                  .peers = options_.peers}));
  PEGA_TRY_LET(loop.requester_worker, Worker::create(*loop.context));
  PEGA_TRY_LET(loop.responder_worker, Worker::create(*loop.context));
  loop.requester.emplace(options_.requester, *loop.requester_worker, loop.regions, dealer_, clock_);
  loop.responder.emplace(options_.responder, *loop.responder_worker, incarnation_, clock_);
  address_ = loop.responder_worker->address();
  return {};
}

void Rail::run() {
  // Pairs with the store in the destructor.
  while (!stop_.load(std::memory_order_acquire)) {
    if (iterate()) continue;
    sleep();
  }
  end();
}

bool Rail::iterate() {
  Loop& loop = *loop_;
  bool did = loop.requester_worker->progress();
  if (loop.responder_worker->progress()) did = true;
  loop.progressed = did;
  // Commands before messages: a reader that learned of a lease from its owner finds it here.
  if (commanded_.exchange(false, std::memory_order_acq_rel)) {
    mailbox_.drain([this](Command&& command) { carry_out(std::move(command)); });
    did = true;
  }
  take_messages();
  loop.requester->check_paths(loop.progressed);
  loop.responder->check_paths();
  report_outcomes();
  // Pairs with nudge().
  const bool nudged = nudged_.exchange(false, std::memory_order_acq_rel);
  if (nudged) wake_.clear();
  if (dealer_.has_work() && (nudged || loop.requester->has_more_room())) {
    if (loop.requester->fill()) did = true;
    report_outcomes();
  }
  if (hooks_.keeps_time) {
    if (dealer_.next_time() <= clock_.now()) dealer_.on_time(clock_.now());
  }
  if (dealer_.has_completions()) hooks_.deliver();
  return did || nudged;
}

void Rail::take_messages() {
  Loop& loop = *loop_;
  for (const auto& arrived : loop.requester_worker->take_arrived()) {
    loop.requester->on_message(arrived.message);
  }
  for (const auto& arrived : loop.responder_worker->take_arrived()) {
    loop.responder->on_message(arrived);
  }
}

void Rail::report_outcomes() {
  if (loop_->requester->report_outcomes()) hooks_.nudge_others();
}

void Rail::sleep() {
  Loop& loop = *loop_;
  const bool busy = loop.requester->is_busy();
  if (busy && options_.spin > Duration::zero()) {
    const TimePoint until = clock_.now() + options_.spin;
    do {
      if (iterate()) return;
    } while (clock_.now() < until && !stop_.load(std::memory_order_acquire));
  }
  if (!loop.requester_worker->arm() || !loop.responder_worker->arm()) return;
  TimePoint next = std::min(loop.requester->next_time(), loop.responder->next_time());
  if (hooks_.keeps_time) next = std::min(next, dealer_.next_time());
  const TimePoint now = clock_.now();
  if (busy) next = std::min(next, now + kLongestSleep);
  int timeout_ms = -1;
  if (next != TimePoint::max()) {
    // Rounded up, so that the time has passed after waking.
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - now);
    timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
  }
  std::array<pollfd, 4> wait{{{.fd = loop.requester_worker->fd(), .events = POLLIN, .revents = 0},
                              {.fd = loop.responder_worker->fd(), .events = POLLIN, .revents = 0},
                              {.fd = mailbox_.fd(), .events = POLLIN, .revents = 0},
                              {.fd = wake_.fd(), .events = POLLIN, .revents = 0}}};
  (void)::poll(wait.data(), wait.size(), timeout_ms);
  // The sender may not have set its flag yet.
  if (wait[2].revents != 0) commanded_.store(true, std::memory_order_relaxed);
}

Result<std::vector<std::byte>> Rail::map_now(const Map& map) {
  Loop& loop = *loop_;
  if (map.memory.kind == MemoryKind::kCuda) {
    if (!options_.gpu || options_.gpu->device != map.memory.device) {
      return fail(Errc::kRefused, "this fabric was created for {}, and not for memory of GPU {}",
                  options_.gpu ? fmt::format("GPU {}", options_.gpu->device) : "host memory",
                  map.memory.device);
    }
    PEGA_TRY(loop.context->check_kind(map.memory.kind));
  }
  PEGA_TRY_LET(ucp_mem_h const handle, loop.context->map(map.memory));
  loop.regions[static_cast<std::uint32_t>(map.region)] = {map.memory, handle};
  return loop.context->pack_key(handle);
}

void Rail::carry_out(Command command) {
  Loop& loop = *loop_;
  if (auto* const connect = std::get_if<Connect>(&command)) {
    loop.requester->connect(connect->id, std::move(connect->where));
  } else if (const auto* const disconnect = std::get_if<Disconnect>(&command)) {
    loop.requester->disconnect(disconnect->id);
  } else if (const auto* const map = std::get_if<Map>(&command)) {
    map->done->set_value(map_now(*map));
  } else if (const auto* const lend = std::get_if<Lend>(&command)) {
    loop.responder->lend(lend->region, lend->until);
    const auto done = [lend_done = lend->done] {
      if (lend_done) lend_done->set_value();
    };
    if (lend->revoke) {
      loop.responder->revoke(lend->region, done);
    } else {
      done();
    }
  } else if (const auto* const unmap = std::get_if<Unmap>(&command)) {
    loop.responder->forget(unmap->region);
    loop.responder->revoke(unmap->region, [this, region = unmap->region, done = unmap->done] {
      const auto found = loop_->regions.find(static_cast<std::uint32_t>(region));
      if (found != loop_->regions.end()) {
        loop_->context->unmap(found->second.handle);
        loop_->regions.erase(found);
      }
      done->set_value();
    });
  }
}

void Rail::end() {
  Loop& loop = *loop_;
  // Commands submitted before the end are executed as usual.
  mailbox_.drain([this](Command&& command) { carry_out(std::move(command)); });
  loop.requester->close_all();
  loop.responder->close_all();
  const TimePoint begin = std::chrono::steady_clock::now();
  bool requester_closed = false;
  bool responder_closed = false;
  while (std::chrono::steady_clock::now() < begin + kCloseTimeout) {
    const bool progressed = loop.requester_worker->progress();
    (void)loop.responder_worker->progress();
    take_messages();
    loop.requester->check_paths(progressed);
    requester_closed = loop.requester->all_closed();
    // A reader that is gone reads nothing any longer, and no local state depends on it.
    responder_closed = loop.responder->all_closed() ||
                       std::chrono::steady_clock::now() > begin + options_.responder.fence_timeout;
    report_outcomes();
    if (requester_closed && responder_closed) break;
  }
  if (!requester_closed) {
    kLog.warn("UCX did not complete the operations in flight, its worker is destroyed device={}",
              options_.device);
  }
  // Each needs the one before it.
  loop.responder.reset();
  loop.requester_worker.reset();
  loop.responder_worker.reset();
  if (!requester_closed) loop.requester->worker_is_gone();
  report_outcomes();
  loop.requester.reset();
  for (const auto& [number, region] : loop.regions) loop.context->unmap(region.handle);
  loop.context.reset();
}

}  // namespace pegaflow::ucx
