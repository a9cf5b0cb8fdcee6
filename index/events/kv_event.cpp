#include "index/events/kv_event.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <string>
#include <utility>

#include "index/events/msgpack_reader.h"

namespace pegaflow::index {
namespace {

// Fields of events that are read; others are skipped.
enum class Field : std::uint8_t {
  kHashes,
  kParent,
  kTokens,
  kBlockSize,
  kMedium,
  kLoraName,
  kExtraKeys,
  kGroup,
  kGroupKind,
  kWindow,
  kSession,
  kIgnored,
};

constexpr std::array kStoredFields{Field::kHashes,    Field::kParent,    Field::kTokens,
                                   Field::kBlockSize, Field::kIgnored,   Field::kMedium,
                                   Field::kLoraName,  Field::kExtraKeys, Field::kGroup,
                                   Field::kGroupKind, Field::kWindow};
constexpr std::array kRemovedFields{Field::kHashes, Field::kMedium, Field::kGroup};
constexpr std::size_t kSglangStoredFields = 6;   // Up to the medium.
constexpr std::size_t kSglangRemovedFields = 2;  // Up to the medium.

constexpr std::array<std::pair<std::string_view, Field>, 11> kFieldNames{{
    {"block_hashes", Field::kHashes},
    {"parent_block_hash", Field::kParent},
    {"token_ids", Field::kTokens},
    {"block_size", Field::kBlockSize},
    {"medium", Field::kMedium},
    {"lora_name", Field::kLoraName},
    {"extra_keys", Field::kExtraKeys},
    {"group_idx", Field::kGroup},
    {"kv_cache_spec_kind", Field::kGroupKind},
    {"kv_cache_spec_sliding_window", Field::kWindow},
    {"session_id", Field::kSession},
}};

Field field_named(std::string_view name, Dialect dialect) {
  const auto* const found =
      std::ranges::find(kFieldNames, name, &std::pair<std::string_view, Field>::first);
  if (found == kFieldNames.end()) return Field::kIgnored;
  const bool of_vllm = found->second >= Field::kLoraName && found->second <= Field::kWindow;
  return of_vllm && dialect == Dialect::kSglang ? Field::kIgnored : found->second;
}

std::optional<EventKind> kind_named(std::string_view tag) {
  if (tag == "BlockStored") return EventKind::kStored;
  if (tag == "BlockRemoved") return EventKind::kRemoved;
  if (tag == "AllBlocksCleared") return EventKind::kCleared;
  return std::nullopt;
}

Medium medium_named(std::string_view name) {
  std::string lower(name.substr(0, 8));
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  if (name.empty() || (lower == "gpu" && name.size() == 3)) return Medium::kGpu;
  return lower.starts_with("cpu") ? Medium::kHost : Medium::kStorage;
}

GroupKind group_kind_named(std::string_view name) {
  const bool attention =
      name == "full_attention" || name == "mla_attention" || name == "sink_full_attention";
  return attention ? GroupKind::kAttention : GroupKind::kOther;
}

// Where the parts of an event begin in the vectors of its batch; vectors may still move.
struct Places {
  std::size_t hashes = 0;
  std::size_t hash_count = 0;
  std::size_t full = 0;
  std::size_t full_count = 0;
  std::size_t tokens = 0;
  std::size_t token_count = 0;
  std::size_t session = 0;
  std::size_t session_size = 0;
  std::size_t lora = 0;
  std::size_t lora_size = 0;
  std::size_t extra = 0;
  std::size_t extra_size = 0;
};

// Reads one event into the vectors of a batch. Thread-bound.
class EventReader {
 public:
  EventReader(const KvEventDecoder::Options& options, KvBatch& batch)
      : options_(options), batch_(batch) {}

  // `bytes` is one complete value. Returns the reason when the event is skipped; what it had added
  // to the batch is taken back.
  std::optional<Skip> read(std::span<const std::byte> bytes) {
    const std::array sizes{batch_.hashes.size(), batch_.full_hashes.size(), batch_.tokens.size(),
                           batch_.text.size()};
    event_ = {};
    places_ = {};
    seen_ = 0;
    MsgpackReader reader(bytes);
    std::optional<Skip> skipped =
        reader.peek() == MsgpackType::kMap ? read_map(reader) : read_array(reader);
    if (!skipped) skipped = check();
    if (skipped) {
      batch_.hashes.resize(sizes[0]);
      batch_.full_hashes.resize(sizes[1]);
      batch_.tokens.resize(sizes[2]);
      batch_.text.resize(sizes[3]);
      return skipped;
    }
    batch_.events.push_back(event_);
    return std::nullopt;
  }

