#include "server/http/router_pages.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/hex.h"
#include "cluster/source_rate.h"
#include "server/fetches/fetches.h"

namespace pegaflow::server {
namespace {

constexpr std::string_view kJournal = "/journal";
constexpr std::string_view kBlocks = "/blocks";
constexpr std::string_view kLinks = "/links";
constexpr std::string_view kPrefetch = "/prefetch";
constexpr std::string_view kPrefetches = "/prefetch/";

constexpr std::size_t kMostName = 128;
constexpr std::size_t kKeyDigits = 2 * BlockKey::kMaxBytes;
constexpr std::size_t kIdDigits = 32;
/// The format of the chains behind a journal, which readers name and /links shows.
constexpr unsigned kChainsFormat = 1;

tl::unexpected<Error> refuse(const std::string& why) {
  return fail(Errc::kInvalidArgument, "{}", why);
}

template <typename Number>
bool read_number(std::string_view text, Number& number) {
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  return status == std::errc() && end == text.data() + text.size();
}

/// Letters, digits and -._: such a name needs no escapes, in a path or a log.
bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= kMostName &&
         std::all_of(text.begin(), text.end(), [](unsigned char letter) {
           return std::isalnum(letter) != 0 || letter == '-' || letter == '.' || letter == '_';
         });
}

bool is_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](unsigned char digit) { return std::isxdigit(digit) != 0; });
}

/// Sets the field of one parameter of a query; false: its value is not valid.
bool read_parameter(std::string_view name, std::string_view value, RouterQuery& query) {
  if (name == "namespace") {
    query.space = value;
    return is_name(value);
  }
  if (name == "position") return read_number(value, query.position);
  if (name == "generation") return read_number(value, query.generation);
  if (name == "cursor") return read_number(value, query.cursor);
  if (name == "kind") return read_number(value, query.block_kind.emplace());
  if (name == "chains") {
    query.wants_chains = true;
    unsigned format = 0;
    return read_number(value, format) && format == kChainsFormat;
  }
  if (name == "chain_position") return read_number(value, query.chain_position);
  if (name == "keys") {
    query.keys = value == "8" ? KeyPart::kLow : value == "first8" ? KeyPart::kFirst : KeyPart::kAll;
    return query.keys != KeyPart::kAll || value == "32";
  }
  return false;
}

Result<RouterQuery> read_parameters(std::string_view text, RouterQuery query) {
  while (!text.empty()) {
    const std::string_view one = text.substr(0, text.find('&'));
    text.remove_prefix(std::min(text.size(), one.size() + 1));
    const std::size_t equals = std::min(one.find('='), one.size());
    const std::string_view value = one.substr(std::min(one.size(), equals + 1));
    if (!read_parameter(one.substr(0, equals), value, query)) {
      return refuse(
          fmt::format("the parameter {} is unknown or has no valid value", one.substr(0, equals)));
    }
  }
  if (query.space.empty()) return refuse("the parameter namespace=HASH is missing");
  return query;
}

/// The member of that name, if it is a text.
std::optional<std::string> text_of(const nlohmann::json& body, const char* name) {
  const auto found = body.find(name);
  if (found == body.end() || !found->is_string()) return std::nullopt;
  return found->get<std::string>();
}

/// The nodes that a router named; entries that name none are dropped.
std::vector<Id128> nodes_of(const nlohmann::json& body) {
  std::vector<Id128> nodes;
  const auto sources = body.find("sources");
  if (sources == body.end() || !sources->is_array()) return nodes;
  for (const nlohmann::json& source : *sources) {
    if (nodes.size() == FetchHints::kMost) break;
    const auto node = source.is_object() ? text_of(source, "node") : std::nullopt;
    if (!node || node->size() != kIdDigits || !is_hex(*node)) continue;
    Id128 id;
    const std::string_view digits = *node;
    std::from_chars(digits.data(), digits.data() + 16, id.high, 16);
    std::from_chars(digits.data() + 16, digits.data() + 32, id.low, 16);
    if (!id.is_none()) nodes.push_back(id);
  }
  return nodes;
}

