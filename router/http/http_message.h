#pragma once
/// \file
/// HTTP/1.1 messages from bytes, and the heads of messages as bytes. Knows no socket.

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

/// The value of the first field of that name (in any case), nullptr when there is none.
const std::string* find_field(const HttpFields& fields, std::string_view name);

/// ASCII only, as names of fields are.
bool equals_ignoring_case(std::string_view a, std::string_view b) noexcept;

struct RequestHead {
  std::string method;
  std::string target;
  bool is_http_10 = false;
  bool keep_alive = true;
  bool wants_continue = false;  ///< Waits for "100 Continue" before it sends the body.
  HttpFields fields;
};

struct ResponseHead {
  unsigned status = 0;
  std::string reason;
  bool keep_alive = true;
  std::optional<std::uint64_t> content_length;
  HttpFields fields;
};

/// Reads one request. Refuses what two readers could understand differently: Content-Length with
/// Transfer-Encoding, either of them twice, another coding than chunked, blanks in names, bytes in
/// a target that are no ASCII characters. Skips up to four empty lines before the request; of a
/// target in absolute form the path remains. Thread-bound.
class RequestParser {
 public:
  struct Limits {
    std::size_t header_bytes = 64 * 1024;
    std::size_t body_bytes = 32 * 1024 * 1024;
    std::size_t fields = 128;  ///< Each is compared with the names of several.
  };

  explicit RequestParser(const Limits& limits);
  ~RequestParser();
  RequestParser(RequestParser&&) noexcept;

  /// Takes from the beginning of `bytes` what it can use and says how much; the caller presents the
  /// rest again with what follows. Stops once behind the head, so that it can be judged before the
  /// body is read.
  /// Errors: kInvalidArgument for what is no request; kOutOfCapacity for a head or body beyond its
  /// limit. error_status() has the status to answer; head() has the fields that could be read.
  Result<std::size_t> feed(std::string_view bytes);

  [[nodiscard]] bool has_begun() const noexcept;  ///< Of empty lines alone no request begins.
  [[nodiscard]] bool has_head() const noexcept;
  [[nodiscard]] bool is_complete() const noexcept;
  [[nodiscard]] const RequestHead& head() const noexcept;  ///< Once has_head(); see feed().
  [[nodiscard]] std::size_t body_size() const noexcept;    ///< So far.
  std::string take_body();                                 ///< Leaves none behind.
  [[nodiscard]] unsigned error_status() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Reads one response; informational ones (1xx) are skipped. Thread-bound.
class ResponseParser {
 public:
  /// `head_only`: the answer to a HEAD request.
  explicit ResponseParser(bool head_only = false);
  ~ResponseParser();
  ResponseParser(ResponseParser&&) noexcept;

  /// Like RequestParser::feed(); bytes of the body, without their coding, are appended to `body`.
  /// Errors: kCorrupt for what is no response.
  Result<std::size_t> feed(std::string_view bytes, std::string& body);
  /// The connection ended.
  /// Errors: kPeerLost when the response had not.
  Result<void> feed_end();

  [[nodiscard]] bool has_head() const noexcept;
  [[nodiscard]] bool is_complete() const noexcept;
  [[nodiscard]] const ResponseHead& head() const noexcept;  ///< Once has_head().

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Whether a field concerns one connection only, by its name or because `Connection` lists it.
bool is_hop_by_hop(std::string_view name, const HttpFields& fields);

}  // namespace pegaflow::router
