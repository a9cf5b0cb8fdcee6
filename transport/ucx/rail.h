#pragma once
/// \file
/// One card and the thread that drives it.

#include <atomic>
#include <cstddef>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/id128.h"
#include "base/os/event_fd.h"
#include "base/os/mailbox.h"
#include "transport/dealer.h"
#include "transport/ucx/requester.h"
#include "transport/ucx/responder.h"
#include "transport/ucx/worker.h"

namespace pegaflow::ucx {

/// A rail: one NIC, with UCX's context for it, one worker for requests and one for responses, and a
/// thread of its own, on the cores of the card's NUMA node.
///
/// Two workers, so that each connection between two nodes has one direction: a reader that closes
/// its own breaks no other, and a holder that cuts off a reader closes only that reader's.
///
/// While GETs are in flight the thread spins for a moment before it sleeps. Without work it sleeps
/// until UCX, a caller or a timer wakes it.
///
/// Thread-safe, except where noted.
class Rail {
 public:
  struct Options {
    std::string device;
    bool sockets = false;
    std::optional<GpuContext> gpu{};  ///< As in UcxFabric::Options.
    std::size_t peers = 256;
    Duration spin{};
    std::vector<std::uint32_t> cores;  ///< The thread's affinity; empty: any core.
    Requester::Options requester;
    Responder::Options responder;
    std::size_t commands = 1024;
  };
  struct Hooks {
    std::function<void()>
        deliver;  ///< Completions are ready at the dealer. Called on any rail's thread.
    std::function<void()> nudge_others;  ///< There is work for other rails.
    bool keeps_time = false;             ///< This rail calls Dealer::on_time().
  };

  /// Starts the thread. All references outlive it.
  /// Errors: as Context::open() and GpuContext::make_current; kInternal without a thread.
  static Result<std::unique_ptr<Rail>> open(const Options& options, const UcpApi& api,
                                            const Id128& incarnation, Dealer& dealer,
                                            const Clock& clock, Hooks hooks);
  ~Rail();
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;

  [[nodiscard]] const std::string& device() const noexcept { return options_.device; }
  /// The address of the worker for responses.
  [[nodiscard]] const std::vector<std::byte>& address() const noexcept { return address_; }

  /// Closes every endpoint, and returns when the card touches nothing any longer. Afterwards only
  /// nudge() may be called.
  void stop();

  /// Registers memory; returns the key for peers. Errors: kRefused for memory of another GPU than
  /// Options::gpu; as Context::check_kind() and Context::map().
  std::future<Result<std::vector<std::byte>>> map(RegionId region, const Memory& memory);
  /// Makes readers stop, removes the memory from the card, and then fulfills the promise. No local
  /// operation on the region is in flight. Unknown regions are fine.
  std::future<void> unmap(RegionId region);
  /// Ends older leases if `revoke`; `done`, if given, is set when no reader uses one.
  void lend(RegionId region, TimePoint until, bool revoke,
            std::shared_ptr<std::promise<void>> done);
  void connect(Fabric::PeerId id, std::shared_ptr<const PeerAddress> where);
  void disconnect(Fabric::PeerId id);
  /// Wakes the thread: the dealer has new work or a completion.
  void nudge();

 private:
  struct Connect {
    Fabric::PeerId id{};
    std::shared_ptr<const PeerAddress> where;
  };
  struct Disconnect {
    Fabric::PeerId id{};
  };
  struct Map {
    RegionId region{};
    Memory memory;
    std::shared_ptr<std::promise<Result<std::vector<std::byte>>>> done;
  };
  struct Unmap {
    RegionId region{};
    std::shared_ptr<std::promise<void>> done;
  };
  struct Lend {
    RegionId region{};
    TimePoint until;
    bool revoke = false;
    std::shared_ptr<std::promise<void>> done;
  };
  using Command = std::variant<std::monostate, Connect, Disconnect, Map, Unmap, Lend>;
  struct Loop;

  Rail(const Options& options, const UcpApi& api, const Id128& incarnation, Dealer& dealer,
       const Clock& clock, Hooks hooks);
  void hand_over(const Command& command);
  Result<void> start();
  void run();
  bool iterate();
  void sleep();
  void end();
  void carry_out(Command command);
  Result<std::vector<std::byte>> map_now(const Map& map);
  void take_messages();
  void report_outcomes();

  const Options options_;
  const UcpApi& api_;
  const Id128 incarnation_;
  Dealer& dealer_;
  const Clock& clock_;
  const Hooks hooks_;
  std::vector<std::byte> address_;
  Mailbox<Command> mailbox_;
  std::atomic<bool> commanded_{false};
  std::atomic<bool> nudged_{false};
  std::atomic<bool> stop_{false};
  EventFd wake_;
  std::unique_ptr<Loop> loop_;  // All state of the thread.
  std::thread thread_;
};

}  // namespace pegaflow::ucx