Result<RouterQuery> read_prefetch(std::string_view text) {
  const nlohmann::json body = nlohmann::json::parse(text, nullptr, false);
  if (!body.is_object()) return refuse("POST /prefetch: the body is no JSON object");
  RouterQuery query{.kind = RouterQuery::Kind::kPrefetch};
  query.space = text_of(body, "namespace").value_or("");
  query.prefetch.id = text_of(body, "id").value_or("");
  query.prefetch.tenant = text_of(body, "tenant").value_or("");
  if (!is_name(query.space)) return refuse("POST /prefetch: namespace is missing or invalid");
  if (!is_name(query.prefetch.id)) {
    return refuse("POST /prefetch: id is not 1 to 128 letters, digits, '-', '.' or '_'");
  }
  if (query.prefetch.tenant.size() > kMostName) {
    return refuse("POST /prefetch: tenant has more than 128 bytes");
  }
  if (const auto kind = body.find("kind"); kind != body.end()) {
    if (!kind->is_number_unsigned()) return refuse("POST /prefetch: kind is no number");
    query.block_kind = kind->get<std::size_t>();
  }
  const std::string keys = text_of(body, "keys").value_or("");
  if (keys.empty() || keys.size() % kKeyDigits != 0 || !is_hex(keys)) {
    return refuse("POST /prefetch: keys are not 64 hexadecimal digits each, in one text");
  }
  if (keys.size() / kKeyDigits > kMostPrefetchKeys) {
    return refuse(fmt::format("POST /prefetch: {} keys, the limit is {}", keys.size() / kKeyDigits,
                              kMostPrefetchKeys));
  }
  const std::vector<std::byte> bytes = from_hex(keys);
  query.prefetch.keys.resize(bytes.size() / BlockKey::kMaxBytes);
  for (std::size_t i = 0; i < query.prefetch.keys.size(); ++i) {
    std::memcpy(query.prefetch.keys[i].bytes.data(), &bytes[i * BlockKey::kMaxBytes],
                BlockKey::kMaxBytes);
  }
  query.prefetch.nodes = nodes_of(body);
  return query;
}

template <typename Number>
void append(std::string& to, Number number) {
  for (std::size_t i = 0; i < sizeof number; ++i) {
    to.push_back(static_cast<char>(static_cast<std::uint64_t>(number) >> (8 * i)));
  }
}

void append_chains(std::string& body, const PromptChains::Part& part) {
  append(body, part.position);
  for (const PromptChain& chain : part.chains) {
    append(body, chain.session);
    append(body, chain.block_tokens);
    append(body, static_cast<std::uint32_t>(chain.keys.size()));
    for (const std::uint64_t key : chain.keys) append(body, key);
  }
}

nlohmann::json to_json(const NodesReport& nodes) {
  nlohmann::json links = nlohmann::json::array();
  for (const NodesReport::Peer& peer : nodes.peers) {
    const bool is_ready = peer.link.state == cluster::PeerState::kReady;
    nlohmann::json row = {{"address", peer.address},
                          {"state", cluster::to_string(peer.link.state)}};
    if (is_ready) {
      row["node"] = to_string(peer.link.node);
      row["lane"] = peer.link.lane;
      row["bytes_per_second"] = peer.bytes_per_second;
      row["measured_ago_seconds"] = peer.measured_ago_seconds;
      row["start_seconds"] = std::chrono::duration<double>(cluster::SourceRate::kLatency).count();
      row["queued_bytes"] = peer.queued_bytes;
    }
    links.push_back(std::move(row));
  }
  return links;
}

}  // namespace

bool is_router_path(std::string_view path) {
  return path == kJournal || path == kBlocks || path == kLinks || path == kPrefetch ||
         path.starts_with(kPrefetches);
}

