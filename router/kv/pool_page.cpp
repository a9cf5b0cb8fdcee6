#include "router/kv/pool_page.h"

#include <charconv>
#include <cstddef>
#include <cstring>

#include "router/http/json_text.h"
#include "router/kv/kv_keys.h"

namespace pegaflow::router {
namespace {

constexpr std::string_view kMagic = "PEGABLK1";
constexpr std::size_t kHeadBytes = 64;
constexpr std::size_t kLowBytes = 8;
constexpr unsigned kLost = 1;
constexpr unsigned kMore = 2;
constexpr unsigned kList = 4;

/// Reads numbers with the least significant byte first.
class Numbers {
 public:
  explicit Numbers(std::string_view bytes) : bytes_(bytes) {}
  template <typename Number>
  Number next() {
    Number value = 0;
    for (std::size_t i = 0; i < sizeof(Number); ++i) {
      value |= static_cast<Number>(static_cast<Number>(static_cast<unsigned char>(bytes_[at_ + i]))
                                   << (8 * i));
    }
    at_ += sizeof(Number);
    return value;
  }

 private:
  std::string_view bytes_;
  std::size_t at_ = 0;
};

double number_of(const std::vector<JsonMember>& members, std::string_view name) {
  const JsonMember* const member = find_member(members, name);
  double value = 0;
  if (member == nullptr) return value;
  std::from_chars(member->value.data(), member->value.data() + member->value.size(), value);
  return value;
}

/// A whole number; 0 for a missing one, and for one that does not fit.
template <typename Number>
Number whole_of(const std::vector<JsonMember>& members, std::string_view name) {
  const double value = number_of(members, name);
  constexpr double kMost = 4e9;
  return value >= 0 && value <= kMost ? static_cast<Number>(value) : 0;
}

bool is_true(const std::vector<JsonMember>& members, std::string_view name) {
  const JsonMember* const member = find_member(members, name);
  return member != nullptr && member->value == "true";
}

/// Ids of servers and namespaces are written into bodies of requests, and into targets.
bool is_id(std::string_view text) {
  constexpr std::size_t kMost = 128;
  return !text.empty() && text.size() <= kMost &&
         text.find_first_not_of("0123456789abcdefABCDEF") == std::string_view::npos;
}

/// The chains of prompts behind a journal.
Result<void> read_chains(std::string_view body, std::uint32_t count, PoolPage& page) {
  constexpr std::size_t kChainHead = 16;
  const auto damaged = [&]() {
    return fail(Errc::kCorrupt, "{} chains do not fit into {} bytes", count, body.size());
  };
  if (body.size() < kLowBytes) return damaged();
  page.chain_position = Numbers(body).next<std::uint64_t>();
  std::size_t at = kLowBytes;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (body.size() - at < kChainHead) return damaged();
    Numbers head(body.substr(at));
    PoolPage::Chain chain{.session = head.next<std::uint64_t>()};
    chain.block_tokens = head.next<std::uint32_t>();
    const auto keys = head.next<std::uint32_t>();
    at += kChainHead;
    if ((body.size() - at) / kLowBytes < keys) return damaged();
    Numbers hashes(body.substr(at));
    chain.hashes.reserve(keys);
    for (std::uint32_t key = 0; key < keys; ++key) {
      chain.hashes.push_back(hashes.next<std::uint64_t>());
    }
    at += std::size_t{keys} * kLowBytes;
    page.chains.push_back(std::move(chain));
  }
  if (at != body.size()) return damaged();
  return {};
}

Result<std::vector<std::vector<JsonMember>>> objects_of(const std::vector<JsonMember>& members,
                                                        std::string_view name) {
  std::vector<std::vector<JsonMember>> objects;
  const JsonMember* const list = find_member(members, name);
  if (list == nullptr || list->value.front() != '[') {
    return fail(Errc::kCorrupt, "GET /links: the list \"{}\" is missing", name);
  }
  const auto elements = read_elements(list->value);
  if (!elements) return fail(Errc::kCorrupt, "GET /links: {}", elements.error().detail);
  for (const std::string_view element : *elements) {
    auto object = read_members(element);
    if (!object) return fail(Errc::kCorrupt, "GET /links: {}", object.error().detail);
    objects.push_back(std::move(*object));
  }
  return objects;
}

}  // namespace

