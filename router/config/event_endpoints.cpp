#include "router/config/event_endpoints.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <set>
#include <string_view>
#include <utility>

namespace pegaflow::router {
namespace {

using index::EventAddress;

constexpr std::uint32_t kMostPort = 65'535;

/// One value of the option.
struct Value {
  EngineUrl engine{};
  EventAddress first{};  ///< The stream of its first rank.
  std::uint32_t ranks = 1;
};

/// Splits off what is before the next `separator`.
std::string_view take_until(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view part = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return part;
}

Result<std::uint32_t> parse_number(std::string_view name, std::string_view text,
                                   std::uint32_t least, std::uint32_t most) {
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < least || number > most) {
    return fail(Errc::kInvalidArgument, "{}={} is not a number from {} to {}", name, text, least,
                most);
  }
  return number;
}

Result<void> set_field(Value& value, std::string_view name, std::string_view text) {
  EventAddress& address = value.first;
  if (name == "replay") {
    address.replay_endpoint = text;
  } else if (name == "topic") {
    address.topic = text;
  } else if (name == "rank") {
    PEGA_TRY_LET(address.rank, parse_number(name, text, 0, index::kMaxRanks - 1));
  } else if (name == "ranks") {
    PEGA_TRY_LET(value.ranks, parse_number(name, text, 1, index::kMaxRanks));
  } else if (name == "format" && text == "vllm") {
    address.dialect = index::Dialect::kVllm;
  } else if (name == "format" && text == "sglang") {
    address.dialect = index::Dialect::kSglang;
    address.wants_body_session = true;
  } else if (name == "format" && text == "trtllm") {
    address.dialect = index::Dialect::kTensorRtLlm;
  } else if (name == "format") {
    return fail(Errc::kInvalidArgument, "format={} is none of vllm, sglang and trtllm", text);
  } else {
    return fail(Errc::kInvalidArgument,
                "\"{}\" is none of the fields replay, topic, rank, ranks and format, each as "
                "+FIELD=VALUE",
                name);
  }
  return {};
}

/// The address of a later rank, whose ports follow those of the first.
Result<std::string> endpoint_of(const std::string& first, std::uint32_t offset) {
  if (offset == 0 || first.empty()) return first;
  if (!first.starts_with("tcp://")) {
    return fail(Errc::kInvalidArgument,
                "\"{}\" has no port, so ranks=N has no effect on it: name each rank by a value of "
                "its own with rank=R",
                first);
  }
  const std::size_t colon = first.rfind(':');
  std::uint32_t port = 0;
  std::from_chars(first.data() + colon + 1, first.data() + first.size(), port);
  if (port + offset > kMostPort) {
    return fail(Errc::kInvalidArgument, "the port of a later rank would be {}; the highest is {}",
                port + offset, kMostPort);
  }
  return fmt::format("{}:{}", first.substr(0, colon), port + offset);
}

/// Checks an endpoint of `engine`.
Result<void> check_endpoint(const EngineUrl& engine, const std::string& endpoint) {
  PEGA_TRY(index::check_event_endpoint(endpoint));
  if (engine.is_name && !endpoint.starts_with(fmt::format("tcp://{}:", engine.host))) {
    return fail(Errc::kInvalidArgument,
                "\"{}\" is one endpoint for all addresses of {}; write tcp://{}:PORT, whose host "
                "stands for each of them",
                endpoint, engine.text, engine.host);
  }
  return {};
}

Result<Value> parse_value(std::string_view text) {
  if (text.find('=') == std::string_view::npos) {
    return fail(Errc::kInvalidArgument,
                "the form is ENGINE=ENDPOINT, as in http://10.0.0.1:8000=tcp://10.0.0.1:5557");
  }
  Value value;
  PEGA_TRY_LET(value.engine, EngineUrl::parse(take_until(text, '=')));
  value.first.endpoint = take_until(text, '+');
  std::set<std::string_view> seen;
  while (!text.empty()) {
    std::string_view field = take_until(text, '+');
    const std::string_view name = take_until(field, '=');
    if (!seen.insert(name).second) {
      return fail(Errc::kInvalidArgument, "it has {} twice", name);
    }
    PEGA_TRY(set_field(value, name, field));
  }
  PEGA_TRY(check_endpoint(value.engine, value.first.endpoint));
  if (seen.contains("replay")) {
    PEGA_TRY(check_endpoint(value.engine, value.first.replay_endpoint));
  }
  if (value.first.rank + value.ranks > index::kMaxRanks) {
    return fail(Errc::kInvalidArgument, "its last rank is {}; the highest is {}",
                value.first.rank + value.ranks - 1, index::kMaxRanks - 1);
  }
  value.first.is_configured = true;
  return value;
}

/// The streams of all ranks of the value.
Result<std::vector<EventAddress>> streams_of(const Value& value) {
  std::vector<EventAddress> streams;
  for (std::uint32_t i = 0; i < value.ranks; ++i) {
    EventAddress& stream = streams.emplace_back(value.first);
    stream.rank += i;
    PEGA_TRY_LET(stream.endpoint, endpoint_of(value.first.endpoint, i));
    PEGA_TRY_LET(stream.replay_endpoint, endpoint_of(value.first.replay_endpoint, i));
  }
  return streams;
}

/// The endpoint of a name, for one of its addresses.
std::string with_host(const std::string& endpoint, const std::string& host) {
  if (endpoint.empty()) return endpoint;
  const bool is_v6 = host.find(':') != std::string::npos;
  return fmt::format("tcp://{}{}{}{}", is_v6 ? "[" : "", host, is_v6 ? "]" : "",
                     endpoint.substr(endpoint.rfind(':')));
}

}  // namespace

