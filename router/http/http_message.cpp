#include "router/http/http_message.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include <boost/asio/buffer.hpp>
#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/rfc7230.hpp>

namespace pegaflow::router {

namespace beast = boost::beast;
namespace http = boost::beast::http;
namespace asio = boost::asio;

namespace {

/// Appends a body's bytes to a string of the caller, which may change between two calls.
struct AppendBody {
  using value_type = std::string*;
  class reader {  // Beast chose the names. NOLINT(readability-identifier-naming)
   public:
    template <bool IsRequest, class Fields>
    reader(http::header<IsRequest, Fields>&, value_type& out) : out_(out) {}
    void init(const boost::optional<std::uint64_t>&, beast::error_code& ec) { ec = {}; }
    template <class Buffers>
    std::size_t put(const Buffers& buffers, beast::error_code& ec) {
      ec = {};
      std::size_t size = 0;
      for (const asio::const_buffer& each : beast::buffers_range_ref(buffers)) {
        out_->append(static_cast<const char*>(each.data()), each.size());
        size += each.size();
      }
      return size;
    }
    void finish(beast::error_code& ec) { ec = {}; }

   private:
    value_type& out_;
  };
};

std::string text(beast::string_view view) { return {view.data(), view.size()}; }

template <class Fields>
HttpFields copy_fields(const Fields& from) {
  HttpFields fields;
  for (const auto& field : from) {
    fields.push_back({text(field.name_string()), text(field.value())});
  }
  return fields;
}

/// Limit of an engine's head, and of one chunk's first line or trailer.
constexpr std::size_t kAnswerHeadBytes = std::size_t{256} * 1024;

/// Beast has no limit for a chunk's first line and the trailer, and its caller keeps the unused
/// bytes. The result is a lower bound of their length without the last byte, independent of how the
/// input is cut: all of `bytes` when none was used, since none of them is the end.
std::size_t framing_bytes(std::size_t used, std::string_view bytes) {
  return used == 0 ? bytes.size() : used - 1;
}

/// RFC 9112, 2.2: a parser should skip an empty line before a request line. Some clients send one
/// after a body.
constexpr std::size_t kEmptyLines = 4;

std::size_t count_fields(const HttpFields& fields, std::string_view name) {
  return static_cast<std::size_t>(std::count_if(
      fields.begin(), fields.end(),
      [&](const HttpField& field) { return equals_ignoring_case(field.name, name); }));
}

}  // namespace

bool equals_ignoring_case(std::string_view a, std::string_view b) noexcept {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](char x, char y) {
           return std::tolower(static_cast<unsigned char>(x)) ==
                  std::tolower(static_cast<unsigned char>(y));
         });
}

const std::string* find_field(const HttpFields& fields, std::string_view name) {
  for (const HttpField& field : fields) {
    if (equals_ignoring_case(field.name, name)) return &field.value;
  }
  return nullptr;
}

bool is_hop_by_hop(std::string_view name, const HttpFields& fields) {
  constexpr std::array<std::string_view, 10> kNames = {"connection",
                                                       "keep-alive",
                                                       "proxy-authenticate",
                                                       "proxy-authorization",
                                                       "proxy-connection",
                                                       "te",
                                                       "trailer",
                                                       "transfer-encoding",
                                                       "upgrade",
                                                       "http2-settings"};
  for (const std::string_view each : kNames) {
    if (equals_ignoring_case(name, each)) return true;
  }
  for (const HttpField& field : fields) {
    if (!equals_ignoring_case(field.name, "connection")) continue;
    if (http::token_list(field.value).exists({name.data(), name.size()})) return true;
  }
  return false;
}

/// Beast asserts, and so ends the process, that a last chunk whose first line it has seen is
/// presented again with at least 5 bytes ("0\r\n\r\n"). Any input that begins with a chunk's first
/// line grows to that length, so no request waits forever.
constexpr std::size_t kLastChunkBytes = 5;

struct RequestParser::State {
  explicit State(const Limits& limits)
      : max_head_bytes(limits.header_bytes), max_fields(limits.fields) {
    // Beast counts the first line and the fields separately, and is off by some bytes when they
    // arrive in pieces. The exact limit is ours; Beast's only bounds its search.
    constexpr std::size_t kSlack = 16;
    parser.header_limit(static_cast<std::uint32_t>(max_head_bytes + kSlack));
    parser.body_limit(limits.body_bytes);
    parser.eager(false);
    parser.get().body() = &body;
  }

