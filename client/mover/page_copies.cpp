#include "client/mover/page_copies.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "transport/checksum.h"

namespace pegaflow {

PageCopies::PageCopies(const KindPages& kind, std::span<const std::uint32_t> blocks,
                       std::span<const Page> pages, std::uint64_t ticket,
                       std::uint64_t& last_ticket)
    : pages_(pages.size()),
      is_cut_(kind.is_cut),
      wants_checksums_(
          std::any_of(pages.begin(), pages.end(), [](const Page& page) { return page.checksum; })) {
  const std::size_t per_key = kind.blocks_per_key();
  for (std::size_t i = 0; i < kind.members.size(); ++i) {
    const KindPages::Member& member = kind.members[i];
    Part& part = parts_.emplace_back();
    part.ticket = i == 0 ? ticket : ++last_ticket;
    part.layout = member.layout;
    part.page_bytes = member.bytes;
    part.copies.reserve(pages.size());
    for (const Page& page : pages) {
      const std::uint32_t block = blocks[page.place * per_key + (kind.is_cut ? 0 : i)];
      part.copies.push_back({block, page.pool_offset + member.begin, page.checksum});
    }
  }
}

void PageCopies::submit(Device& device, Device::Event after, BatchOwner owner, Batches& batches,
                        std::uint64_t peer, std::vector<std::uint32_t> guards) {
  for (owner.member = 0; owner.member < parts_.size(); ++owner.member) {
    Part& part = parts_[owner.member];
    Result<void> accepted =
        device.submit({part.ticket, owner.direction, after, std::move(part.copies), part.layout,
                       peer, std::exchange(guards, {})});
    if (!accepted) return fail_with(std::move(accepted.error()), device);
    part.in_flight = true;
    ++in_flight_;
    batches.emplace(part.ticket, owner);
  }
}

void PageCopies::fail_with(Error error, Device& device) {
  if (error_) return;
  error_ = std::move(error);
  cancel(device);
}

void PageCopies::cancel(Device& device) const {
  for (const Part& part : parts_) {
    if (part.in_flight) device.cancel(part.ticket);
  }
}

void PageCopies::take(std::size_t member, Device::Completion&& completion, Device& device) {
  PEGA_ASSERT(member < parts_.size() && parts_[member].in_flight,
              "the device completed batch {}, which is not in flight", completion.ticket);
  PEGA_ASSERT(completion.copied <= pages_ && (completion.copied == pages_) == !completion.error,
              "the device copied {} of {} pages", completion.copied, pages_);
  Part& part = parts_[member];
  part.in_flight = false;
  --in_flight_;
  part.copied = completion.copied;
  part.checksums = std::move(completion.checksums);
  if (member == 0) guards_ = std::move(completion.guards);
  if (completion.error) fail_with(std::move(*completion.error), device);
}

std::vector<std::uint64_t> PageCopies::tickets() const {
  std::vector<std::uint64_t> tickets;
  for (const Part& part : parts_) tickets.push_back(part.ticket);
  return tickets;
}

std::size_t PageCopies::good_pages() const noexcept {
  std::size_t good = pages_;
  for (const Part& part : parts_) good = std::min(good, part.copied);
  return good;
}

std::uint64_t PageCopies::bytes_copied() const noexcept {
  std::uint64_t bytes = 0;
  for (const Part& part : parts_) bytes += part.copied * part.page_bytes;
  return bytes;
}

std::vector<std::uint64_t> PageCopies::checksums() const {
  if (!wants_checksums_) return {};
  std::vector<std::uint64_t> checksums;
  std::vector<std::uint64_t> of_parts;
  for (std::size_t page = 0; page < pages_; ++page) {
    read_parts(page, of_parts);
    checksums.push_back(checksum_of_parts(of_parts));
  }
  return checksums;
}

std::vector<std::uint64_t> PageCopies::checksums_of_shards() const {
  if (!is_cut_ || !wants_checksums_) return checksums();
  std::vector<std::uint64_t> checksums;
  std::vector<std::uint64_t> of_parts;
  for (std::size_t page = 0; page < pages_; ++page) {
    read_parts(page, of_parts);
    checksums.insert(checksums.end(), of_parts.begin(), of_parts.end());
  }
  return checksums;
}

void PageCopies::read_parts(std::size_t page, std::vector<std::uint64_t>& of_parts) const {
  of_parts.clear();
  for (const Part& part : parts_) {
    of_parts.push_back(page < part.checksums.size() ? part.checksums[page] : kNoChecksum);
  }
}

}  // namespace pegaflow
