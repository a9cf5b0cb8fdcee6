#pragma once
/// \file
/// Parsers of HTTP/1.1 messages, without sockets.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace pegaflow::router {

struct HttpField {
  std::string name;
  std::string value;
};

using HttpFields = std::vector<HttpField>;

/// The value of the first field with that name (ignoring case); nullptr when there is none.
const std::string* find_field(const HttpFields& fields, std::string_view name);

/// Compares ASCII only, which suffices for field names.
bool equals_ignoring_case(std::string_view a, std::string_view b) noexcept;

struct RequestHead {
  std::string method;
  std::string target;
  bool is_http_10 = false;
  bool keep_alive = true;
  bool wants_continue = false;  ///< The client waits for "100 Continue" before it sends the body.
  HttpFields fields;
};

struct ResponseHead {
  unsigned status = 0;
  std::string reason;
  bool keep_alive = true;
  std::optional<std::uint64_t> content_length;
  HttpFields fields;
};

/// Reads one request. Rejects requests that two parsers could interpret differently: Content-Length
/// with Transfer-Encoding, either of them twice, a coding other than chunked, blanks in names,
/// non-ASCII bytes in a target. Skips up to four empty lines before the request, and reduces a
/// target in absolute form to its path. Thread-bound.
class RequestParser {
 public:
  struct Limits {
    std::size_t header_bytes = 64 * 1024;
    std::size_t body_bytes = 32 * 1024 * 1024;
    std::size_t fields = 128;  ///< Bounds the time of comparing each name with several others.
  };

  explicit RequestParser(const Limits& limits);
  ~RequestParser();
  RequestParser(RequestParser&&) noexcept;

  /// Consumes a prefix of `bytes` and returns its length; the caller presents the rest again with
  /// the bytes that follow. Stops once after the head, so that the caller can judge the head before
  /// the body is read.
  /// Errors: kInvalidArgument for an invalid request; kOutOfCapacity for a head or body beyond its
  /// limit. error_status() has the status to respond with; head() has the fields read so far.
  Result<std::size_t> feed(std::string_view bytes);

  [[nodiscard]] bool has_begun() const noexcept;  ///< Empty lines alone do not begin a request.
  [[nodiscard]] bool has_head() const noexcept;
  [[nodiscard]] bool is_complete() const noexcept;
  [[nodiscard]] const RequestHead& head() const noexcept;  ///< Valid after has_head(); see feed().
  [[nodiscard]] std::size_t body_size() const noexcept;    ///< So far.
  std::string take_body();                                 ///< Moves the body out.
  [[nodiscard]] unsigned error_status() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Reads one response and skips informational ones (1xx). Thread-bound.
class ResponseParser {
 public:
  /// `head_only`: the response to a HEAD request.
  explicit ResponseParser(bool head_only = false);
  ~ResponseParser();
  ResponseParser(ResponseParser&&) noexcept;

  /// Like RequestParser::feed(); appends the decoded bytes of the body to `body`.
  /// Errors: kCorrupt for an invalid response.
  Result<std::size_t> feed(std::string_view bytes, std::string& body);
  /// Reports the end of the connection.
  /// Errors: kPeerLost when the response was incomplete.
  Result<void> feed_end();

  [[nodiscard]] bool has_head() const noexcept;
  [[nodiscard]] bool is_complete() const noexcept;
  [[nodiscard]] const ResponseHead& head() const noexcept;  ///< Valid after has_head().

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Whether a field concerns one connection only, by its name or because `Connection` lists it.
bool is_hop_by_hop(std::string_view name, const HttpFields& fields);

}  // namespace pegaflow::router