Result<EventEndpoints> EventEndpoints::parse(std::span<const std::string> values) {
  EventEndpoints all;
  std::set<std::string> endpoints;
  const auto add = [&](const std::string& text) -> Result<void> {
    PEGA_TRY_LET(Value value, parse_value(text));
    PEGA_TRY_LET(std::vector<EventAddress> streams, streams_of(value));
    Engine& engine = all.engines_[value.engine.text];
    engine.url = std::move(value.engine);
    for (EventAddress& stream : streams) {
      const bool is_known =
          std::any_of(engine.streams.begin(), engine.streams.end(),
                      [&](const EventAddress& each) { return each.rank == stream.rank; });
      if (is_known) {
        return fail(Errc::kInvalidArgument,
                    "rank {} of {} is named twice; give each rank one value, with rank=R",
                    stream.rank, engine.url.text);
      }
      for (const std::string& endpoint : {stream.endpoint, stream.replay_endpoint}) {
        if (!endpoint.empty() && !endpoints.insert(endpoint).second) {
          return fail(Errc::kInvalidArgument,
                      "{} is named twice; each rank has its own endpoint for events and another "
                      "one for replays",
                      endpoint);
        }
      }
      engine.streams.push_back(std::move(stream));
    }
    std::ranges::sort(engine.streams, {}, &EventAddress::rank);
    return {};
  };
  for (const std::string& text : values) {
    if (auto added = add(text); !added) {
      return fail(Errc::kInvalidArgument, "--kv-events: \"{}\": {}", text, added.error().detail);
    }
  }
  return all;
}

std::vector<EventAddress> EventEndpoints::of(const EngineUrl& engine) const {
  if (const auto found = engines_.find(engine.text); found != engines_.end()) {
    return found->second.streams;
  }
  const auto found = engines_.find(engine.name);
  if (engine.name.empty() || found == engines_.end()) return {};
  std::vector<EventAddress> streams = found->second.streams;
  for (EventAddress& stream : streams) {
    stream.endpoint = with_host(stream.endpoint, engine.host);
    stream.replay_endpoint = with_host(stream.replay_endpoint, engine.host);
  }
  return streams;
}

std::vector<std::string> EventEndpoints::unlisted(const EngineList& list) const {
  std::vector<std::string> urls;
  for (const auto& [text, engine] : engines_) {
    const auto may_be = [&engine = engine](const EngineUrl& listed) {
      return listed.text == engine.url.text ||
             (listed.is_name && !engine.url.is_name && listed.port == engine.url.port);
    };
    const bool is_listed = std::ranges::any_of(list.by_role, [&](const auto& urls_of_role) {
      return std::ranges::any_of(urls_of_role, may_be);
    });
    if (!is_listed) urls.push_back(text);
  }
  return urls;
}

}  // namespace pegaflow::router
