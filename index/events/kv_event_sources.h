#pragma once
/// \file
/// Addresses of an engine's event streams, as `GET /kv_event_sources` of vLLM or `GET /server_info`
/// of SGLang returns them.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "index/events/kv_event.h"

namespace pegaflow::index {

/// Addresses of the stream of one data-parallel rank, ready to connect to.
struct EventAddress {
  std::uint32_t rank = 0;
  std::string endpoint;          ///< "tcp://10.0.0.7:5557" or "ipc:///run/events".
  std::string replay_endpoint;   ///< Empty: the engine replays nothing.
  std::string topic;             ///< Prefix to subscribe to; empty is everything.
  std::uint32_t block_size = 0;  ///< Tokens; 0 when the engine does not name it.
  Dialect dialect = Dialect::kVllm;
  /// The engine repeats a session id of a request's body only, and not of its head.
  bool wants_body_session = false;
  bool is_configured = false;  ///< Named by the operator, and not by the engine.

  bool operator==(const EventAddress&) const = default;
};

inline constexpr std::size_t kMaxSourcesText = 256 * 1024;  ///< Bytes of a response.
inline constexpr std::size_t kMaxRanks = 1024;

/// Returns the streams in the order of their ranks. Ranks without events, or with a publisher other
/// than "zmq", are left out; an empty list means that the engine publishes no events.
///
/// `engine_host` is the host of the engine's URL, without brackets. It replaces the wildcards `*`,
/// `0.0.0.0` and `::` of an endpoint. An endpoint that names another host than the engine's own or
/// a loopback address is rejected, so that an engine cannot make its router dial other machines. A
/// loopback address is valid only when the engine's own host is one, as is `ipc://`. Errors:
/// kInvalidArgument for a host that is empty; kCorrupt for invalid text, with the
/// rank and the value; kRefused for an endpoint of another host or with port 0.
Result<std::vector<EventAddress>> parse_kv_event_sources(std::string_view text,
                                                         std::string_view engine_host);

inline constexpr std::size_t kMaxServerInfoText = std::size_t{4} << 20U;  ///< Bytes.

/// The same from the answer of SGLang, whose member `kv_events` names the first of consecutive
/// ports; the streams have Dialect::kSglang. An empty list: it publishes no events, or is another
/// engine. `engine_host` and the errors are those of parse_kv_event_sources().
Result<std::vector<EventAddress>> parse_server_info(std::string_view text,
                                                    std::string_view engine_host);

/// Checks an endpoint to connect to: `tcp://HOST:PORT` or `ipc:///PATH`.
/// Errors: kInvalidArgument with the endpoint and the expected form, also for a wildcard as the
/// host.
Result<void> check_event_endpoint(std::string_view endpoint);

}  // namespace pegaflow::index
