#pragma once
/// \file
/// Questions from one thread that another thread answers.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/clock.h"
#include "base/error.h"
#include "client/session_types.h"

namespace pegaflow {

/// The place of each answer is reserved when its question is accepted, so that an answer always has
/// one. Thread-safe, with one lock that is held for a lookup in a small table.
class QuestionTable {
 public:
  using Ticket = SessionTicket;

  struct Outcome {
    SessionAnswer answer = {};
    SessionBoundaries boundaries = {};
    SessionReset reset = {};
    SessionJournal journal = {};
    std::uint64_t reached = 0;  ///< As CacheSession::take_wait().
  };

  explicit QuestionTable(std::size_t capacity) : capacity_(capacity) {}

  /// Errors: kBusy when the table is full of questions that are pending or not taken.
  Result<Ticket> add();

  /// False if the question was forgotten: the caller ends a claim that the answer carries.
  [[nodiscard]] bool answer(Ticket ticket, Result<Outcome> outcome);

  /// As CacheSession::take(). A waiting caller polls for a moment before it sleeps.
  std::optional<Result<Outcome>> take(Ticket ticket, Duration patience);

  /// The number of answers and interruptions so far. Does not block.
  [[nodiscard]] std::uint64_t events() const { return events_.load(std::memory_order_acquire); }
  /// Sleeps until events() is no longer `seen`, for at most `patience`; whether it changed.
  bool await_event(std::uint64_t seen, Duration patience);
  /// Ends await_event() of another thread.
  void interrupt();

  /// Returns the answer if it had already arrived: the caller ends a claim that it carries.
  std::optional<Outcome> forget(Ticket ticket);

 private:
  /// Returns, with the lock held again, when `decided()` or after `patience`. Uses processor time:
  /// it yields but does not sleep.
  template <typename Decided>
  void poll(std::unique_lock<std::mutex>& lock, Duration patience, Decided decided);

  const std::size_t capacity_;
  std::mutex mutex_;
  std::condition_variable answered_;
  /// Count of answers and interruptions; changes under the lock.
  std::atomic<std::uint64_t> events_ = 0;
  std::uint64_t last_ = 0;
  std::unordered_map<std::uint64_t, std::optional<Result<Outcome>>> rows_;
};

}  // namespace pegaflow