  http::request_parser<AppendBody> parser;
  const std::size_t max_head_bytes;
  const std::size_t max_fields;
  std::size_t head_bytes = 0;
  std::size_t empty_lines = 0;
  RequestHead head;
  std::string body;
  bool has_head = false;
  bool is_stuck = false;  // The parser used no byte of the body's input: see kLastChunkBytes.
  unsigned error_status = 400;

  tl::unexpected<Error> refuse(unsigned status, std::string_view what) {
    error_status = status;
    return fail(status == 400 ? Errc::kInvalidArgument : Errc::kOutOfCapacity, "{}", what);
  }

  /// RFC 9112, 3.2.2: a server treats `http://HOST/PATH` as /PATH. The router always sends its own
  /// Host.
  Result<void> read_target(std::string_view target) {
    for (const char c : target) {
      if (c < 0x21 || c > 0x7E)
        return refuse(400, "the target has a byte that is not a printable ASCII character");
    }
    for (const std::string_view scheme : {"http://", "https://"}) {
      if (!equals_ignoring_case(target.substr(0, scheme.size()), scheme)) continue;
      target.remove_prefix(scheme.size());
      const std::size_t end = std::min(target.find_first_of("/?"), target.size());
      const std::string_view authority = target.substr(0, end);
      if (authority.empty() || authority.find('@') != std::string_view::npos) {
        return refuse(400, "the target has no host");
      }
      target.remove_prefix(end);
      if (target.substr(0, 1) != "/") head.target.push_back('/');
      break;
    }
    head.target += target;
    return {};
  }

  Result<void> read_head() {
    const auto& message = parser.get();
    head.method = text(message.method_string());
    PEGA_TRY(read_target({message.target().data(), message.target().size()}));
    head.is_http_10 = message.version() == 10;
    head.fields = copy_fields(message);
    head.keep_alive = parser.keep_alive();
    if (head.fields.size() > max_fields) return refuse(431, "the head has too many fields");
    if (message.version() != 11 && message.version() != 10) {
      return refuse(400, "the HTTP version is neither 1.0 nor 1.1");
    }
    const std::size_t codings = count_fields(head.fields, "transfer-encoding");
    const std::size_t lengths = count_fields(head.fields, "content-length");
    if (codings + lengths > 1) {
      return refuse(400, "more than one of Content-Length and Transfer-Encoding");
    }
    // Beast accepts a list of equal lengths as one.
    if (lengths == 1 && find_field(head.fields, "content-length")->find(',') != std::string::npos) {
      return refuse(400, "more than one Content-Length");
    }
    if (codings == 1 &&
        !equals_ignoring_case(*find_field(head.fields, "transfer-encoding"), "chunked")) {
      return refuse(400, "the Transfer-Encoding is not chunked");
    }
    if (codings == 1 && head.is_http_10) return refuse(400, "HTTP/1.0 has no chunked encoding");
    if (count_fields(head.fields, "host") != 1 && !head.is_http_10) {
      return refuse(400, "the head must have exactly one Host");
    }
    const std::string* const expect = find_field(head.fields, "expect");
    head.wants_continue = expect != nullptr && equals_ignoring_case(*expect, "100-continue");
    return {};
  }
};

RequestParser::RequestParser(const Limits& limits) : state_(std::make_unique<State>(limits)) {}
RequestParser::~RequestParser() = default;
RequestParser::RequestParser(RequestParser&&) noexcept = default;

Result<std::size_t> RequestParser::feed(std::string_view bytes) {
  State& state = *state_;
  if (state.parser.is_done() || bytes.empty()) return std::size_t{0};
  if (state.is_stuck && bytes.size() < kLastChunkBytes) return std::size_t{0};
  if (state.head_bytes == 0 && state.empty_lines < kEmptyLines) {
    if (bytes == "\r") return std::size_t{0};
    if (bytes.substr(0, 2) == "\r\n") {
      ++state.empty_lines;
      return std::size_t{2};
    }
  }
  const std::size_t body_before = state.body.size();
  const bool had_head = state.has_head;
  beast::error_code ec;
  const std::size_t used = state.parser.put(asio::buffer(bytes.data(), bytes.size()), ec);
  if (ec && ec != http::error::need_more) {
    // Beast rejects a Content-Length after it has all fields, but before the head is complete.
    if (!had_head) state.head.fields = copy_fields(state.parser.get());
    if (ec == http::error::body_limit) return state.refuse(413, "the body is too large");
    if (ec == http::error::header_limit) return state.refuse(431, "the head is too large");
    return state.refuse(400, ec.message());
  }
  if (had_head) {
    state.is_stuck = used == 0;
    const std::size_t framing = state.body.size() == body_before ? framing_bytes(used, bytes) : 0;
    if (framing > state.max_head_bytes) {
      return state.refuse(400, "the first line of a chunk, or the trailer, is too large");
    }
    return used;
  }
  state.head_bytes += used;
  const std::size_t unfinished = state.parser.is_header_done() ? 0 : bytes.size() - used;
  if (state.head_bytes + unfinished > state.max_head_bytes) {
    return state.refuse(431, "the head is too large");
  }
  if (state.parser.is_header_done()) {
    state.has_head = true;
    PEGA_TRY(state.read_head());
  }
  return used;
}