Result<PoolPage> PoolPage::read(std::string_view body, bool has_chains) {
  if (body.size() < kHeadBytes || body.substr(0, kMagic.size()) != kMagic) {
    return fail(Errc::kCorrupt, "the list of blocks has {} bytes and no head", body.size());
  }
  PoolPage page;
  page.server = body.substr(kMagic.size(), 16);
  Numbers head(body.substr(kMagic.size() + 16));
  page.generation = head.next<std::uint64_t>();
  page.position = head.next<std::uint64_t>();
  const auto flags = head.next<std::uint32_t>();
  const auto count = head.next<std::uint32_t>();
  page.cursor = head.next<std::uint32_t>();
  (void)head.next<std::uint16_t>();  // The kind: the only one that was asked for.
  const auto key_bytes = head.next<std::uint16_t>();
  page.block_tokens = head.next<std::uint32_t>();
  const auto chains = head.next<std::uint32_t>();
  page.has_lost = (flags & kLost) != 0;
  page.has_more = (flags & kMore) != 0;
  page.is_list = (flags & kList) != 0;
  const std::size_t whole =
      kHeadBytes + std::size_t{count} * key_bytes + (std::size_t{count} + 7) / 8;
  const bool is_full = key_bytes == BlockKey::kMaxBytes;
  const bool is_whole = has_chains ? body.size() >= whole : body.size() == whole;
  if ((key_bytes != kLowBytes && !is_full) || !is_whole) {
    return fail(Errc::kCorrupt, "the list of blocks has {} keys of {} bytes in {} bytes", count,
                key_bytes, body.size());
  }
  Numbers keys(body.substr(kHeadBytes));
  const std::string_view gone = body.substr(kHeadBytes + std::size_t{count} * key_bytes);
  page.changes.reserve(count);
  if (is_full) page.keys.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    const bool is_gone = ((static_cast<unsigned char>(gone[i / 8]) >> (i % 8)) & 1U) != 0;
    if (is_full)
      std::memcpy(page.keys[i].bytes.data(), &body[kHeadBytes + i * key_bytes], key_bytes);
    page.changes.push_back(
        {is_full ? low_bits(page.keys[i]) : keys.next<std::uint64_t>(), is_gone});
  }
  if (has_chains) {
    PEGA_TRY(read_chains(body.substr(whole), chains, page));
  }
  return page;
}

Result<LinksPage> LinksPage::read(std::string_view body) {
  const auto top = read_members(body);
  if (!top) return fail(Errc::kCorrupt, "GET /links: {}", top.error().detail);
  LinksPage page{.node = text_of(*top, "node")};
  if (page.node.empty()) return fail(Errc::kCorrupt, "GET /links: the member \"node\" is missing");
  if (!is_id(page.node)) {
    return fail(Errc::kCorrupt, "GET /links: the member \"node\" is no hexadecimal number");
  }
  const JsonMember* const disks = find_member(*top, "disks");
  page.has_disks = disks != nullptr && disks->value == "true";
  page.has_chains = number_of(*top, "chains") >= 1;
  PEGA_TRY_LET(const auto links, objects_of(*top, "links"));
  for (const auto& link : links) {
    std::string node = text_of(link, "node");
    if (node.empty()) continue;  // It is not ready.
    page.links.push_back({.node = std::move(node),
                          .bytes_per_second = number_of(link, "bytes_per_second"),
                          .start_seconds = number_of(link, "start_seconds")});
  }
  PEGA_TRY_LET(const auto engines, objects_of(*top, "engines"));
  for (const auto& engine : engines) {
    std::string space = text_of(engine, "namespace");
    if (space.empty()) continue;
    if (!is_id(space)) {
      return fail(Errc::kCorrupt, "GET /links: a \"namespace\" is no hexadecimal number");
    }
    page.engines.push_back({.instance = text_of(engine, "instance"),
                            .space = std::move(space),
                            .block_bytes = whole_of<std::uint64_t>(engine, "block_bytes"),
                            .block_tokens = whole_of<std::uint32_t>(engine, "block_tokens"),
                            .reports_chains = is_true(engine, "chains"),
                            .is_connected = text_of(engine, "state") != "disconnected"});
  }
  return page;
}

}  // namespace pegaflow::router
