#include "router/replicas/replica_message.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/format.h>

namespace pegaflow::router {

namespace {

static_assert(std::endian::native == std::endian::little, "messages are little-endian");

constexpr std::string_view kMagic = "PFR1";
constexpr std::size_t kRecordHead = 1 + 4;  // Kind and length.

enum class Kind : std::uint8_t {
  kPlacement = 1,
  kFirstToken = 2,
  kEnd = 3,
  kHeartbeat = 4,
  kText = 5,
  kSnapshotEnd = 6,
  kBlocks = 7,
};

class Writer {
 public:
  explicit Writer(std::string& out) : out_(out) {}
  template <typename T>
  void number(T value) {
    static_assert(std::is_unsigned_v<T>);
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void words(std::span<const std::uint64_t> values) {
    number(static_cast<std::uint32_t>(values.size()));
    out_.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
  }

 private:
  std::string& out_;
};

/// Reads from the front; after a read beyond the end everything is 0 and is_good() is false.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  T number() {
    T value{};
    const auto from = take(sizeof value);
    if (!from.empty()) std::memcpy(&value, from.data(), sizeof value);
    return value;
  }
  std::span<const std::byte> take(std::size_t count) {
    if (count > bytes_.size()) {
      is_good_ = false;
      bytes_ = {};
      return {};
    }
    const auto front = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return front;
  }
  std::vector<std::uint64_t> words(std::size_t most) {
    const auto count = number<std::uint32_t>();
    if (count > most || count > bytes_.size() / sizeof(std::uint64_t)) {
      is_good_ = false;
      return {};
    }
    std::vector<std::uint64_t> values(count);
    const auto from = take(count * sizeof(std::uint64_t));
    if (!values.empty()) std::memcpy(values.data(), from.data(), from.size());
    return values;
  }
  void fail() { is_good_ = false; }
  [[nodiscard]] std::size_t left() const { return bytes_.size(); }
  [[nodiscard]] bool is_good() const { return is_good_; }

 private:
  std::span<const std::byte> bytes_;
  bool is_good_ = true;
};

Kind write(Writer& to, const SharedPlacement& one) {
  to.number(one.request);
  to.number(one.engine);
  to.number(one.prompt_tokens);
  to.number(one.uncached_tokens);
  to.number(one.source);
  to.number(one.pull_bytes);
  to.number(one.ready_us);
  to.words(std::span(one.chunks).first(std::min(one.chunks.size(), kMaxSharedChunks)));
  return Kind::kPlacement;
}

Kind write(Writer& to, const SharedFirstToken& one) {
  to.number(one.request);
  return Kind::kFirstToken;
}

Kind write(Writer& to, const SharedEnd& one) {
  to.number(one.request);
  return Kind::kEnd;
}

Kind write(Writer& to, const SharedHeartbeat& one) {
  to.number(one.http_port);
  to.number(one.texts);
  const std::size_t count = std::min(one.engines.size(), kMaxSharedEngines);
  to.number(static_cast<std::uint32_t>(count));
  for (const SharedHeartbeat::Sums& sums : std::span(one.engines).first(count)) {
    to.number(sums.engine);
    to.number(sums.prefills);
    to.number(sums.decodes);
    to.number(sums.prefill_tokens);
  }
  return Kind::kHeartbeat;
}

Kind write(Writer& to, const SharedText& one) {
  to.number(std::uint64_t{one.text.bytes});
  to.number(one.text.tail);
  to.words(one.text.chunks);
  to.words(one.keys);
  to.number(static_cast<std::uint32_t>(one.hashes.size()));
  for (const BlockKey& hash : one.hashes) {
    for (std::size_t at = 0; at < BlockKey::kMaxBytes; at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, hash.bytes.data() + at, sizeof word);
      to.number(word);
    }
  }
  return Kind::kText;
}

Kind write(Writer& to, const SharedBlocks& one) {
  to.number(one.engine);
  to.number(static_cast<std::uint8_t>(one.part));
  to.number(static_cast<std::uint8_t>(one.place.is_exact ? 1 : 0));
  to.number(one.place.sequence);
  to.number(std::bit_cast<std::uint64_t>(one.place.timestamp));
  to.number(one.place.bytes);
  to.words(one.keys);
  return Kind::kBlocks;
}

