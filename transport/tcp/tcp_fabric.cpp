#include "transport/tcp/tcp_fabric.h"

#include <algorithm>
#include <cstring>

#include "base/assert.h"
#include "base/os/thread.h"
#include "transport/fabric_checks.h"
#include "transport/tcp/holder.h"
#include "transport/tcp/limits.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/reader.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow {
namespace {

constexpr std::string_view kBackend = "tcp";

/// In addition to batches: peers that connect and disconnect, cancels.
constexpr std::size_t kOtherCommands = 1024;

Result<void> check(const TcpFabric::Options& options) {
  PEGA_TRY(within<std::size_t>("connections", options.connections, 1, 64));
  PEGA_TRY(within<std::size_t>("piece_bytes", options.piece_bytes, 4096, tcp::kMaximumPieceBytes));
  PEGA_TRY(within<std::size_t>("window_bytes", options.window_bytes, 4096, std::size_t{1} << 30));
  PEGA_TRY(within<std::size_t>("batches", options.batches, 1, 1 << 20));
  PEGA_TRY(within<std::size_t>("chunks", options.chunks, 1, 1 << 24));
  PEGA_TRY(within<std::size_t>("peers", options.peers, 1, 65536));
  PEGA_TRY(within<std::size_t>("readers", options.readers, 1, 65536));
  for (const Duration timeout : {options.connect_timeout, options.stall_timeout}) {
    PEGA_TRY(
        within<std::int64_t>("a timeout, in ns,", timeout.count(), 1'000'000, 3'600'000'000'000));
  }
  return {};
}

}  // namespace

struct TcpFabric::Connect {
  PeerId id{};
  tcp::Reader::PeerAddress address;
};

/// Holder and reader keep its address, so the poller is created first and stays in place.
struct TcpFabric::Loop {
  Loop(tcp::Poller&& made, const Clock& with) : poller(std::move(made)), clock(with) {}
  tcp::Poller poller;
  const Clock& clock;
  tcp::Poller::Key mailbox_key = 0;
  tcp::Poller::Key stop_key = 0;
  std::optional<tcp::Holder> holder;
  std::optional<tcp::Reader> reader;
};

Result<std::unique_ptr<TcpFabric>> TcpFabric::create(const Options& options, const Clock& clock,
                                                     CompletionSink sink) {
  PEGA_TRY(check(options));
  std::unique_ptr<TcpFabric> fabric(new TcpFabric(options, std::move(sink)));
  PEGA_TRY(fabric->start(clock));
  return fabric;
}

TcpFabric::TcpFabric(const Options& options, CompletionSink sink)
    : options_(options), sink_(std::move(sink)), mailbox_(options.batches + kOtherCommands) {}

Result<void> TcpFabric::start(const Clock& clock) {
  PEGA_TRY_LET(const tcp::SocketAddress listen, tcp::SocketAddress::parse(options_.listen));
  if (listen.is_wildcard()) {
    return fail(
        Errc::kInvalidArgument,
        "{} stands for every address of this machine, but peers need one to connect to: name "
        "one of them",
        options_.listen);
  }
  PEGA_TRY_LET(tcp::Poller made, tcp::Poller::create());
  loop_ = std::make_unique<Loop>(std::move(made), clock);
  tcp::Poller& poller = loop_->poller;
  PEGA_TRY_LET(loop_->holder, tcp::Holder::open(listen,
                                                {.connections = options_.readers,
                                                 .greeting_timeout = options_.connect_timeout,
                                                 .user_timeout = options_.stall_timeout},
                                                poller, regions_, incarnation_, clock));
  PEGA_TRY_LET(const tcp::SocketAddress bound, loop_->holder->address());
  address_ = to_string(bound);
  loop_->reader.emplace(
      tcp::Reader::Options{
          .connections = options_.connections,
          .piece_bytes = options_.piece_bytes,
          // Room for as many requests as there are pages of 32 KiB in the window; a quarter of it
          // for the background.
          .window = {.pieces = std::clamp<std::size_t>(options_.window_bytes / 32768, 16, 256),
                     .bytes = options_.window_bytes,
                     .least_bytes = tcp::kGroupBytes,
                     .group_bytes = std::min(tcp::kGroupBytes, options_.window_bytes / 8),
                     .background_bytes = options_.window_bytes / 4},
          .connect_timeout = options_.connect_timeout,
          .stall_timeout = options_.stall_timeout,
          .user_timeout = options_.stall_timeout},
      poller, regions_, clock, [this](Completion&& completion) {
        open_batches_.fetch_sub(1, std::memory_order_relaxed);
        sink_(std::move(completion));
      });
  loop_->mailbox_key = poller.new_key();
  PEGA_TRY(poller.add(mailbox_.fd(), loop_->mailbox_key, EPOLLIN));
  loop_->stop_key = poller.new_key();
  PEGA_TRY(poller.add(stop_wake_.fd(), loop_->stop_key, EPOLLIN));
  PEGA_TRY_LET(thread_, start_thread("pega-tcp", [this] { run(); }));
  return {};
}

TcpFabric::~TcpFabric() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_release);  // Pairs with the load in run().
  stop_wake_.signal();
  thread_.join();
}

// ---- callers

Result<RegionId> TcpFabric::register_region(const Memory& memory) {
  PEGA_TRY_LET(const std::span<std::byte> bytes, host_bytes(memory, kBackend));
  const std::lock_guard lock(regions_mutex_);
  return regions_.add(bytes);
}

