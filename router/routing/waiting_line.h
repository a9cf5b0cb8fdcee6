#pragma once
/// \file
/// The queue of requests that wait for a decode engine with room.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "router/routing/fleet.h"

namespace pegaflow::router {

/// Serves clients by deficit round robin over the tokens of their prompts: of two clients that both
/// always have a request that an engine could take, neither gets more tokens than the other by more
/// than one request has. The requests of one client are served in the order of their arrival. A
/// request that cannot use an engine with room (another model) does not delay the others, and its
/// client collects no credit meanwhile.
///
/// Therefore no engine has room for a request in the line, and a request that finds an engine with
/// room overtakes no request that could use it, once serve_all() was called. Thread-bound; grows
/// to the limit that join() is given.
class WaitingLine {
 public:
  /// One request in the line.
  struct Place {
    /// The requirements on the engine. The objects that it refers to outlive the place.
    Fleet::Request request;
    /// Called once, when the place is removed other than by leave(): with an engine that has room,
    /// which the callee occupies before it returns, or with the reason for having none: kNone,
    /// kDown, or kBusy when the line was full and another client had a right to the place.
    std::function<void(const Fleet::Choice&)> called;
    std::uint64_t key = 0;     ///< The client whose share the request uses.
    std::uint64_t tokens = 1;  ///< Size of its prompt, about; at least 1.
    std::uint64_t pass = 0;    ///< The last serve_all() that found no room for it.
  };

  /// `place` keeps its address until it was called or has left. In a line of `most` requests the
  /// client with the most of them loses its newest one to a client with fewer. False, without a
  /// change, when there is no such client.
  bool join(Place& place, std::size_t most, TimePoint now);
  /// Has no effect on a place that was called.
  void leave(Place& place);

  /// Serves the line after `engine` may have got room for one more request.
  void serve(Fleet& fleet, const std::shared_ptr<Engine>& engine, TimePoint now);
  /// Serves the line after the engines have changed: their list, models, health or queues.
  void serve_all(Fleet& fleet, TimePoint now);

  /// The time that a new request of `key` would wait: what is served before it, at the speed at
  /// which requests have left the line. No value while none has.
  [[nodiscard]] std::optional<Duration> predicted_wait(std::uint64_t key, std::uint64_t tokens,
                                                       TimePoint now) const;
  /// The tokens that are served before a new request of `key`.
  [[nodiscard]] std::uint64_t tokens_before(std::uint64_t key, std::uint64_t tokens) const;

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// Clients with a request in the line.
  [[nodiscard]] std::size_t clients() const noexcept { return flows_.size(); }
  [[nodiscard]] std::uint64_t tokens() const noexcept;

 private:
  /// The requests of one client, at least one.
  struct Flow {
    std::uint64_t key = 0;
    std::deque<Place*> places{};  // In the order of arrival.
    std::uint64_t tokens = 0;     // Of its places.
    std::uint64_t deficit = 0;    // Tokens that it may have served before its next turn.
  };
  /// A request that may be served, and the rounds of one token for each client until it is.
  struct Pick {
    std::size_t flow = 0;
    std::size_t place = 0;
    std::uint64_t rounds = 0;
  };
  using Fits = std::function<bool(const Place&)>;

  /// The next request among those that `fits`, which are noted in candidates_.
  std::optional<Pick> pick(const Fits& fits);
  /// Removes a picked request, and gives the clients the rounds until its turn.
  Place& take(const Pick& pick);
  Place& remove(std::size_t flow, std::size_t place);
  void served(std::uint64_t tokens, TimePoint now);
  [[nodiscard]] Flow* find(std::uint64_t key);

  std::vector<Flow> flows_;              // In the order of their turns.
  std::vector<std::size_t> candidates_;  // Flows with a request that fits, of the last pick().
  std::size_t next_ = 0;                 // The flow whose turn is next.
  std::size_t size_ = 0;
  std::uint64_t pass_ = 0;
  // Tokens served, weighted by age, and the time with a line in which they were served.
  double served_tokens_ = 0;
  double served_seconds_ = 0;
  TimePoint measured_until_{};
};

}  // namespace pegaflow::router
