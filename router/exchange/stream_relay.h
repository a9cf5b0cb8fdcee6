#pragma once
/// \file
/// Sends an engine's stream of events to the client.

#include <cstddef>
#include <string>

#include <boost/asio/awaitable.hpp>

#include "base/error.h"
#include "router/exchange/response_writer.h"
#include "router/http/sse.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

/// The event with the prefill engine's token, which precedes a decode engine's stream.
struct OpeningEvent {
  std::string text;
  bool is_sent = false;  ///< The client has the head and the event.
};

/// Sends `head` and the event, and records the time of the client's first event. False when the
/// client left.
boost::asio::awaitable<bool> send_opening(ResponseWriter& writer, OpeningEvent& opening,
                                          const ResponseHead& head);

/// One stream of one engine. Only whole events are sent, up to a limit of their size, and the head
/// goes out with the first one: until then another engine can replace this one. Thread-bound.
class StreamRelay {
 public:
  /// All of them outlive the relay. With `opening` (nullptr: none) the client receives the head and
  /// that event first, unless an earlier relay has sent them.
  StreamRelay(ResponseWriter& writer, UpstreamCall& call, OpeningEvent* opening);

  /// Runs to the end of the stream. `error` is set when the engine failed.
  boost::asio::awaitable<Relayed> run(Error& error);

 private:
  /// Takes the whole events out of `pending_` into `out_`, where `before` bytes of it were known.
  /// False when there is none to send.
  bool take_events(std::size_t before);
  /// Ends a stream that broke after the client had received a part of it.
  boost::asio::awaitable<Relayed> end_broken(const Error& error);

  ResponseWriter& writer_;
  UpstreamCall& call_;
  OpeningEvent* const opening_;
  const bool is_chunked_;
  SseTracker tracker_;
  std::string pending_;       // Received bytes after the last event that was sent.
  std::string out_;           // Bytes for the client.
  bool has_begun_ = false;    // The client has a piece of this engine's stream.
  bool is_in_event_ = false;  // That piece ends within an event that was too long to be kept.
};

}  // namespace pegaflow::router
