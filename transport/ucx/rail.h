#pragma once
/// \file
/// One card and the thread that drives it.

#include <atomic>
#include <cstddef>
#include <functional>
#include <future>
#include <memory>
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

/// A rail: one NIC, with UCX's context for it, a worker that asks and one that serves, and a thread
/// of its own, on the cores of the card's NUMA node.
///
/// Two workers, so that each way between two nodes has a direction: a reader that closes its own
/// ends nobody else's, and a holder that cuts one off knows which.
///
/// While GETs are under way the thread spins for a moment before it sleeps; with nothing to do it
/// sleeps until UCX, a caller or a timer wakes it.
///
/// Thread-safe but where it says otherwise.
class Rail {
 public:
  struct Options {
    std::string device;
    bool sockets = false;
    std::size_t peers = 256;
    Duration spin{};
    std::vector<std::uint32_t> cores;  ///< Where the thread runs; empty: anywhere.
    Requester::Options requester;
    Responder::Options responder;
    std::size_t commands = 1024;
  };
  struct Hooks {
    std::function<void()> deliver;       ///< Completions wait at the dealer. On any rail's thread.
    std::function<void()> nudge_others;  ///< There is something for other rails.
    bool keeps_time = false;             ///< This one calls Dealer::on_time().
  };

  /// Starts the thread. All references outlive it.
  /// Errors: as Context::open(); kInternal without a thread.
  static Result<std::unique_ptr<Rail>> open(const Options& options, const UcpApi& api,
                                            const Id128& incarnation, Dealer& dealer,
                                            const Clock& clock, Hooks hooks);
  ~Rail();
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;

  [[nodiscard]] const std::string& device() const noexcept { return options_.device; }
  /// Of the worker that serves.
  [[nodiscard]] const std::vector<std::byte>& address() const noexcept { return address_; }

  /// Ends every endpoint, and returns when the card touches nothing any more. nudge() still may be
  /// called; nothing else.
  void stop();

  /// Registers memory; the value is the key for peers. Errors: as Context::map().
  std::future<Result<std::vector<std::byte>>> map(RegionId region, std::span<std::byte> memory);
  /// Has readers stop, takes the memory from the card, and then keeps the promise. Nothing of ours
  /// is under way there. Unknown regions are fine.
  std::future<void> unmap(RegionId region);
  /// Ends the older promises if `revoke`; `done`, if there is one, is set when none is left.
  void lend(RegionId region, TimePoint until, bool revoke,
            std::shared_ptr<std::promise<void>> done);
  void connect(Fabric::PeerId id, std::shared_ptr<const PeerAddress> where);
  void disconnect(Fabric::PeerId id);
  /// The dealer has something new, or a completion is to be delivered.
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
    std::span<std::byte> memory;
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
  std::unique_ptr<Loop> loop_;  // All that belongs to the thread.
  std::thread thread_;
};

}  // namespace pegaflow::ucx
