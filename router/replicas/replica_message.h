#pragma once
/// \file
/// The messages between the routers of one fleet: their binary form, its limits and its seal.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/block_key.h"
#include "base/error.h"
#include "base/id128.h"
#include "cluster/peer_proof.h"
#include "index/events/source.h"
#include "index/key.h"
#include "index/text.h"

namespace pegaflow::router {

/// An engine's rank or a node as all routers name it: a hash of its URL, and of the rank.
using SharedName = std::uint64_t;
[[nodiscard]] SharedName name_of_rank(std::string_view engine_url, std::uint32_t rank);
[[nodiscard]] SharedName name_of_node(std::string_view server_url);

/// The part of a message before its records.
struct ReplicaHeader {
  Id128 router{};              ///< The incarnation of the sender.
  std::uint64_t began = 0;     ///< When it started; milliseconds since 1970.
  std::uint64_t sequence = 0;  ///< 1 for its first message; each message has the next number.
  std::uint64_t time = 0;      ///< Milliseconds since 1970.
};

/// A request was sent to an engine.
struct SharedPlacement {
  std::uint64_t request = 0;  ///< Unique for the sender.
  SharedName engine = 0;
  std::uint32_t prompt_tokens = 0;
  std::uint32_t uncached_tokens = 0;
  SharedName source = 0;  ///< The node that blocks are pulled from; 0: none.
  std::uint64_t pull_bytes = 0;
  std::uint32_t ready_us = 0;           ///< Predicted time until its blocks are at the engine.
  std::vector<std::uint64_t> chunks{};  ///< The beginning of index::Text::chunks.
};
/// The first token of a request came.
struct SharedFirstToken {
  std::uint64_t request = 0;
};
/// A request ended.
struct SharedEnd {
  std::uint64_t request = 0;
};
/// Once a second: the sender lives, and all that it has in flight.
struct SharedHeartbeat {
  struct Sums {
    SharedName engine = 0;
    std::uint32_t prefills = 0;
    std::uint32_t decodes = 0;
    std::uint64_t prefill_tokens = 0;
  };
  std::uint16_t http_port = 0;  ///< Where it serves GET /index/snapshot.
  std::uint64_t texts = 0;      ///< Texts whose blocks it knows.
  std::vector<Sums> engines{};  ///< Engines without requests of the sender are left out.
};
/// The sender has learned the blocks of a text.
struct SharedText {
  index::TextOutline text{};
  std::vector<index::Key> keys{};
  std::vector<BlockKey> hashes{};  ///< The full hashes of the first keys, as far as they are known.
};
/// A part of the blocks in an engine's GPU cache, in a snapshot.
struct SharedBlocks {
  enum class Part : std::uint8_t {
    kMore,  ///< Others follow.
    kLast,  ///< All of them together are the blocks at `place`.
    kVoid,  ///< The sender lost the stream meanwhile: none of them is valid.
  };
  SharedName engine = 0;
  Part part = Part::kMore;
  index::Source::Position place{};
  std::vector<index::Key> keys{};
};
/// The last record of a snapshot.
struct SharedSnapshotEnd {
  std::uint64_t texts = 0;  ///< In the snapshot.
};

using ReplicaRecord = std::variant<SharedPlacement, SharedFirstToken, SharedEnd, SharedHeartbeat,
                                   SharedText, SharedBlocks, SharedSnapshotEnd>;

struct ReplicaMessage {
  ReplicaHeader header;
  std::vector<ReplicaRecord> records;
};

/// Limits of what is sent and read.
inline constexpr std::size_t kMaxReplicaMessage = std::size_t{1} << 20U;
inline constexpr std::size_t kMaxSharedChunks = 4096;  ///< Chunks of one placement: 1 MiB of text.
inline constexpr std::size_t kMaxSharedEngines = 4096;
/// Before the records, and behind them.
inline constexpr std::size_t kReplicaHeaderBytes = 4 + 16 + 8 + 8 + 8;
inline constexpr std::size_t kSealBytes = 32;

/// The purposes of seals.
inline constexpr std::string_view kPublished = "replicas";
[[nodiscard]] std::string snapshot_purpose(std::string_view nonce);

/// Appends the record. False, with `out` unchanged, when it alone would exceed a message.
bool append_record(std::string& out, const ReplicaRecord& record);

/// The whole message: header, records as append_record() made them, seal.
[[nodiscard]] std::string seal_message(const ReplicaHeader& header, std::string_view records,
                                       std::string_view purpose, const cluster::PeerSecret& secret);

/// Why a message is not used.
enum class Refusal : std::uint8_t {
  kMalformed,  ///< It is no message, or exceeds a limit.
  kForeign,    ///< It was not made with one of the secrets.
  kLate,       ///< It is older or newer than kHttpTokenTime.
  kRepeated,   ///< It was received before, or is of a former incarnation.
};
inline constexpr std::size_t kRefusals = 4;
[[nodiscard]] std::string_view to_string(Refusal why) noexcept;

/// Checks the seal, and reads the header. The records are behind it, without the seal.
/// Errors: the reason, as a value: no message of a foreign sender costs more than its digest.
struct OpenedMessage {
  ReplicaHeader header;
  std::span<const std::byte> records;
};
[[nodiscard]] tl::expected<OpenedMessage, Refusal> open_message(
    std::span<const std::byte> bytes, std::string_view purpose,
    const cluster::PeerSecrets& secrets);

/// Reads the records. Kinds that are unknown here are left out, so that later versions can add
/// some. Errors: kCorrupt for a record that is cut off, has other lengths, or exceeds a limit.
[[nodiscard]] Result<std::vector<ReplicaRecord>> read_records(std::span<const std::byte> bytes);

}  // namespace pegaflow::router
