#pragma once
/// \file
/// The nodes that dialed this one, and which of its epochs each has.

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

/// Tells the nodes that dialed this one of its epochs, as soon as one becomes newer.
///
/// A node that reads from here need not be in the list of peers here, so that nothing can be sent
/// to it. It asks for news instead, with the number of changes that it has taken, and is answered
/// when there are more. A reset waits for the next question, which says that the epoch is there.
/// Thread-bound: the RPC thread.
class EpochWatches {
 public:
  struct Dialer {
    Id128 node;        ///< Its incarnation.
    std::string name;  ///< In logs and reports.
  };
  /// Whether a node is asked by another way, which also reports it.
  using IsAsked = std::function<bool(const Dialer& dialer)>;

  /// All outlive it.
  EpochWatches(Epochs& epochs, kj::Timer& timer, IsAsked is_asked);
  ~EpochWatches();
  EpochWatches(const EpochWatches&) = delete;
  EpochWatches& operator=(const EpochWatches&) = delete;

  /// A dialer that has proved itself, until its connection ends.
  void entered(const Id128& connection, Dialer dialer);
  void left(const Id128& connection);

  /// The dialer of that connection has taken the first `seen` changes of the epochs. Answers when
  /// there are more, or after `patience`.
  kj::Promise<void> await_news(const Id128& connection, std::uint64_t seen, Duration patience);

  /// Whether there are dialers that are not asked by another way.
  [[nodiscard]] bool has_unasked() const;
  /// Waits until they have all epochs that are known here now. Returns the names of those that do
  /// not after `patience`.
  kj::Promise<std::vector<std::string>> spread(Duration patience);

 private:
  struct Watch {
    Dialer dialer;
    std::uint64_t seen = 0;
  };
  /// Wakes all who wait for it, again and again.
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
  Signal news_;                               ///< Of epochs.
  Signal progress_;                           ///< Of dialers.
};

}  // namespace pegaflow::cluster