Kind write(Writer& to, const SharedSnapshotEnd& one) {
  to.number(one.texts);
  return Kind::kSnapshotEnd;
}

SharedPlacement read_placement(Reader& from) {
  SharedPlacement one;
  one.request = from.number<std::uint64_t>();
  one.engine = from.number<std::uint64_t>();
  one.prompt_tokens = from.number<std::uint32_t>();
  one.uncached_tokens = from.number<std::uint32_t>();
  one.source = from.number<std::uint64_t>();
  one.pull_bytes = from.number<std::uint64_t>();
  one.ready_us = from.number<std::uint32_t>();
  one.chunks = from.words(kMaxSharedChunks);
  return one;
}

SharedHeartbeat read_heartbeat(Reader& from) {
  SharedHeartbeat one;
  one.http_port = from.number<std::uint16_t>();
  one.texts = from.number<std::uint64_t>();
  const auto count = from.number<std::uint32_t>();
  if (count > kMaxSharedEngines) from.fail();
  for (std::uint32_t i = 0; i < count && from.is_good(); ++i) {
    SharedHeartbeat::Sums sums;
    sums.engine = from.number<std::uint64_t>();
    sums.prefills = from.number<std::uint32_t>();
    sums.decodes = from.number<std::uint32_t>();
    sums.prefill_tokens = from.number<std::uint64_t>();
    one.engines.push_back(sums);
  }
  return one;
}

SharedText read_text(Reader& from) {
  SharedText one;
  one.text.bytes = from.number<std::uint64_t>();
  one.text.tail = from.number<std::uint64_t>();
  one.text.chunks = from.words(kMaxReplicaMessage);
  one.keys = from.words(kMaxReplicaMessage);
  const std::size_t chunked = one.text.chunks.size() * index::Text::kChunkBytes;
  // The tail is shorter than a chunk.
  if (one.text.bytes < chunked || one.text.bytes - chunked >= index::Text::kChunkBytes) from.fail();
  const auto count = from.number<std::uint32_t>();
  if (count > one.keys.size()) from.fail();
  for (std::uint32_t i = 0; i < count && from.is_good(); ++i) {
    const auto bytes = from.take(BlockKey::kMaxBytes);
    if (bytes.empty()) break;
    std::copy(bytes.begin(), bytes.end(), one.hashes.emplace_back().bytes.begin());
  }
  return one;
}

SharedBlocks read_blocks(Reader& from) {
  SharedBlocks one;
  one.engine = from.number<std::uint64_t>();
  const auto part = from.number<std::uint8_t>();
  const auto exact = from.number<std::uint8_t>();
  if (part > static_cast<std::uint8_t>(SharedBlocks::Part::kVoid) || exact > 1) from.fail();
  one.part = static_cast<SharedBlocks::Part>(part);
  one.place.is_exact = exact == 1;
  one.place.sequence = from.number<std::uint64_t>();
  one.place.timestamp = std::bit_cast<double>(from.number<std::uint64_t>());
  one.place.bytes = from.number<std::uint64_t>();
  one.keys = from.words(kMaxReplicaMessage);
  return one;
}

/// nullopt for a kind that is unknown here.
std::optional<ReplicaRecord> read_record(std::uint8_t kind, Reader& from) {
  switch (static_cast<Kind>(kind)) {
    case Kind::kPlacement:
      return read_placement(from);
    case Kind::kFirstToken:
      return SharedFirstToken{from.number<std::uint64_t>()};
    case Kind::kEnd:
      return SharedEnd{from.number<std::uint64_t>()};
    case Kind::kHeartbeat:
      return read_heartbeat(from);
    case Kind::kText:
      return read_text(from);
    case Kind::kBlocks:
      return read_blocks(from);
    case Kind::kSnapshotEnd:
      return SharedSnapshotEnd{from.number<std::uint64_t>()};
  }
  return std::nullopt;
}

}  // namespace