  [[nodiscard]] const Places& places() const { return places_; }

 private:
  std::optional<Skip> read_array(MsgpackReader& reader) {
    std::uint32_t elements = 0;
    std::string_view tag;
    if (!reader.read_array(elements) || elements == 0 || !reader.read_string(tag)) {
      return Skip::kMalformed;
    }
    const std::optional<EventKind> kind = kind_named(tag);
    if (!kind) return Skip::kUnknownTag;
    event_.kind = *kind;
    std::span<const Field> fields;
    const bool sglang = options_.dialect == Dialect::kSglang;
    if (*kind == EventKind::kStored) {
      fields = std::span(kStoredFields).first(sglang ? kSglangStoredFields : kStoredFields.size());
    } else if (*kind == EventKind::kRemoved) {
      fields =
          std::span(kRemovedFields).first(sglang ? kSglangRemovedFields : kRemovedFields.size());
    }
    for (std::size_t i = 0; i < std::min<std::size_t>(fields.size(), elements - 1); ++i) {
      if (const auto skipped = read_field(fields[i], reader)) return skipped;
    }
    return std::nullopt;  // Fields behind the known ones belong to newer engines.
  }

  std::optional<Skip> read_map(MsgpackReader& reader) {
    std::uint32_t pairs = 0;
    if (!reader.read_map(pairs)) return Skip::kMalformed;
    if (const auto skipped = find_tag(reader, pairs)) return skipped;
    for (std::uint32_t i = 0; i < pairs; ++i) {
      std::string_view name;
      Field field = Field::kIgnored;
      if (reader.read_string(name)) {
        field = field_named(name, options_.dialect);
      } else {
        reader.skip(KvEventDecoder::kMaxDepth);
      }
      if (const auto skipped = read_field(field, reader)) return skipped;
    }
    return std::nullopt;
  }

  // The tag comes first in practice, but a map has no order.
  std::optional<Skip> find_tag(MsgpackReader reader, std::uint32_t pairs) {
    for (std::uint32_t i = 0; i < pairs; ++i) {
      std::string_view name;
      if (!reader.read_string(name)) reader.skip(KvEventDecoder::kMaxDepth);
      if (name != "type") {
        reader.skip(KvEventDecoder::kMaxDepth);
        continue;
      }
      std::string_view tag;
      if (!reader.read_string(tag)) return Skip::kMalformed;
      const std::optional<EventKind> kind = kind_named(tag);
      if (!kind) return Skip::kUnknownTag;
      event_.kind = *kind;
      return std::nullopt;
    }
    return Skip::kMalformed;
  }

  std::optional<Skip> read_field(Field field, MsgpackReader& reader) {
    if (field != Field::kIgnored) {
      const std::uint32_t bit = 1U << static_cast<unsigned>(field);
      if ((seen_ & bit) != 0) return Skip::kMalformed;
      seen_ |= bit;
    }
    switch (field) {
      case Field::kHashes:
        return read_hashes(reader);
      case Field::kParent:
        return read_parent(reader);
      case Field::kTokens:
        return read_tokens(reader);
      case Field::kBlockSize:
        return read_block_size(reader);
      case Field::kExtraKeys:
        return read_extra_keys(reader);
      case Field::kIgnored:
        reader.skip(KvEventDecoder::kMaxDepth);
        return std::nullopt;
      case Field::kGroup:
      case Field::kWindow:
        return read_small(field, reader);
      case Field::kMedium:
      case Field::kLoraName:
      case Field::kGroupKind:
      case Field::kSession:
        return read_name(field, reader);
    }
    return Skip::kMalformed;
  }

