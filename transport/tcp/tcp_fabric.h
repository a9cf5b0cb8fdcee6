#pragma once
/// \file
/// The Fabric over TCP sockets, for networks without RDMA.

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <variant>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/os/event_fd.h"
#include "base/os/mailbox.h"
#include "transport/fabric.h"
#include "transport/tcp/region_table.h"

namespace pegaflow {

/// The socket lane: a few connections to each peer, one thread, epoll.
///
/// The reader requests pieces of a region. The holder responds with the checksum and the bytes of
/// each, which are received straight into the place that the reader's table has for the request.
/// Batches are quiesced when they complete: open pieces are closed first, and a closed socket
/// writes nowhere. A peer that sends nothing for `stall_timeout` while a response is due is lost;
/// TCP_USER_TIMEOUT detects a peer whose machine is gone within about that time.
///
/// A process with the incarnation and the address can read all lent memory: give both only to
/// peers. Nothing is encrypted; `listen` must be an address of a trusted network.
///
/// Thread-safe. Limits are those of Options; beyond them calls return kBusy.
class TcpFabric final : public Fabric {
 public:
  struct Options {
    /// Numeric, "[::1]:0". Peers connect to this address, so it is one, and not "0.0.0.0".
    std::string listen = "127.0.0.1:0";
    unsigned connections = 4;                          ///< Per peer; 1 to 64.
    std::size_t piece_bytes = std::size_t{256} << 10;  ///< The largest request; 4 KiB to 4 MiB.
    std::size_t window_bytes = std::size_t{2} << 20;   ///< Requested ahead per connection, at most.
    Duration connect_timeout = std::chrono::seconds(1);  ///< Until a connection is up and welcomed.
    Duration stall_timeout = std::chrono::seconds(2);
    std::size_t batches = 1024;  ///< Accepted and not quiesced.
    std::size_t chunks = 65536;  ///< Per batch.
    std::size_t peers = 256;     ///< Connected by this node.
    std::size_t readers = 1024;  ///< Connections of peers to this node.
  };

  /// Listens and starts the thread. `sink` receives completions; `clock` outlives the fabric.
  ///
  /// Errors: kInvalidArgument when an option is out of its range; the kernel's when it cannot
  /// listen at the address; kInternal when no thread can be started.
  static Result<std::unique_ptr<TcpFabric>> create(const Options& options, const Clock& clock,
                                                   CompletionSink sink);
  ~TcpFabric() override;
  TcpFabric(const TcpFabric&) = delete;
  TcpFabric& operator=(const TcpFabric&) = delete;

  Result<RegionId> register_region(const Memory& memory) override;
  Result<void> lend(RegionId region, TimePoint until) override;
  void unregister_region(RegionId region) override;
  [[nodiscard]] FabricDescriptor describe() const override;
  Result<PeerId> connect(const FabricDescriptor& peer) override;
  Result<void> disconnect(PeerId peer) override;
  Result<void> read(Batch batch) override;
  Result<void> cancel(std::uint64_t ticket) override;

  /// The address it listens at, as text: "127.0.0.1:43211".
  [[nodiscard]] const std::string& address() const noexcept { return address_; }

 private:
  struct Loop;
  struct Connect;
  struct Disconnect {
    PeerId peer{};
  };
  struct Cancel {
    std::uint64_t ticket = 0;
  };
  struct Forget {
    RegionId region{};
    std::shared_ptr<std::promise<void>> done;  // The caller waits for it.
  };
  struct Iteration {
    std::shared_ptr<std::promise<void>> done;
  };
  using Command = std::variant<std::monostate, Batch, std::unique_ptr<Connect>, Disconnect, Cancel,
                               Forget, Iteration>;

  TcpFabric(const Options& options, CompletionSink sink);
  Result<void> start(const Clock& clock);
  Result<void> hand_over(Command command);
  template <typename Waited>
  void carry_out_and_wait(Waited command);
  void run();
  void carry_out(Command command);

  const Options options_;
  const CompletionSink sink_;
  const Id128 incarnation_ = Id128::random();
  std::string address_;
  mutable std::mutex regions_mutex_;  // For callers of register_region(), lend() and describe().
  tcp::RegionTable regions_;
  std::atomic<std::size_t> open_batches_{0};
  std::atomic<std::size_t> open_peers_{0};
  std::atomic<std::uint32_t> last_peer_{0};
  Mailbox<Command> mailbox_;
  std::atomic<bool> stop_{false};
  EventFd stop_wake_;
  std::unique_ptr<Loop> loop_;  // All state of the thread.
  std::thread thread_;
};

}  // namespace pegaflow