Result<void> TcpFabric::lend(RegionId region, TimePoint until) {
  {
    const std::lock_guard lock(regions_mutex_);
    PEGA_TRY(regions_.lend(region, until));
  }
  // The thread may have checked the lease already and send the bytes until the end of its
  // iteration. It checks the lease again for everything that it sends later.
  if (until <= loop_->clock.now()) carry_out_and_wait(Iteration());
  return {};
}

void TcpFabric::unregister_region(RegionId region) {
  carry_out_and_wait(Forget{.region = region, .done = {}});
}

template <typename Waited>
void TcpFabric::carry_out_and_wait(Waited command) {
  // Shared: the caller may be gone before the thread has left set_value().
  const auto done = std::make_shared<std::promise<void>>();
  command.done = done;
  // It may not fail. The thread empties the mailbox in every case, so sending is retried.
  while (!mailbox_.try_send(Command(command))) std::this_thread::yield();
  done->get_future().wait();
}

FabricDescriptor TcpFabric::describe() const {
  const std::lock_guard lock(regions_mutex_);
  const auto* const begin = reinterpret_cast<const std::byte*>(address_.data());
  return {.backend = std::string(kBackend),
          .incarnation = incarnation_,
          .address = {begin, begin + address_.size()},
          .regions = regions_.describe()};
}

Result<Fabric::PeerId> TcpFabric::connect(const FabricDescriptor& peer) {
  PEGA_TRY(check_peer(peer, kBackend, tcp::RegionTable::kMaximum));
  const std::string_view text(reinterpret_cast<const char*>(peer.address.data()),
                              peer.address.size());
  PEGA_TRY_LET(const tcp::SocketAddress address, tcp::SocketAddress::parse(text));
  if (open_peers_.fetch_add(1, std::memory_order_relaxed) >= options_.peers) {
    open_peers_.fetch_sub(1, std::memory_order_relaxed);
    return fail(Errc::kBusy, "{} peers are connected", options_.peers);
  }
  const PeerId id{last_peer_.fetch_add(1, std::memory_order_relaxed) + 1};
  auto command = std::make_unique<Connect>();
  *command = {
      .id = id,
      .address = {.address = address, .incarnation = peer.incarnation, .regions = peer.regions}};
  Result<void> sent = hand_over(std::move(command));
  if (!sent) {
    open_peers_.fetch_sub(1, std::memory_order_relaxed);
    return tl::unexpected<Error>(std::move(sent.error()));
  }
  return id;
}

Result<void> TcpFabric::disconnect(PeerId peer) { return hand_over(Disconnect{peer}); }

Result<void> TcpFabric::read(Batch batch) {
  PEGA_TRY(check_size(batch, options_.chunks));
  if (open_batches_.fetch_add(1, std::memory_order_relaxed) >= options_.batches) {
    open_batches_.fetch_sub(1, std::memory_order_relaxed);
    return fail(Errc::kBusy, "{} batches are in flight", options_.batches);
  }
  Result<void> sent = hand_over(std::move(batch));
  if (!sent) open_batches_.fetch_sub(1, std::memory_order_relaxed);
  return sent;
}

Result<void> TcpFabric::cancel(std::uint64_t ticket) { return hand_over(Cancel{ticket}); }

Result<void> TcpFabric::hand_over(Command command) {
  if (mailbox_.try_send(std::move(command))) return {};
  return fail(Errc::kBusy, "{} commands are queued for the lane's thread", mailbox_.capacity());
}

// ---- the thread

void TcpFabric::run() {
  Loop& loop = *loop_;
  // Pairs with the store in the destructor.
  while (!stop_.load(std::memory_order_acquire)) {
    const TimePoint next = std::min(loop.reader->next_time(), loop.holder->next_time());
    int timeout_ms = -1;
    if (next != TimePoint::max()) {
      // Rounded up, so that the time has passed after waking. A clock that stands still is a
      // test's.
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - loop.clock.now());
      timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
    }
    for (const epoll_event& event : loop.poller.wait(timeout_ms)) {
      const tcp::Poller::Key key = event.data.u64;
      if (key == loop.mailbox_key) {
        mailbox_.drain([this](Command&& command) { carry_out(std::move(command)); });
      } else if (key != loop.stop_key && !loop.holder->on_event(key, event.events)) {
        loop.reader->on_event(key, event.events);
      }
    }
    const TimePoint now = loop.clock.now();
    loop.reader->on_time(now);
    loop.holder->on_time(now);
  }
  // Commands submitted before the end are executed as usual.
  mailbox_.drain([this](Command&& command) { carry_out(std::move(command)); });
  loop.reader->finish();
  loop.holder.reset();
}

void TcpFabric::carry_out(Command command) {
  tcp::Reader& reader = *loop_->reader;
  if (auto* const batch = std::get_if<Batch>(&command)) {
    reader.read(std::move(*batch));
  } else if (auto* const connect = std::get_if<std::unique_ptr<Connect>>(&command)) {
    reader.connect((*connect)->id, std::move((*connect)->address));
  } else if (const auto* const disconnect = std::get_if<Disconnect>(&command)) {
    if (reader.disconnect(disconnect->peer)) open_peers_.fetch_sub(1, std::memory_order_relaxed);
  } else if (const auto* const cancel = std::get_if<Cancel>(&command)) {
    reader.cancel(cancel->ticket);
  } else if (const auto* const forget = std::get_if<Forget>(&command)) {
    // Batches into it end while it still exists; responses out of it find it gone in the next
    // iteration, which is this thread's too.
    reader.forget_region(forget->region);
    {
      const std::lock_guard lock(regions_mutex_);
      regions_.remove(forget->region);
    }
    forget->done->set_value();
  } else if (const auto* const iteration = std::get_if<Iteration>(&command)) {
    iteration->done->set_value();
  }
}

}  // namespace pegaflow
