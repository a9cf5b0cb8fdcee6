#include "router/kv/kv_lessons.h"

#include <algorithm>
#include <span>

namespace pegaflow::router {

std::size_t KvLessons::size_of(const Lesson& lesson) {
  return sizeof(Lesson) + lesson.bytes.size() + lesson.text.chunks.size() * 8 +
         lesson.chain.capacity() * sizeof(index::Key);
}

void KvLessons::begin(std::string_view session, const index::Text& text,
                      const std::vector<index::Key>& known) {
  std::string name(session);
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
  Lesson lesson{.bytes = std::string(text.bytes), .text = text, .chain = known};
  const std::size_t size = size_of(lesson);
  if (lessons_.size() >= kMaxLessons || bytes_ + size > max_bytes_) {
    ++stats_.refused;
    return;
  }
  bytes_ += size;
  Lesson& kept = lessons_.emplace(std::move(name), std::move(lesson)).first->second;
  kept.text.bytes = kept.bytes;
}

void KvLessons::stored(std::string_view session, const index::Key* parent, const index::Key* keys,
                       std::size_t count) {
  const auto found = lessons_.find(std::string(session));
  if (found == lessons_.end() || count == 0) return;
  Lesson& lesson = found->second;
  if (lesson.is_ambiguous) return;
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
  const auto found = lessons_.find(std::string(session));
  if (found == lessons_.end()) return;
  found->second.is_whole = true;
  teach(found->second);
}

void KvLessons::end(std::string_view session, TimePoint now) {
  const auto found = lessons_.find(std::string(session));
  if (found == lessons_.end()) return;
  Lesson& lesson = found->second;
  if (--lesson.requests > 0) return;
  lesson.has_ended = true;
  lesson.is_whole = true;
  lesson.ended = now;
  teach(lesson);
}

void KvLessons::teach(Lesson& lesson) {
  if (!lesson.is_changed || !lesson.is_whole || lesson.is_ambiguous) return;
  lesson.is_changed = false;
  texts_.learn(lesson.text, std::span<const index::Key>(lesson.chain).first(lesson.confirmed));
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