  std::optional<Skip> read_hashes(MsgpackReader& reader) {
    std::uint32_t count = 0;
    if (!reader.read_array(count)) return Skip::kMalformed;
    if (count > options_.max_hashes) return Skip::kTooMany;
    places_.hashes = batch_.hashes.size();
    if (batch_.hashes.empty()) batch_.hashes.reserve(count);
    places_.hash_count = count;
    places_.full = batch_.full_hashes.size();
    std::uint32_t of_bytes = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint64_t bits = 0;
      std::span<const std::byte> raw;
      if (reader.read_integer_bits(bits)) {
        batch_.hashes.push_back(bits);
      } else if (reader.read_binary(raw)) {
        if (raw.empty() || raw.size() > KvEventDecoder::kMaxHashBytes ||
            (of_bytes > 0 && raw.size() != event_.hash_bytes)) {
          return Skip::kBadHash;
        }
        ++of_bytes;
        event_.hash_bytes = static_cast<std::uint32_t>(raw.size());
        batch_.hashes.push_back(low64(raw));
        batch_.full_hashes.insert(batch_.full_hashes.end(), raw.begin(), raw.end());
      } else {
        return Skip::kMalformed;
      }
    }
    if (of_bytes != 0 && of_bytes != count) return Skip::kBadHash;
    places_.full_count = batch_.full_hashes.size() - places_.full;
    return std::nullopt;
  }

  std::optional<Skip> read_parent(MsgpackReader& reader) {
    if (reader.read_nil()) return std::nullopt;
    std::uint64_t bits = 0;
    std::span<const std::byte> raw;
    if (reader.read_binary(raw)) {
      if (raw.empty() || raw.size() > KvEventDecoder::kMaxHashBytes) return Skip::kBadHash;
      bits = low64(raw);
    } else if (!reader.read_integer_bits(bits)) {
      return Skip::kMalformed;
    }
    event_.parent = bits;
    return std::nullopt;
  }

  std::optional<Skip> read_tokens(MsgpackReader& reader) {
    if (reader.read_nil()) return std::nullopt;
    std::uint32_t count = 0;
    if (!reader.read_array(count)) return Skip::kMalformed;
    event_.token_count = count;
    event_.bigram_tokens = count > 0 && reader.peek() == MsgpackType::kArray;
    if (!options_.keep_tokens) {
      if (!event_.bigram_tokens) keep_head(reader, count);
      reader.skip_values(count);
      return std::nullopt;
    }
    if (count > KvEventDecoder::kMaxTokens) return Skip::kTooMany;
    places_.tokens = batch_.tokens.size();
    places_.token_count = count;
    for (std::uint32_t i = 0; i < count; ++i) {
      std::uint32_t pair = 0;
      if (event_.bigram_tokens && (!reader.read_array(pair) || pair != 2)) return Skip::kMalformed;
      std::uint64_t token = 0;
      if (!reader.read_unsigned(token) || token > UINT32_MAX) return Skip::kMalformed;
      batch_.tokens.push_back(static_cast<std::uint32_t>(token));
      if (event_.bigram_tokens && !reader.read_unsigned(token)) return Skip::kMalformed;
    }
    return std::nullopt;
  }

  // Keeps the first of `count` tokens of a chain's beginning. Invalid tokens are no defect here:
  // where all tokens are skipped they are not read either.
  void keep_head(MsgpackReader reader, std::uint32_t count) {
    if (event_.parent || event_.kind != EventKind::kStored) return;
    const std::uint32_t kept = std::min(count, options_.head_tokens);
    places_.tokens = batch_.tokens.size();
    for (std::uint32_t i = 0; i < kept; ++i) {
      std::uint64_t token = 0;
      if (!reader.read_unsigned(token) || token > UINT32_MAX) break;
      batch_.tokens.push_back(static_cast<std::uint32_t>(token));
    }
    places_.token_count = batch_.tokens.size() - places_.tokens;
  }

  std::optional<Skip> read_block_size(MsgpackReader& reader) {
    std::uint64_t size = 0;
    if (!reader.read_unsigned(size)) return Skip::kMalformed;
    if (size == 0 || size > KvEventDecoder::kMaxBlockSize) return Skip::kBadSize;
    event_.block_size = static_cast<std::uint32_t>(size);
    return std::nullopt;
  }

  // One entry a block: nil, or a list of names, offsets and digests.
  std::optional<Skip> read_extra_keys(MsgpackReader& reader) {
    if (reader.read_nil()) return std::nullopt;
    std::uint32_t count = 0;
    if (!reader.read_array(count)) return Skip::kMalformed;
    for (std::uint32_t i = 0; i < count; ++i) {
      if (reader.read_nil()) continue;
      if (reader.peek() != MsgpackType::kArray) return Skip::kMalformed;
      event_.has_extra_keys = true;
      if (i == 0) keep_extra(reader);
      reader.skip(KvEventDecoder::kMaxDepth);
    }
    return std::nullopt;
  }

