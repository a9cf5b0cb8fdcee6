#pragma once
/// \file
/// The nodes that dialed this one, and the epochs that each of them has received.

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include <kj/timer.h>

#include "base/clock.h"
#include "base/id128.h"
#include "cluster/epochs.h"

namespace pegaflow::cluster {

/// Sends epochs to the nodes that dialed this one, as soon as one becomes newer.
///
/// A node that reads from this one need not be in the list of peers here, so this node cannot send
/// to it. Instead that node requests news, with the count of changes that it has received, and the
/// response is sent when there are more. A reset waits for its next request, which confirms the
/// epoch. Thread-bound: the RPC thread.
class EpochWatches {
 public:
  struct Dialer {
    Id128 node;        ///< Its incarnation.
    std::string name;  ///< In logs and reports.
  };
  /// Whether a node receives resets over a link of this node, which also reports it.
  using IsAsked = std::function<bool(const Dialer& dialer)>;

  /// All arguments outlive it.
  EpochWatches(Epochs& epochs, kj::Timer& timer, IsAsked is_asked);
  ~EpochWatches();
  EpochWatches(const EpochWatches&) = delete;
  EpochWatches& operator=(const EpochWatches&) = delete;

  /// Adds a dialer that has proved itself, until left() ends its connection.
  void entered(const Id128& connection, Dialer dialer);
  void left(const Id128& connection);

  /// The dialer of that connection has received the first `seen` changes of the epochs. Resolves
  /// when there are more, or after `patience`.
  kj::Promise<void> await_news(const Id128& connection, std::uint64_t seen, Duration patience);

  /// Whether there are dialers that do not receive resets over a link of this node.
  [[nodiscard]] bool has_unasked() const;
  /// Waits until those dialers have all epochs that are known here now. Returns the names of those
  /// that do not after `patience`.
  kj::Promise<std::vector<std::string>> spread(Duration patience);

 private:
  struct Watch {
    Dialer dialer;
    std::uint64_t seen = 0;
  };
  /// Wakes all waiters at each raise().
  class Signal {
   public:
    Signal();
    void raise();
    kj::Promise<void> wait() { return raised_.addBranch(); }

   private:
    kj::Own<kj::PromiseFulfiller<void>> fulfiller_;
    kj::ForkedPromise<void> raised_;
  };

  [[nodiscard]] std::vector<std::string> behind(std::uint64_t changes) const;
  kj::Promise<std::vector<std::string>> spread(std::uint64_t changes, kj::TimePoint end);

  Epochs& epochs_;
  kj::Timer& timer_;
  IsAsked is_asked_;
  std::unordered_map<Id128, Watch> watches_;  ///< By connection.
  Signal news_;                               ///< An epoch became newer.
  Signal progress_;                           ///< A dialer received epochs, or left.
};

}  // namespace pegaflow::cluster
