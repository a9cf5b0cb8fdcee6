#include "server/direct/consents.h"

namespace pegaflow::server {

void Consents::joined(SourceId name, bool needs_consent) {
  there_.insert(name);
  if (needs_consent) turns_.try_emplace(name);
}

void Consents::left(SourceId name) {
  there_.erase(name);
  turns_.erase(name);
  for (auto& [source, turns] : turns_) {
    if (turns.waits == name) turns.waits = kNone;
  }
  has_news_ = true;
}

bool Consents::begin(SourceId source, SourceId reader) {
  const auto found = turns_.find(source);
  if (found == turns_.end()) return false;
  Turns& turns = found->second;
  const bool has_turn = turns.holder == reader && turns.asked == kNone;
  if (has_turn && (turns.waits == kNone || turns.is_fresh)) {
    turns.is_fresh = false;
    ++turns.reads;
    return true;
  }
  if (!has_turn && turns.waits == kNone && turns.asked != reader) {
    turns.waits = reader;
    has_news_ = true;
  }
  return false;
}

void Consents::ended(SourceId source) {
  const auto found = turns_.find(source);
  if (found == turns_.end()) return;
  Turns& turns = found->second;
  if (turns.reads == 0) return;
  --turns.reads;
  if (turns.reads == 0) has_news_ = true;
}

std::uint64_t Consents::permitted(SourceId source, SourceId reader, TimePoint now) {
  Turns& turns = turns_.at(source);
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
  if (turns.waits != kNone) {
    if (turns.is_fresh && there_.contains(turns.holder) && now < turns.since + kTurn) {
      return std::nullopt;
    }
    turns.asked = std::exchange(turns.waits, kNone);
    return turns.asked;
  }
  if (turns.holder != kNone && !there_.contains(turns.holder)) return kNone;
  return std::nullopt;
}

TimePoint Consents::look_again(SourceId source) const {
  const auto found = turns_.find(source);
  const bool is_timed =
      found != turns_.end() && found->second.is_fresh && found->second.waits != kNone;
  return is_timed ? found->second.since + kTurn : TimePoint::max();
}

}  // namespace pegaflow::server
