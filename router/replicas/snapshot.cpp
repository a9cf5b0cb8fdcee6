#include "router/replicas/snapshot.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <variant>

#include "router/kv/kv_routing.h"

namespace pegaflow::router {

namespace {

constexpr std::size_t kNonceDigits = 32;
constexpr std::size_t kLengthBytes = sizeof(std::uint32_t);

/// Whether the index has all known blocks of a rank: those of another router's snapshot enter it
/// slice by slice.
bool is_whole(const KvFleet::Rank& rank) {
  return rank.gives_credit() && !rank.adoption.is_active();
}

}  // namespace

std::string_view nonce_of(std::string_view target) {
  if (!target.starts_with(kSnapshotPath)) return {};
  target.remove_prefix(kSnapshotPath.size());
  if (target.size() != kNonceDigits + 1 || target.front() != '?') return {};
  target.remove_prefix(1);
  const bool is_hex = std::all_of(target.begin(), target.end(), [](char each) {
    return (each >= '0' && each <= '9') || (each >= 'a' && each <= 'f');
  });
  return is_hex ? target : std::string_view();
}

SnapshotWriter::SnapshotWriter(ReplicaSet& replicas, std::string_view nonce)
    : replicas_(replicas),
      purpose_(snapshot_purpose(nonce)),
      ends_(replicas.routing().parts().texts.ends()) {
  for (const auto& [id, entry] : replicas_.routing().fleet().entries()) {
    for (const auto& rank : entry.ranks) {
      if (is_whole(*rank)) engines_.push_back(name_of_rank(entry.url, rank->number));
    }
  }
}

void SnapshotWriter::add_texts(std::string& records) {
  const index::TextIndex& texts = replicas_.routing().parts().texts;
  index::TextIndex::Learned learned;
  while (at_ < ends_.size() && records.size() < kPartBytes) {
    if (!texts.copy(ends_[at_++], learned)) continue;
    // A text alone may have a megabyte; without its full hashes it is a quarter of that.
    const std::size_t before = records.size();
    SharedText text{.text = std::move(learned.text),
                    .keys = std::move(learned.keys),
                    .hashes = std::move(learned.hashes)};
    bool fits = append_record(records, text);
    if (!fits) {
      text.hashes.clear();
      fits = append_record(records, text);
    }
    if (!fits) continue;
    if (kReplicaHeaderBytes + records.size() + kSealBytes > kMaxReplicaMessage) {
      records.resize(before);
      --at_;
      break;
    }
    ++texts_;
  }
}

void SnapshotWriter::add_blocks(std::string& records) {
  using Part = SharedBlocks::Part;
  if (!open_) {
    const SharedName name = engines_.back();
    engines_.pop_back();
    const KvFleet::Rank* const rank = replicas_.rank_of(name);
    const auto place = rank == nullptr ? std::nullopt : rank->source.position();
    if (!place) return;
    open_ = Open{
        .engine = name, .place = *place, .forgotten = rank->source.stats().forgotten, .cell = 1};
  }
  SharedBlocks blocks{
      .engine = open_->engine, .part = Part::kMore, .place = open_->place, .keys = {}};
  const KvFleet::Rank* const rank = replicas_.rank_of(open_->engine);
  const bool is_valid =
      rank != nullptr && is_whole(*rank) && rank->source.stats().forgotten == open_->forgotten;
  if (is_valid) {
    const index::BlockIndex& index = replicas_.routing().parts().blocks;
    open_->cell = index.list(rank->holder, open_->cell, kCells, blocks.keys);
  }
  if (!is_valid || open_->cell == 0) {
    blocks.part = is_valid ? Part::kLast : Part::kVoid;
    open_.reset();
  }
  // kCells keys are fewer bytes than a message.
  if (!blocks.keys.empty() || blocks.part != Part::kMore) append_record(records, blocks);
}

std::string SnapshotWriter::next() {
  static_assert(kCells * sizeof(index::Key) + 1024 < kMaxReplicaMessage);
  if (has_ended_) return {};
  std::string records;
  if (at_ < ends_.size()) {
    add_texts(records);
  } else if (open_ || !engines_.empty()) {
    add_blocks(records);
  } else {
    has_ended_ = append_record(records, SharedSnapshotEnd{texts_});
  }
  const std::string message =
      seal_message(replicas_.header(++parts_), records, purpose_, replicas_.secrets().first());
  const auto length = static_cast<std::uint32_t>(message.size());
  std::string part(kLengthBytes, '\0');
  std::memcpy(part.data(), &length, kLengthBytes);
  return part + message;
}

SnapshotReader::SnapshotReader(ReplicaSet& replicas, std::string_view nonce, const Id128& from)
    : replicas_(replicas), purpose_(snapshot_purpose(nonce)), from_(from) {}

Result<void> SnapshotReader::feed(std::string_view bytes, TimePoint now) {
  unread_ += bytes;
  std::string_view rest = unread_;
  while (rest.size() >= kLengthBytes) {
    std::uint32_t length = 0;
    std::memcpy(&length, rest.data(), kLengthBytes);
    if (length > kMaxReplicaMessage) {
      return fail(Errc::kCorrupt, "a snapshot's part of {} bytes: the limit is {}", length,
                  kMaxReplicaMessage);
    }
    if (rest.size() - kLengthBytes < length) break;
    PEGA_TRY(use(rest.substr(kLengthBytes, length), now));
    rest.remove_prefix(kLengthBytes + length);
  }
  unread_ = std::string(rest);
  return {};
}

void SnapshotReader::take(const SharedBlocks& blocks, TimePoint now) {
  if (blocks.engine != engine_) {
    engine_ = blocks.engine;
    keys_.clear();
    is_too_long_ = false;
  }
  is_too_long_ = is_too_long_ || keys_.size() + blocks.keys.size() > kMaxBlocks;
  if (!is_too_long_) keys_.insert(keys_.end(), blocks.keys.begin(), blocks.keys.end());
  if (blocks.part == SharedBlocks::Part::kMore) return;
  KvFleet::Rank* const rank = replicas_.rank_of(engine_);
  if (blocks.part == SharedBlocks::Part::kLast && !is_too_long_ && rank != nullptr &&
      replicas_.routing().fleet().adopt(*rank, blocks.place, std::move(keys_), now)) {
    ++engines_;
  }
  std::vector<index::Key>().swap(keys_);
  engine_ = 0;
}

Result<void> SnapshotReader::use(std::string_view message, TimePoint now) {
  const auto opened =
      open_message(std::as_bytes(std::span(message)), purpose_, replicas_.secrets());
  if (!opened) {
    return fail(Errc::kCorrupt, "part {} of the snapshot is {}", parts_ + 1,
                to_string(opened.error()));
  }
  if (is_complete_ || opened->header.router != from_ || opened->header.sequence != parts_ + 1) {
    return fail(Errc::kCorrupt, "part {} of the snapshot came where {} was expected",
                opened->header.sequence, parts_ + 1);
  }
  ++parts_;
  PEGA_TRY_LET(const std::vector<ReplicaRecord> records, read_records(opened->records));
  for (const ReplicaRecord& record : records) {
    if (const auto* const text = std::get_if<SharedText>(&record)) {
      replicas_.routing().parts().texts.learn(text->text, text->keys, text->hashes);
      ++texts_;
    }
    if (const auto* const blocks = std::get_if<SharedBlocks>(&record)) take(*blocks, now);
    is_complete_ = is_complete_ || std::holds_alternative<SharedSnapshotEnd>(record);
  }
  return {};
}

}  // namespace pegaflow::router
