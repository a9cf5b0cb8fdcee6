#include "server/direct/consents.h"

#include <algorithm>

namespace pegaflow::server {

void Consents::joined(SourceId name, bool needs_consent) {
  there_.insert(name);
  if (needs_consent) turns_.try_emplace(name);
}

void Consents::left(SourceId name) {
  there_.erase(name);
  turns_.erase(name);
  for (auto& [source, turns] : turns_) {
    std::erase(turns.waiting, name);
    turns.refused.erase(name);
  }
  has_news_ = true;
}

Consents::Answer Consents::begin(SourceId source, SourceId reader) {
  const auto found = turns_.find(source);
  if (found == turns_.end()) return Answer::kWait;
  Turns& turns = found->second;
  if (turns.refused.contains(reader)) return Answer::kRefused;
  const bool has_turn = turns.holder == reader && turns.asked == kNone;
  if (has_turn && (turns.waiting.empty() || turns.is_fresh)) {
    turns.is_fresh = false;
    ++turns.reads;
    return Answer::kTurn;
  }
  if (!has_turn && turns.asked != reader && std::ranges::count(turns.waiting, reader) == 0) {
    turns.waiting.push_back(reader);
    has_news_ = true;
  }
  return Answer::kWait;
}

void Consents::gave_up(SourceId reader) {
  for (auto& [source, turns] : turns_) {
    if (std::erase(turns.waiting, reader) != 0) has_news_ = true;
  }
}

void Consents::ended(SourceId source) {
  const auto found = turns_.find(source);
  if (found == turns_.end()) return;
  Turns& turns = found->second;
  if (turns.reads == 0) return;
  --turns.reads;
  if (turns.reads == 0) has_news_ = true;
}

std::uint64_t Consents::permitted(SourceId source, SourceId reader, SourceId refused,
                                  TimePoint now) {
  Turns& turns = turns_.at(source);
  if (refused != kNone && refused == turns.asked && there_.contains(refused)) {
    turns.refused.insert(refused);
  }
  if (reader != kNone && reader == turns.asked) {
    turns.is_fresh = true;
    turns.since = now;
  }
  turns.holder = reader;
  turns.asked = kNone;
  return ++turns.wait;
}

bool Consents::is_waiting(SourceId source, std::uint64_t wait) const {
  const auto found = turns_.find(source);
  return found != turns_.end() && found->second.wait == wait;
}

std::optional<SourceId> Consents::next(SourceId source, TimePoint now) {
  Turns& turns = turns_.at(source);
  if (turns.asked != kNone || turns.reads != 0) return std::nullopt;
  if (!turns.waiting.empty()) {
    if (turns.is_fresh && there_.contains(turns.holder) && now < turns.since + kTurn) {
      return std::nullopt;
    }
    turns.asked = turns.waiting.front();
    turns.waiting.pop_front();
    return turns.asked;
  }
  if (turns.holder != kNone && !there_.contains(turns.holder)) return kNone;
  return std::nullopt;
}

TimePoint Consents::look_again(SourceId source) const {
  const auto found = turns_.find(source);
  const bool is_timed =
      found != turns_.end() && found->second.is_fresh && !found->second.waiting.empty();
  return is_timed ? found->second.since + kTurn : TimePoint::max();
}

}  // namespace pegaflow::server
