#pragma once
/// \file
/// Questions that were asked on one thread and are answered on another.

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/clock.h"
#include "base/error.h"
#include "client/cache_session.h"

namespace pegaflow {

/// The place of each answer is taken when its question is accepted, so that an answer always finds
/// one. Thread-safe, with one lock that is held for a lookup in a small table.
class QuestionTable {
 public:
  using Ticket = CacheSession::Ticket;

  struct Outcome {
    CacheSession::Answer answer = {};
    std::uint64_t generation = 0;  ///< Of reset_cache().
    CacheSession::Journal journal = {};
  };

  explicit QuestionTable(std::size_t capacity) : capacity_(capacity) {}

  /// Errors: kBusy when as many questions are under way, or not taken, as the table holds.
  Result<Ticket> add();

  /// False when nobody will take it: the caller ends a claim that it carries.
  [[nodiscard]] bool answer(Ticket ticket, Result<Outcome> outcome);

  /// As CacheSession::take().
  std::optional<Result<Outcome>> take(Ticket ticket, Duration patience);

  /// Gives the answer if it was there already: the caller ends a claim that it carries.
  std::optional<Outcome> forget(Ticket ticket);

 private:
  const std::size_t capacity_;
  std::mutex mutex_;
  std::condition_variable answered_;
  std::uint64_t last_ = 0;
  std::unordered_map<std::uint64_t, std::optional<Result<Outcome>>> rows_;
};

}  // namespace pegaflow