SharedName name_of_rank(std::string_view engine_url, std::uint32_t rank) {
  return index::domain_salt(fmt::format("engine {} {}", engine_url, rank));
}

SharedName name_of_node(std::string_view server_url) {
  const SharedName name = index::domain_salt(fmt::format("node {}", server_url));
  return name == 0 ? 1 : name;
}

std::string snapshot_purpose(std::string_view nonce) { return fmt::format("snapshot {}", nonce); }

std::string_view to_string(Refusal why) noexcept {
  switch (why) {
    case Refusal::kMalformed:
      return "malformed";
    case Refusal::kForeign:
      return "foreign";
    case Refusal::kLate:
      return "late";
    case Refusal::kRepeated:
      break;
  }
  return "repeated";
}

bool append_record(std::string& out, const ReplicaRecord& record) {
  const std::size_t before = out.size();
  out.append(kRecordHead, '\0');
  Writer to(out);
  const Kind kind = std::visit([&](const auto& one) { return write(to, one); }, record);
  const std::size_t length = out.size() - before - kRecordHead;
  if (kReplicaHeaderBytes + kRecordHead + length + kSealBytes > kMaxReplicaMessage) {
    out.resize(before);
    return false;
  }
  const auto size = static_cast<std::uint32_t>(length);
  out[before] = static_cast<char>(kind);
  std::memcpy(out.data() + before + 1, &size, sizeof size);
  return true;
}

std::string seal_message(const ReplicaHeader& header, std::string_view records,
                         std::string_view purpose, const cluster::PeerSecret& secret) {
  std::string out(kMagic);
  out.reserve(kReplicaHeaderBytes + records.size() + kSealBytes);
  Writer to(out);
  to.number(header.router.high);
  to.number(header.router.low);
  to.number(header.began);
  to.number(header.sequence);
  to.number(header.time);
  out += records;
  const auto seal = secret.seal(purpose, std::as_bytes(std::span(out)));
  out.append(reinterpret_cast<const char*>(seal.data()), seal.size());
  return out;
}

tl::expected<OpenedMessage, Refusal> open_message(std::span<const std::byte> bytes,
                                                  std::string_view purpose,
                                                  const cluster::PeerSecrets& secrets) {
  if (bytes.size() < kReplicaHeaderBytes + kSealBytes || bytes.size() > kMaxReplicaMessage ||
      std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return tl::unexpected(Refusal::kMalformed);
  }
  const auto content = bytes.first(bytes.size() - kSealBytes);
  if (!secrets.is_seal(purpose, content, bytes.last(kSealBytes))) {
    return tl::unexpected(Refusal::kForeign);
  }
  Reader from(content.subspan(kMagic.size()));
  OpenedMessage opened;
  opened.header.router.high = from.number<std::uint64_t>();
  opened.header.router.low = from.number<std::uint64_t>();
  opened.header.began = from.number<std::uint64_t>();
  opened.header.sequence = from.number<std::uint64_t>();
  opened.header.time = from.number<std::uint64_t>();
  opened.records = content.subspan(kReplicaHeaderBytes);
  return opened;
}

Result<std::vector<ReplicaRecord>> read_records(std::span<const std::byte> bytes) {
  if (bytes.size() > kMaxReplicaMessage) {
    return fail(Errc::kCorrupt, "a message of {} bytes: the limit is {}", bytes.size(),
                kMaxReplicaMessage);
  }
  std::vector<ReplicaRecord> records;
  Reader all(bytes);
  while (all.left() > 0) {
    const auto kind = all.number<std::uint8_t>();
    const auto length = all.number<std::uint32_t>();
    const auto body = all.take(length);
    if (!all.is_good()) return fail(Errc::kCorrupt, "the message ends within a record");
    Reader one(body);
    std::optional<ReplicaRecord> record = read_record(kind, one);
    if (!record) continue;
    if (!one.is_good() || one.left() != 0) {
      return fail(Errc::kCorrupt, "a record of kind {} does not fit its {} bytes", kind, length);
    }
    records.push_back(std::move(*record));
  }
  return records;
}

}  // namespace pegaflow::router