bool RequestParser::has_begun() const noexcept { return state_->head_bytes > 0; }
bool RequestParser::has_head() const noexcept { return state_->has_head; }
bool RequestParser::is_complete() const noexcept { return state_->parser.is_done(); }
const RequestHead& RequestParser::head() const noexcept { return state_->head; }
std::size_t RequestParser::body_size() const noexcept { return state_->body.size(); }
std::string RequestParser::take_body() { return std::move(state_->body); }
unsigned RequestParser::error_status() const noexcept { return state_->error_status; }

struct ResponseParser::State {
  explicit State(bool skips_body) : head_only(skips_body) { start(); }

  void start() {
    parser.emplace();
    parser->header_limit(kAnswerHeadBytes);
    parser->body_limit(boost::none);
    parser->eager(false);
    parser->skip(head_only);
    has_head = is_stuck = false;
  }

  bool head_only;
  std::optional<http::response_parser<AppendBody>> parser;
  ResponseHead head;
  bool has_head = false;
  bool is_stuck = false;  // As in RequestParser::State.
};

ResponseParser::ResponseParser(bool head_only) : state_(std::make_unique<State>(head_only)) {}
ResponseParser::~ResponseParser() = default;
ResponseParser::ResponseParser(ResponseParser&&) noexcept = default;

Result<std::size_t> ResponseParser::feed(std::string_view bytes, std::string& body) {
  State& state = *state_;
  std::size_t used = 0;
  while (used < bytes.size() && !state.parser->is_done()) {
    if (state.is_stuck && bytes.size() - used < kLastChunkBytes) break;
    state.parser->get().body() = &body;
    beast::error_code ec;
    const std::size_t body_before = body.size();
    const std::string_view left = bytes.substr(used);
    const std::size_t step = state.parser->put(asio::buffer(left.data(), left.size()), ec);
    used += step;
    state.is_stuck = state.has_head && step == 0;
    if (ec && ec != http::error::need_more) {
      return fail(Errc::kCorrupt, "invalid HTTP response: {}", ec.message());
    }
    if (state.has_head && body.size() == body_before &&
        framing_bytes(step, left) > kAnswerHeadBytes) {
      return fail(Errc::kCorrupt,
                  "invalid HTTP response: a chunk's first line or trailer does not end");
    }
    if (!state.has_head && state.parser->is_header_done()) {
      const auto& message = state.parser->get();
      if (message.result_int() == 101) {
        return fail(Errc::kCorrupt, "invalid HTTP response: an upgrade that was not requested");
      }
      if (message.result_int() / 100 == 1) {
        state.start();
        continue;
      }
      state.has_head = true;
      state.head.status = message.result_int();
      state.head.reason = text(message.reason());
      state.head.fields = copy_fields(message);
      state.head.keep_alive = state.parser->keep_alive();
      if (const auto length = state.parser->content_length()) state.head.content_length = *length;
    } else if (step == 0 || ec) {
      break;
    }
  }
  return used;
}

Result<void> ResponseParser::feed_end() {
  State& state = *state_;
  if (state.parser->is_done()) return {};
  beast::error_code ec;
  std::string unused;
  state.parser->get().body() = &unused;
  if (state.has_head) state.parser->put_eof(ec);
  state.parser->get().body() = nullptr;
  if (ec || !state.has_head) {
    return fail(Errc::kPeerLost, "the connection ended within a response");
  }
  return {};
}

bool ResponseParser::has_head() const noexcept { return state_->has_head; }
bool ResponseParser::is_complete() const noexcept {
  return state_->has_head && state_->parser->is_done();
}
const ResponseHead& ResponseParser::head() const noexcept { return state_->head; }

}  // namespace pegaflow::router
