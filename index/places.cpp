#include "index/places.h"

#include "base/assert.h"

namespace pegaflow::index {
namespace {

// Of 15 slots: at a higher load more keys go past their bucket, at a lower one memory is unused.
constexpr std::size_t kKeysPerBucket = 12;

}  // namespace

Result<Places> Places::create(std::size_t max_keys, Place max_place) {
  const std::size_t buckets = max_keys / kKeysPerBucket + 2;
  PEGA_TRY_LET(ZeroArray<Bucket> lines, ZeroArray<Bucket>::create(buckets));
  return Places(std::move(lines), buckets, max_place);
}

void Places::insert(Key key, Place place) noexcept {
  std::size_t bucket = home(key);
  for (std::size_t visited = 0; visited < buckets_; ++visited) {
    Bucket& line = lines_[bucket];
    if (const unsigned empty = equal_slots(line, kWhole, 0); empty != 0) {
      line.slots[std::countr_zero(empty)] = slot_of(key, place);
      return;
    }
    ++line.passed;
    bucket = next(bucket);
  }
  PEGA_ASSERT(false, "{} buckets are full", buckets_);
}

std::uint32_t& Places::slot_at(Key key, Place place, std::size_t& bucket) noexcept {
  bucket = home(key);
  for (std::size_t visited = 0; visited < buckets_; ++visited) {
    Bucket& line = lines_[bucket];
    const unsigned slot = equal_slots(line, kWhole, slot_of(key, place));
    if (slot != 0) return line.slots[std::countr_zero(slot)];
    bucket = next(bucket);
  }
  assertion_failed(__FILE__, __LINE__, "the key is in the table", "");
}

void Places::erase(Key key, Place place) noexcept {
  std::size_t last = 0;
  slot_at(key, place, last) = 0;
  for (std::size_t bucket = home(key); bucket != last; bucket = next(bucket)) {
    --lines_[bucket].passed;
  }
}

void Places::move(Key key, Place from, Place to) noexcept {
  std::size_t bucket = 0;
  slot_at(key, from, bucket) = slot_of(key, to);
}

}  // namespace pegaflow::index
