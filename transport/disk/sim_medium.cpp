#include "transport/disk/sim_medium.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pegaflow::disk {

void SimMedium::read(std::uint64_t offset, std::span<std::byte> to) const {
  for (std::uint64_t at = 0; at < to.size(); at += kSector) {
    const auto found = sectors_.find((offset + at) / kSector);
    const Content* const content = found == sectors_.end() ? nullptr
                                   : found->second.cached != nullptr
                                       ? found->second.cached.get()
                                       : found->second.persisted.get();
    const std::span<std::byte> place = to.subspan(at, kSector);
    if (content == nullptr) {
      std::fill(place.begin(), place.end(), std::byte{0});
    } else {
      std::copy(content->begin(), content->end(), place.begin());
    }
  }
}

void SimMedium::write(std::uint64_t offset, std::span<const std::byte> from, bool durable) {
  ++writes_;
  for (std::uint64_t at = 0; at < from.size(); at += kSector) {
    const std::uint64_t number = (offset + at) / kSector;
    bad_.erase(number);
    Sector& sector = sectors_[number];
    std::unique_ptr<Content>& content = durable ? sector.persisted : sector.cached;
    if (!durable && sector.cached == nullptr) sector.cached_since = writes_;
    if (content == nullptr) content = std::make_unique<Content>();
    std::memcpy(content->data(), from.data() + at, kSector);
    if (durable) {
      sector.cached.reset();
      unflushed_.erase(number);
    } else {
      unflushed_.insert(number);
    }
  }
}

void SimMedium::flush(std::uint64_t begun) {
  for (auto number = unflushed_.begin(); number != unflushed_.end();) {
    Sector& sector = sectors_[*number];
    if (sector.cached_since <= begun) {
      // A later write of the same sector may be in it: a device writes what it has.
      sector.persisted = std::move(sector.cached);
      number = unflushed_.erase(number);
    } else {
      ++number;
    }
  }
}

std::uint64_t SimMedium::lose_some(Random& random) {
  std::uint64_t lost = 0;
  for (const std::uint64_t number : unflushed_) {
    Sector& sector = sectors_[number];
    if (random() % 2 == 0) {
      sector.persisted = std::move(sector.cached);
    } else {
      sector.cached.reset();
      ++lost;
    }
  }
  unflushed_.clear();
  return lost;
}

std::uint64_t SimMedium::lose_all() {
  const std::uint64_t lost = unflushed_.size();
  for (const std::uint64_t number : unflushed_) sectors_[number].cached.reset();
  unflushed_.clear();
  return lost;
}

void SimMedium::poke(std::uint64_t offset, std::span<const std::byte> from) {
  write(offset, from, true);
}

void SimMedium::flip_bit(std::uint64_t offset, unsigned bit) {
  Sector& sector = sectors_[offset / kSector];
  if (sector.persisted == nullptr) sector.persisted = std::make_unique<Content>(Content{});
  for (Content* const content : {sector.persisted.get(), sector.cached.get()}) {
    if (content != nullptr) (*content)[offset % kSector] ^= std::byte{1} << (bit % 8);
  }
}

void SimMedium::set_bad(std::uint64_t offset, bool bad) {
  if (bad) {
    bad_.insert(offset / kSector);
  } else {
    bad_.erase(offset / kSector);
  }
}

bool SimMedium::is_bad(std::uint64_t offset, std::uint64_t size_bytes) const {
  const auto first = bad_.lower_bound(offset / kSector);
  return first != bad_.end() && *first < (offset + size_bytes) / kSector;
}

}  // namespace pegaflow::disk