  void keep_extra(MsgpackReader reader) {
    std::string_view text;
    if (!reader.read_array(event_.first_extras) || event_.first_extras != 1) return;
    if (options_.head_tokens == 0 || !reader.read_string(text)) return;
    if (text.size() > KvEventDecoder::kMaxText) return;
    places_.extra = batch_.text.size();
    places_.extra_size = text.size();
    batch_.text.insert(batch_.text.end(), text.begin(), text.end());
  }

  std::optional<Skip> read_small(Field field, MsgpackReader& reader) {
    if (reader.read_nil()) return std::nullopt;
    std::uint64_t value = 0;
    if (!reader.read_unsigned(value) || value > UINT32_MAX) return Skip::kMalformed;
    if (field == Field::kGroup) event_.group = static_cast<std::uint32_t>(value);
    return std::nullopt;
  }

  std::optional<Skip> read_name(Field field, MsgpackReader& reader) {
    if (reader.read_nil()) return std::nullopt;
    std::string_view name;
    if (!reader.read_string(name) || name.size() > KvEventDecoder::kMaxText) {
      return Skip::kMalformed;
    }
    if (field == Field::kMedium) {
      event_.medium = medium_named(name);
    } else if (field == Field::kGroupKind) {
      event_.group_kind = group_kind_named(name);
    } else {
      const bool session = field == Field::kSession;
      (session ? places_.session : places_.lora) = batch_.text.size();
      (session ? places_.session_size : places_.lora_size) = name.size();
      batch_.text.insert(batch_.text.end(), name.begin(), name.end());
    }
    return std::nullopt;
  }

  // Requirements on the event as a whole.
  [[nodiscard]] std::optional<Skip> check() const {
    const auto has = [this](Field field) {
      return (seen_ >> static_cast<unsigned>(field) & 1U) != 0;
    };
    if (event_.kind == EventKind::kCleared) return std::nullopt;
    if (!has(Field::kHashes)) return Skip::kMalformed;
    if (event_.kind == EventKind::kRemoved) return std::nullopt;
    if (!has(Field::kBlockSize)) return Skip::kMalformed;
    const bool counted = options_.keep_tokens && event_.group_kind != GroupKind::kOther;
    if (counted && event_.token_count != 0 &&
        event_.token_count != places_.hash_count * event_.block_size) {
      return Skip::kBadCount;
    }
    return std::nullopt;
  }

  const KvEventDecoder::Options& options_;
  KvBatch& batch_;
  KvEvent event_;
  Places places_;
  std::uint32_t seen_ = 0;  // A bit for each Field.
};

void point(KvBatch& batch, const std::vector<Places>& places) {
  for (std::size_t i = 0; i < places.size(); ++i) {
    KvEvent& event = batch.events[i];
    const Places& at = places[i];
    event.hashes = std::span(batch.hashes).subspan(at.hashes, at.hash_count);
    event.full_hashes = std::span(batch.full_hashes).subspan(at.full, at.full_count);
    event.tokens = std::span(batch.tokens).subspan(at.tokens, at.token_count);
    const std::string_view text(batch.text.data(), batch.text.size());
    event.session_id = text.substr(at.session, at.session_size);
    event.lora_name = text.substr(at.lora, at.lora_size);
    event.first_extra = text.substr(at.extra, at.extra_size);
  }
}

// Reads the batch around the events. Thread-bound.
class BatchReader {
 public:
  BatchReader(const KvEventDecoder::Options& options, std::span<const std::byte> payload)
      : payload_(payload), reader_(payload), events_(options, batch_) {}

  Result<KvBatch> read() {
    batch_.wire_bytes = payload_.size();
    PEGA_TRY(reader_.peek() == MsgpackType::kMap ? read_map() : read_array());
    if (!reader_.at_end()) {
      return fail(Errc::kCorrupt, "decode a batch of KV events: {} bytes behind its end",
                  reader_.left());
    }
    point(batch_, places_);
    return std::move(batch_);
  }

 private:
  static tl::unexpected<Error> corrupt(std::string_view what) {
    return fail(Errc::kCorrupt, "decode a batch of KV events: {}", what);
  }

