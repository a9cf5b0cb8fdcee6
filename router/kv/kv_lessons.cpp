#include "router/kv/kv_lessons.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/session_name.h"

namespace pegaflow::router {

std::size_t KvLessons::size_of(const Lesson& lesson) {
  return sizeof(Lesson) + lesson.bytes.size() + lesson.text.chunks.size() * 8 +
         lesson.chain.capacity() * sizeof(index::Key);
}

KvLessons::Lesson* KvLessons::find(std::string_view session) {
  const auto found = lessons_.find(session_name(session));
  return found == lessons_.end() ? nullptr : &found->second;
}

void KvLessons::begin(std::string_view session, const index::Text& text,
                      const std::vector<index::Key>& known, By by) {
  const std::uint64_t name = session_name(session);
  const auto found = lessons_.find(name);
  if (found != lessons_.end()) {
    Lesson& lesson = found->second;
    if (!lesson.has_ended) {
      // Events of one could be taken for blocks of the other.
      if (!lesson.is_ambiguous) ++stats_.ambiguous;
      lesson.is_ambiguous = true;
      ++lesson.requests;
      return;
    }
    teach(lesson);
    bytes_ -= size_of(lesson);
    lessons_.erase(found);
  }
  Lesson lesson{.bytes = std::string(text.bytes), .text = text, .chain = known, .by = by};
  const std::size_t size = size_of(lesson);
  if (lessons_.size() >= kMaxLessons || bytes_ + size > max_bytes_) {
    ++stats_.refused;
    return;
  }
  bytes_ += size;
  Lesson& kept = lessons_.emplace(name, std::move(lesson)).first->second;
  kept.text.bytes = kept.bytes;
}

void KvLessons::stored(std::string_view session, const index::Key* parent, const index::Key* keys,
                       std::size_t count) {
  Lesson* const found = find(session);
  if (found == nullptr || count == 0) return;
  Lesson& lesson = *found;
  if (lesson.is_ambiguous || lesson.by != By::kEvents) return;
  std::size_t at = 0;
  if (parent != nullptr) {
    // Mostly the last block so far.
    const auto last = std::find(lesson.chain.rbegin(), lesson.chain.rend(), *parent);
    if (last == lesson.chain.rend()) {
      ++stats_.orphans;
      return;
    }
    at = static_cast<std::size_t>(lesson.chain.rend() - last);
  }
  if (at + count > kMaxBlocks) return;
  const bool is_same =
      lesson.chain.size() >= at + count &&
      std::equal(keys, keys + count, lesson.chain.begin() + static_cast<std::ptrdiff_t>(at));
  if (is_same && lesson.confirmed >= at + count) return;
  const std::size_t room = lesson.chain.capacity();
  // A vector at most doubles what it needs.
  if (at + count > room && bytes_ + (2 * (at + count) - room) * sizeof(index::Key) > max_bytes_) {
    ++stats_.refused;
    return;
  }
  bytes_ -= size_of(lesson);
  if (!is_same) {
    // What was expected behind this place was wrong.
    lesson.chain.resize(at);
    lesson.chain.insert(lesson.chain.end(), keys, keys + count);
  }
  bytes_ += size_of(lesson);
  lesson.confirmed = std::max(lesson.confirmed, at + count);
  if (!is_same) lesson.confirmed = at + count;
  lesson.is_changed = true;
}

void KvLessons::first_token(std::string_view session) {
  Lesson* const lesson = find(session);
  if (lesson == nullptr) return;
  lesson->is_whole = true;
  teach(*lesson);
}

bool KvLessons::reported(std::uint64_t session, std::vector<index::Key> keys) {
  const auto found = lessons_.find(session);
  if (found == lessons_.end() || found->second.by != By::kChain) return false;
  Lesson& lesson = found->second;
  if (lesson.is_ambiguous || keys.empty() || keys.size() > kMaxBlocks) return false;
  if (bytes_ + keys.size() * sizeof(index::Key) > max_bytes_) {
    ++stats_.refused;
    return false;
  }
  bytes_ -= size_of(lesson);
  lesson.chain = std::move(keys);
  bytes_ += size_of(lesson);
  lesson.confirmed = lesson.chain.size();
  lesson.is_whole = true;  // It is of the whole prompt.
  lesson.is_changed = true;
  ++stats_.chains;
  teach(lesson);
  return true;
}

void KvLessons::end(std::string_view session, TimePoint now) {
  Lesson* const found = find(session);
  if (found == nullptr) return;
  Lesson& lesson = *found;
  if (--lesson.requests > 0) return;
  lesson.has_ended = true;
  lesson.is_whole = true;
  lesson.ended = now;
  teach(lesson);
}

void KvLessons::teach(Lesson& lesson) {
  if (!lesson.is_changed || !lesson.is_whole || lesson.is_ambiguous) return;
  lesson.is_changed = false;
  const auto keys = std::span<const index::Key>(lesson.chain).first(lesson.confirmed);
  texts_.learn(lesson.text, keys);
  if (on_learned_) on_learned_(lesson.text, keys);
  ++stats_.learned;
}

void KvLessons::tick(TimePoint now) {
  for (auto at = lessons_.begin(); at != lessons_.end();) {
    Lesson& lesson = at->second;
    teach(lesson);
    if (lesson.has_ended && now - lesson.ended >= kLate) {
      bytes_ -= size_of(lesson);
      at = lessons_.erase(at);
    } else {
      ++at;
    }
  }
}

}  // namespace pegaflow::router