Result<RouterQuery> read_router_query(std::string_view method, std::string_view target,
                                      std::string_view body) {
  using Kind = RouterQuery::Kind;
  const std::string_view path = target.substr(0, target.find('?'));
  const std::string_view query = target.substr(std::min(target.size(), path.size() + 1));
  const std::string_view wanted = path == kPrefetch               ? "POST"
                                  : path.starts_with(kPrefetches) ? "DELETE"
                                                                  : "GET";
  if (method != wanted) return fail(Errc::kRefused, "{} takes {}", path, wanted);
  if (path == kPrefetch) return read_prefetch(body);
  if (path == kLinks) return RouterQuery{.kind = Kind::kLinks};
  if (path == kJournal) return read_parameters(query, {.kind = Kind::kJournal});
  if (path == kBlocks) return read_parameters(query, {.kind = Kind::kBlocks});
  RouterQuery cancel{.kind = Kind::kCancelPrefetch};
  cancel.prefetch.id = path.substr(kPrefetches.size());
  if (!is_name(cancel.prefetch.id)) return refuse("DELETE /prefetch/ID: the id is invalid");
  return cancel;
}

std::string blocks_body(const BlocksAnswer& answer) {
  const std::size_t key_bytes = answer.keys != KeyPart::kAll ? 8 : BlockKey::kMaxBytes;
  std::string body = "PEGABLK1";
  body.reserve(64 + answer.entries.size() * (key_bytes + 1));
  for (const std::byte each : from_hex(to_string(answer.server))) {
    body.push_back(static_cast<char>(each));
  }
  append(body, answer.generation);
  append(body, answer.position);
  append(body,
         (answer.has_lost ? 1U : 0U) | (answer.has_more ? 2U : 0U) | (answer.is_list ? 4U : 0U));
  append(body, static_cast<std::uint32_t>(answer.entries.size()));
  append(body, answer.cursor);
  append(body, static_cast<std::uint16_t>(answer.kind));
  append(body, static_cast<std::uint16_t>(key_bytes));
  append(body, answer.block_tokens);
  append(body, static_cast<std::uint32_t>(answer.chains.chains.size()));
  for (const engine::BlockStore::JournalEntry& entry : answer.entries) {
    if (answer.keys == KeyPart::kLow) {
      append(body, entry.key.low_bits());
    } else if (answer.keys == KeyPart::kFirst) {
      append(body, entry.key.first_bits());
    } else {
      body.append(reinterpret_cast<const char*>(entry.key.bytes.data()), BlockKey::kMaxBytes);
    }
  }
  std::string gone((answer.entries.size() + 7) / 8, '\0');
  for (std::size_t i = 0; i < answer.entries.size(); ++i) {
    if (!answer.entries[i].is_present) {
      gone[i / 8] = static_cast<char>(static_cast<unsigned char>(gone[i / 8]) | 1U << (i % 8));
    }
  }
  body += gone;
  if (answer.has_chains) append_chains(body, answer.chains);
  return body;
}

std::string links_body(const LinksAnswer& answer) {
  nlohmann::json engines = nlohmann::json::array();
  for (const LinksAnswer::Engine& each : answer.engines) {
    nlohmann::json row = {{"instance", each.instance.id},
                          {"state", each.instance.state},
                          {"namespace", each.instance.namespace_hash},
                          {"kv_events", each.instance.has_kv_events},
                          {"chains", each.instance.reports_chains}};
    if (each.block_bytes != 0) row["block_bytes"] = each.block_bytes;
    if (each.block_tokens != 0) row["block_tokens"] = each.block_tokens;
    engines.push_back(std::move(row));
  }
  const nlohmann::json body = {
      {"node", to_string(answer.server)},
      {"chains", kChainsFormat},
      {"links", answer.nodes ? to_json(*answer.nodes) : nlohmann::json::array()},
      {"engines", std::move(engines)},
      {"disks", answer.has_disks}};
  // Ids come from clients: invalid UTF-8 is replaced, and throws no exception.
  return body.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace pegaflow::server