  Result<void> read_array() {
    std::uint32_t elements = 0;
    if (!reader_.read_array(elements)) return corrupt("neither an array nor a map");
    if (elements < 2) return corrupt("an array without events");
    PEGA_TRY(read_timestamp());
    PEGA_TRY(read_events());
    for (std::uint32_t i = 2; i < elements; ++i) {
      PEGA_TRY(i == 2 ? read_rank() : skip());
    }
    return {};
  }

  Result<void> read_map() {
    std::uint32_t pairs = 0;
    if (!reader_.read_map(pairs)) return corrupt("a map that is cut off");
    bool found = false;
    for (std::uint32_t i = 0; i < pairs; ++i) {
      std::string_view name;
      if (!reader_.read_string(name)) PEGA_TRY(skip());
      if (name == "ts") {
        PEGA_TRY(read_timestamp());
      } else if (name == "events") {
        if (found) return corrupt("a map with two lists of events");
        found = true;
        PEGA_TRY(read_events());
      } else if (name == "data_parallel_rank" || name == "attn_dp_rank") {
        PEGA_TRY(read_rank());
      } else {
        PEGA_TRY(skip());
      }
    }
    if (!found) return corrupt("a map without events");
    return {};
  }

  Result<void> read_timestamp() {
    if (reader_.read_nil() || reader_.read_number(batch_.timestamp)) return {};
    return corrupt("the timestamp is no number");
  }

  Result<void> read_rank() {
    std::uint64_t rank = 0;
    if (!reader_.read_unsigned(rank)) return skip();
    if (rank <= UINT32_MAX) batch_.rank = static_cast<std::uint32_t>(rank);
    return {};
  }

  Result<void> read_events() {
    std::uint32_t count = 0;
    if (!reader_.read_array(count)) return corrupt("the events are no array");
    if (count > KvEventDecoder::kMaxEvents) return corrupt("more than 65,536 events");
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::size_t begin = payload_.size() - reader_.left();
      const MsgpackReader::Skipped skipped = reader_.skip(KvEventDecoder::kMaxDepth);
      if (skipped == MsgpackReader::Skipped::kCutOff) return corrupt("an event is cut off");
      std::optional<Skip> reason = Skip::kTooDeep;
      if (skipped == MsgpackReader::Skipped::kDone) {
        const std::size_t size = payload_.size() - reader_.left() - begin;
        reason = events_.read(payload_.subspan(begin, size));
      }
      if (reason) {
        ++batch_.skipped[static_cast<std::size_t>(*reason)];
      } else {
        places_.push_back(events_.places());
      }
    }
    return {};
  }

  Result<void> skip() {
    if (reader_.skip(KvEventDecoder::kMaxDepth) != MsgpackReader::Skipped::kCutOff) return {};
    return corrupt("a field is cut off");
  }

  std::span<const std::byte> payload_;
  MsgpackReader reader_;
  KvBatch batch_;
  EventReader events_;
  std::vector<Places> places_;
};

}  // namespace

std::string_view to_string(Skip reason) noexcept {
  static constexpr std::array<std::string_view, kSkipReasons> kNames{
      "unknown_tag", "malformed", "too_deep", "too_many", "bad_hash", "bad_size", "bad_count"};
  return kNames[static_cast<std::size_t>(reason)];
}

std::uint64_t low64(std::span<const std::byte> hash) noexcept {
  std::uint64_t value = 0;
  for (const std::byte byte : hash.last(std::min<std::size_t>(hash.size(), 8))) {
    value = value << 8U | std::to_integer<std::uint64_t>(byte);
  }
  return value;
}

std::uint32_t KvBatch::skipped_events() const noexcept {
  std::uint32_t sum = 0;
  for (const std::uint32_t count : skipped) sum += count;
  return sum;
}

std::size_t KvBatch::bytes() const noexcept {
  return sizeof(KvBatch) + events.capacity() * sizeof(KvEvent) +
         hashes.capacity() * sizeof(std::uint64_t) + full_hashes.capacity() +
         tokens.capacity() * sizeof(std::uint32_t) + text.capacity();
}

Result<KvBatch> KvEventDecoder::decode(std::span<const std::byte> payload) const {
  return BatchReader(options_, payload).read();
}

}  // namespace pegaflow::index
