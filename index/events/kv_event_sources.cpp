#include "index/events/kv_event_sources.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

namespace pegaflow::index {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 8;

struct TcpEndpoint {
  std::string_view host;  // Without brackets.
  std::uint32_t port = 0;
};

// The parts of tcp://HOST:PORT.
std::optional<TcpEndpoint> split_tcp(std::string_view endpoint) {
  if (!endpoint.starts_with("tcp://")) return std::nullopt;
  endpoint.remove_prefix(6);
  const std::size_t colon = endpoint.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return std::nullopt;
  TcpEndpoint parts{.host = endpoint.substr(0, colon)};
  const std::string_view port = endpoint.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), parts.port);
  if (error != std::errc() || end != port.data() + port.size() || parts.port > 65'535) {
    return std::nullopt;
  }
  if (parts.host.starts_with('[') && parts.host.ends_with(']')) {
    parts.host = parts.host.substr(1, parts.host.size() - 2);
  }
  const bool plain = std::ranges::all_of(parts.host, [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == ':' || c == '-' || c == '_' || c == '*' ||
           c == '%';
  });
  if (!plain || parts.host.empty()) return std::nullopt;
  return parts;
}

bool is_wildcard(std::string_view host) { return host == "*" || host == "0.0.0.0" || host == "::"; }

bool is_loopback(std::string_view host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// `ipc://` with an absolute path.
bool is_ipc(std::string_view endpoint) {
  return endpoint.starts_with("ipc:///") && endpoint.size() > 7 && endpoint.size() < 110 &&
         std::ranges::none_of(endpoint, [](unsigned char c) { return c <= ' ' || c == 127; });
}

// The address to connect to, for an endpoint as the engine was configured.
Result<std::string> address_of(std::string_view endpoint, std::string_view engine_host,
                               std::uint32_t rank) {
  if (is_ipc(endpoint)) {
    if (is_loopback(engine_host)) return std::string(endpoint);
    return fail(Errc::kRefused,
                "events of rank {}: '{}' is a socket of the engine's machine, and the engine is on "
                "{}; publish to tcp://*:PORT",
                rank, endpoint, engine_host);
  }
  const std::optional<TcpEndpoint> parts = split_tcp(endpoint);
  if (!parts) {
    return fail(Errc::kCorrupt,
                "events of rank {}: '{}' is neither tcp://HOST:PORT nor ipc:///PATH", rank,
                endpoint);
  }
  if (parts->port == 0) {
    return fail(Errc::kRefused,
                "events of rank {}: '{}' has no port; set one in --kv-events-config", rank,
                endpoint);
  }
  const bool own = is_wildcard(parts->host) || parts->host == engine_host ||
                   (is_loopback(parts->host) && is_loopback(engine_host));
  if (!own) {
    return fail(Errc::kRefused,
                "events of rank {}: '{}' names another host than the engine's, {}; publish to "
                "tcp://*:PORT",
                rank, endpoint, engine_host);
  }
  const bool ipv6 = engine_host.find(':') != std::string_view::npos;
  return fmt::format("tcp://{}{}{}:{}", ipv6 ? "[" : "", engine_host, ipv6 ? "]" : "", parts->port);
}

std::optional<std::string> text_of(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_string()) return std::nullopt;
  return found->get<std::string>();
}

// A number that fits 32 bits; 0 for anything else.
std::uint64_t whole_of(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_number_unsigned()) return 0;
  const auto value = found->get<std::uint64_t>();
  return value <= UINT32_MAX ? value : 0;
}

Result<std::optional<EventAddress>> source_of(const std::string& rank_text, const Json& source,
                                              std::string_view engine_host) {
  EventAddress address;
  const char* const end = rank_text.data() + rank_text.size();
  const auto [stop, error] = std::from_chars(rank_text.data(), end, address.rank);
  if (rank_text.empty() || error != std::errc() || stop != end || !source.is_object()) {
    return fail(Errc::kCorrupt, "event sources: '{}' is no rank with an object", rank_text);
  }
  const auto enabled = source.find("enable_kv_cache_events");
  if (enabled != source.end() && enabled->is_boolean() && !enabled->get<bool>())
    return std::nullopt;
  if (text_of(source, "publisher").value_or("zmq") != "zmq") return std::nullopt;
  const std::optional<std::string> endpoint = text_of(source, "endpoint");
  if (!endpoint) {
    return fail(Errc::kCorrupt, "event sources: rank {} has no endpoint", address.rank);
  }
  PEGA_TRY_LET(address.endpoint, address_of(*endpoint, engine_host, address.rank));
  const std::optional<std::string> replay = text_of(source, "replay_endpoint");
  if (replay && !replay->empty()) {
    PEGA_TRY_LET(address.replay_endpoint, address_of(*replay, engine_host, address.rank));
  }
  address.topic = text_of(source, "topic").value_or("");
  const auto size = source.find("block_size");
  if (size != source.end() && size->is_number_unsigned()) {
    address.block_size =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(size->get<std::uint64_t>(), UINT32_MAX));
  }
  return address;
}

}  // namespace

