#pragma once
/// \file
/// Sends an engine's response to the client: its head, its pieces, and its end after a failure.

#include <string>
#include <string_view>

#include <boost/asio/awaitable.hpp>

#include "base/error.h"
#include "router/request/access_record.h"
#include "router/request/client_request.h"
#include "router/request/held_bodies.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

struct KvRequest;

/// The end of an engine's response, as the client sees it.
enum class Relayed : unsigned char {
  kWhole,
  kNothingSent,  ///< The engine failed, and the client has received nothing of it.
  kBroken,       ///< The engine failed within the response; the connection has to end.
  kErrorFrame,   ///< The engine failed within a stream, and the client received an error event.
  kGone,         ///< The client left.
};

/// Whether a response is a stream of events, by its type.
bool is_event_stream(const ResponseHead& head);

/// Appends a piece of a body, as one chunk if `is_chunked`. An empty piece appends nothing.
void append_piece(std::string& out, std::string_view bytes, bool is_chunked);

/// The steps that all kinds of responses have in common. Thread-bound.
class ResponseWriter {
 public:
  /// All of them outlive the writer.
  ResponseWriter(ClientRequest& request, AccessRecord& record, HeldBodies& bodies)
      : request_(request), record_(record), bodies_(bodies) {}

  [[nodiscard]] ClientRequest& request() const noexcept { return request_; }
  [[nodiscard]] AccessRecord& record() const noexcept { return record_; }

  /// Tells `kv` when the engine's answer begins, and which tokens it reports.
  void watch(KvRequest* kv) noexcept { kv_ = kv; }
  /// Called with each piece of a response's body.
  void note_piece(std::string_view bytes);

  /// The head for the client, whose status is recorded. `framing` are the lines for the length.
  [[nodiscard]] std::string head(const ResponseHead& head, std::string_view framing);
  /// Called with the first bytes of a response's body, before they are sent: from here on no other
  /// engine can replace this one. Frees the bodies, and remembers which engine has the response.
  void begin(std::string_view first_bytes, const UpstreamCall& call);
  /// Whether begin() was called.
  [[nodiscard]] bool has_begun() const noexcept { return has_begun_; }
  /// Ends a stream of which the client has a part with an error event. `is_in_event`: the part ends
  /// within an event. False when the client left.
  boost::asio::awaitable<bool> end_stream_with_error(const Error& error, bool is_in_event);

 private:
  ClientRequest& request_;
  AccessRecord& record_;
  HeldBodies& bodies_;
  KvRequest* kv_ = nullptr;
  bool has_begun_ = false;
  bool has_report_ = false;  // The engine has reported its cached tokens.
};

}  // namespace pegaflow::router
