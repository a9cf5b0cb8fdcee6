#include <algorithm>

#include "engine/store/block_store_impl.h"

namespace pegaflow::engine {

Result<void> BlockStore::keep_journal() {
  if (impl_->journal) return {};
  PEGA_TRY_LET(auto made,
               Journal::create(impl_->options.journal_entries, impl_->options.journal_first));
  impl_->journal.emplace(std::move(made));
  return {};
}

BlockStore::JournalPart BlockStore::journal(SpaceId space, std::uint64_t from,
                                            std::size_t limit) const {
  JournalPart part;
  if (!impl_->journal) return part;
  const Journal& journal = *impl_->journal;
  part.next = journal.end();
  if (from == kJournalEnd) return part;
  part.has_lost = from < journal.begin() || from > journal.end();
  const std::uint64_t begin = part.has_lost ? journal.begin() : from;
  part.next = begin + std::min<std::uint64_t>(limit, journal.end() - begin);
  part.has_more = part.next != journal.end();
  part.entries.reserve(part.next - begin);
  for (std::uint64_t position = begin; position != part.next; ++position) {
    const Journal::Entry& entry = journal[position];
    if (entry.space == space) part.entries.push_back({entry.key, entry.is_present});
  }
  return part;
}

}  // namespace pegaflow::engine
