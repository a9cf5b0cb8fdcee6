#pragma once
/// \file
/// Decoder of KV cache events: the bytes of one batch, as vLLM, SGLang and TensorRT-LLM publish
/// them, become events.
///
/// The wire format is MessagePack: an array `[ts, [event...], rank]` or a map with the same names;
/// each event is an array `[tag, field...]` or a map with the key `type`. Trailing array fields may
/// be missing or unknown, map fields may be missing, unknown and in any order.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace pegaflow::index {

enum class EventKind : std::uint8_t {
  kStored,   ///< Blocks are in the cache.
  kRemoved,  ///< Blocks left the cache.
  kCleared,  ///< The cache was emptied.
};

/// Where the engine keeps the blocks of an event. An unknown name is slow storage, never the GPU.
enum class Medium : std::uint8_t {
  kGpu,      ///< "GPU" in any case, or no name: engines before media were named.
  kHost,     ///< "CPU", "CPU_PINNED", "CPU_TIER1"...
  kStorage,  ///< "STORAGE", "DISK", "FS", "OBJ", and every name that is not known.
};

/// Kind of the cache group that an event belongs to (`kv_cache_spec_kind`).
enum class GroupKind : std::uint8_t {
  kUnnamed,    ///< The event names no kind: engines with one group, and removals.
  kAttention,  ///< full_attention, mla_attention, sink_full_attention: a hash stands for a prefix.
  kOther,      ///< Sliding windows, recurrent states, unknown kinds: never indexed.
};

/// Engine whose optional fields are read.
enum class Dialect : std::uint8_t {
  kVllm,
  kSglang,  ///< Fields behind `medium` have other meanings and are not read, except session_id.
  kTensorRtLlm,  ///< vLLM's fields. The engine rejects requests with members of other engines.
};

/// One event. Spans and views point into its KvBatch.
struct KvEvent {
  EventKind kind = EventKind::kCleared;
  Medium medium = Medium::kGpu;
  GroupKind group_kind = GroupKind::kUnnamed;
  std::optional<std::uint32_t> group;   ///< Index of the cache group, where the engine names it.
  std::optional<std::uint64_t> parent;  ///< Low 64 bits of the hash before the first of a kStored.
  std::uint32_t block_size = 0;         ///< Tokens of a block; 0 unless kStored.
  std::uint32_t token_count = 0;        ///< Length of `token_ids` on the wire, also if not kept.
  bool bigram_tokens = false;           ///< Tokens came as pairs (SGLang with EAGLE).
  /// Low 64 bits of each block's hash; of a kStored in the order of the chain.
  std::span<const std::uint64_t> hashes;
  /// Hashes as they came, `hash_bytes` each, when the engine sends bytes; empty when it sends ints.
  std::span<const std::byte> full_hashes;
  std::uint32_t hash_bytes = 0;
  /// Token ids in a kStored, the first one of each pair; empty unless Options::keep_tokens. With
  /// Options::head_tokens only the first ones of a chain's beginning.
  std::span<const std::uint32_t> tokens;
  std::string_view session_id;  ///< Session in the request that caused the event; may be empty.
  std::string_view lora_name;   ///< Empty for the base model.
  bool has_extra_keys = false;  ///< A block's hash covers more than tokens: images, salt, adapter.
  std::uint32_t first_extras = 0;  ///< Extra keys of the first block.
  std::string_view first_extra{};  ///< The only one, if it is a text; kept with head_tokens.
};

/// Reasons for which an event is skipped while its batch is used.
enum class Skip : std::uint8_t {
  kUnknownTag,  ///< An event of a newer engine, such as BlockInactive.
  kMalformed,   ///< A field of another type, or a required field is missing.
  kTooDeep,     ///< Nested deeper than kMaxDepth.
  kTooMany,     ///< More than Options::max_hashes hashes.
  kBadHash,     ///< An empty hash, or one longer than 64 bytes, or hashes of different lengths.
  kBadSize,     ///< block_size is 0 or above 8,192.
  kBadCount,    ///< Tokens are kept, and their count is not that of the blocks.
};
inline constexpr std::size_t kSkipReasons = static_cast<std::size_t>(Skip::kBadCount) + 1;
/// "unknown_tag", as metrics and logs spell it.
std::string_view to_string(Skip reason) noexcept;

/// Events of one batch in the order of the wire, with the memory they point into.
///
/// Immutable after decode() and movable between threads: the spans stay valid when it is moved.
struct KvBatch {
  KvBatch() = default;
  KvBatch(KvBatch&&) noexcept = default;
  KvBatch& operator=(KvBatch&&) noexcept = default;
  KvBatch(const KvBatch&) = delete;
  KvBatch& operator=(const KvBatch&) = delete;
  ~KvBatch() = default;

  double timestamp = 0;               ///< Seconds since 1970 by the engine's clock.
  std::optional<std::uint32_t> rank;  ///< Data-parallel rank.
  std::size_t wire_bytes = 0;         ///< Size of the payload.
  bool undecodable = false;           ///< Set by the receiver: decode() failed, no event is known.
  std::vector<KvEvent> events;
  std::array<std::uint32_t, kSkipReasons> skipped{};  ///< Skipped events by reason.

  [[nodiscard]] std::uint32_t skipped_events() const noexcept;
  /// Blocks named by all events.
  [[nodiscard]] std::size_t blocks() const noexcept { return hashes.size(); }
  /// Bytes of memory that the batch holds.
  [[nodiscard]] std::size_t bytes() const noexcept;

  // Memory behind the spans of `events`.
  std::vector<std::uint64_t> hashes;
  std::vector<std::byte> full_hashes;
  std::vector<std::uint32_t> tokens;
  std::vector<char> text;
};

/// Decodes batches. Thread-bound; never recurses, and allocates in proportion to the payload only.
class KvEventDecoder {
 public:
  static constexpr std::size_t kMaxDepth = 8;        ///< Nested containers within an event.
  static constexpr std::size_t kMaxEvents = 65'536;  ///< Events in one batch.
  static constexpr std::size_t kMaxTokens = std::size_t{1}
                                            << 20U;     ///< Token ids in one event, if kept.
  static constexpr std::uint32_t kMaxBlockSize = 8192;  ///< Tokens.
  static constexpr std::size_t kMaxHashBytes = 64;
  static constexpr std::size_t kMaxText = 4096;  ///< Bytes of a name or a session id.

  struct Options {
    std::size_t max_hashes = 65'536;  ///< Hashes in one event; longer ones are skipped and counted.
    Dialect dialect = Dialect::kVllm;
    bool keep_tokens = false;  ///< Domains with a translation need them; others skip them.
    /// Without keep_tokens: so many tokens are kept of a kStored that begins a chain. They tell how
    /// the engine hashes.
    std::uint32_t head_tokens = 0;
  };

  KvEventDecoder() : KvEventDecoder(Options{}) {}
  explicit KvEventDecoder(const Options& options) : options_(options) {}

  /// Decodes one payload. An event that is unknown, malformed or beyond a limit is skipped and
  /// counted in KvBatch::skipped; the others are returned.
  /// Errors: kCorrupt when the payload is no batch, ends early, or has bytes behind its end. Events
  /// of such a batch are lost, so the caller treats it as a gap of the sequence.
  Result<KvBatch> decode(std::span<const std::byte> payload) const;

 private:
  Options options_;
};

/// Low 64 bits of a hash of any length: the last eight bytes, big-endian; shorter ones are padded
/// on the left. `hash` has at least one byte.
std::uint64_t low64(std::span<const std::byte> hash) noexcept;

}  // namespace pegaflow::index