Result<std::vector<EventAddress>> parse_kv_event_sources(std::string_view text,
                                                         std::string_view engine_host) {
  if (engine_host.empty()) {
    return fail(Errc::kInvalidArgument, "event sources: the engine's host is empty");
  }
  if (text.size() > kMaxSourcesText) {
    return fail(Errc::kCorrupt, "event sources: {} bytes, more than {}", text.size(),
                kMaxSourcesText);
  }
  bool too_deep = false;
  const auto limit_depth = [&too_deep](int depth, Json::parse_event_t, Json&) {
    too_deep |= depth > kMaxDepth;
    return !too_deep;
  };
  const Json sources = Json::parse(text, limit_depth, false);
  if (too_deep || !sources.is_object() || sources.size() > kMaxRanks) {
    return fail(Errc::kCorrupt, "event sources: no JSON object of at most {} ranks", kMaxRanks);
  }
  std::vector<EventAddress> addresses;
  for (const auto& [rank, source] : sources.items()) {
    PEGA_TRY_LET(std::optional<EventAddress> address, source_of(rank, source, engine_host));
    if (address) addresses.push_back(std::move(*address));
  }
  std::ranges::sort(addresses, {}, &EventAddress::rank);
  return addresses;
}

Result<std::vector<EventAddress>> parse_server_info(std::string_view text,
                                                    std::string_view engine_host) {
  if (engine_host.empty()) {
    return fail(Errc::kInvalidArgument, "GET /server_info: the engine's host is empty");
  }
  if (text.size() > kMaxServerInfoText) {
    return fail(Errc::kCorrupt, "GET /server_info: {} bytes, more than {}", text.size(),
                kMaxServerInfoText);
  }
  // The rest is large, and is not kept.
  const auto only_events = [](int depth, Json::parse_event_t event, Json& value) {
    if (depth != 1 || event != Json::parse_event_t::key) return true;
    return value == "kv_events" || value == "enable_session_radix_cache";
  };
  const Json info = Json::parse(text, only_events, false);
  if (!info.is_object()) return fail(Errc::kCorrupt, "GET /server_info: no JSON object");
  const auto found = info.find("kv_events");
  if (found == info.end() || !found->is_object()) return std::vector<EventAddress>();
  if (text_of(*found, "publisher").value_or("") != "zmq") return std::vector<EventAddress>();
  const std::uint64_t port = whole_of(*found, "endpoint_port_base");
  const std::uint64_t replay = whole_of(*found, "replay_endpoint_port_base");
  const std::uint64_t ranks = whole_of(*found, "dp_size");
  if (port == 0 || ranks == 0 || ranks > kMaxRanks) {
    return fail(Errc::kCorrupt, "GET /server_info: kv_events has the port {} and {} ranks", port,
                ranks);
  }
  std::string host = text_of(*found, "endpoint_host").value_or("*");
  if (host.find(':') != std::string::npos && host.front() != '[') host = "[" + host + "]";
  // With this option an id opens a session, which its client has to close.
  const auto sessions = info.find("enable_session_radix_cache");
  const bool opens_sessions = sessions != info.end() && *sessions == true;
  std::vector<EventAddress> addresses;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    const auto at = [&](std::uint64_t base) {
      return address_of(fmt::format("tcp://{}:{}", host, base + rank), engine_host, rank);
    };
    EventAddress& address = addresses.emplace_back(
        EventAddress{.rank = rank,
                     .endpoint = {},
                     .replay_endpoint = {},
                     .topic = text_of(*found, "topic").value_or(""),
                     .block_size = static_cast<std::uint32_t>(whole_of(*found, "block_size")),
                     .dialect = Dialect::kSglang,
                     .wants_body_session = !opens_sessions});
    PEGA_TRY_LET(address.endpoint, at(port));
    if (replay != 0) {
      PEGA_TRY_LET(address.replay_endpoint, at(replay));
    }
  }
  return addresses;
}

Result<void> check_event_endpoint(std::string_view endpoint) {
  const std::optional<TcpEndpoint> parts = split_tcp(endpoint);
  if (parts && is_wildcard(parts->host)) {
    return fail(Errc::kInvalidArgument,
                "event endpoint: '{}' is an address to listen at; name the host to connect to, as "
                "in tcp://10.0.0.1:{}",
                endpoint, parts->port);
  }
  if ((parts && parts->port != 0) || is_ipc(endpoint)) return {};
  return fail(Errc::kInvalidArgument,
              "event endpoint: '{}' is neither tcp://HOST:PORT nor ipc:///PATH", endpoint);
}

}  // namespace pegaflow::index
