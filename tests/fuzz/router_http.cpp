// libFuzzer: any bytes as requests and as a response, whole and in pieces, and as a form.
//
// Nothing may crash, limits hold, and the result does not depend on the cut. The first byte is the
// length of the pieces.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/assert.h"
#include "router/http/form_text.h"
#include "router/http/http_message.h"
#include "router/http/routes.h"

namespace pegaflow::router {
namespace {

struct Seen {
  bool failed = false;
  bool complete = false;
  std::string text;  // Head and body.
};

Seen read_request(std::string_view bytes, std::size_t step) {
  constexpr std::size_t kHead = 512;
  constexpr std::size_t kBody = 256;
  RequestParser parser({.header_bytes = kHead, .body_bytes = kBody});
  Seen seen;
  std::string kept;
  for (std::size_t at = 0; at < bytes.size() && !seen.failed; at += step) {
    kept += bytes.substr(at, step);
    while (!kept.empty() && !parser.is_complete()) {
      const auto used = parser.feed(kept);
      if (!used) {
        seen.failed = true;
        const unsigned status = parser.error_status();
        PEGA_ASSERT(status == 400 || status == 413 || status == 431, "status {}", status);
        break;
      }
      PEGA_ASSERT(*used <= kept.size(), "{} of {}", *used, kept.size());
      PEGA_ASSERT(parser.body_size() <= kBody, "a body of {}", parser.body_size());
      if (*used == 0) break;
      kept.erase(0, *used);
    }
  }
  if (parser.is_complete() && !seen.failed) {
    seen.complete = true;
    const RequestHead& head = parser.head();
    seen.text = head.method + " " + head.target;
    for (const HttpField& field : head.fields) {
      PEGA_ASSERT(field.value.find_first_of("\r\n") == std::string::npos, "a line in a value");
      (void)is_hop_by_hop(field.name, head.fields);
      seen.text += field.name + ":" + field.value + "\n";
    }
    const bool both = find_field(head.fields, "content-length") != nullptr &&
                      find_field(head.fields, "transfer-encoding") != nullptr;
    PEGA_ASSERT(!both, "two lengths");
    (void)find_route(head.method, head.target, {});
    seen.text += parser.take_body();
  }
  return seen;
}

Seen read_response(std::string_view bytes, std::size_t step) {
  ResponseParser parser;
  Seen seen;
  std::string kept;
  std::string body;
  for (std::size_t at = 0; at < bytes.size() && !seen.failed; at += step) {
    kept += bytes.substr(at, step);
    while (!kept.empty() && !parser.is_complete()) {
      const auto used = parser.feed(kept, body);
      seen.failed = !used;
      if (!used || *used == 0) break;
      kept.erase(0, *used);
    }
  }
  if (!seen.failed && !parser.is_complete()) seen.failed = !parser.feed_end();
  seen.complete = !seen.failed && parser.is_complete();
  if (seen.complete) seen.text = std::to_string(parser.head().status) + body;
  return seen;
}

/// Any bytes as a form, as its type, and as the content of one of its fields.
void check_form(std::string_view bytes) {
  (void)form_field("--B\r\n\r\n\r\n--B--", bytes, "model");
  if (const auto value = form_field(bytes, "multipart/form-data; boundary=B", "model")) {
    const char* const end = bytes.data() + bytes.size();
    PEGA_ASSERT(value->data() >= bytes.data() && value->data() + value->size() <= end, "outside");
  }
  if (bytes.find("--B") != std::string_view::npos) return;
  const std::string head = "--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n";
  const std::string form = head + "former\r\n" + head + std::string(bytes) + "\r\n--B--\r\n";
  PEGA_ASSERT(form_field(form, "multipart/form-data; boundary=B", "model") == bytes,
              "the value differs from the form's");
}

void compare(const Seen& whole, const Seen& pieces) {
  PEGA_ASSERT(whole.complete == pieces.complete, "complete {} {}", whole.complete, pieces.complete);
  PEGA_ASSERT(whole.text == pieces.text, "the result depends on the cut");
}

}  // namespace
}  // namespace pegaflow::router

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::size_t step = data[0] % 32 + 1;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  using namespace pegaflow::router;  // NOLINT(google-build-using-namespace): C's function, our
                                     // names.
  compare(read_request(bytes, bytes.size()), read_request(bytes, step));
  compare(read_response(bytes, bytes.size()), read_response(bytes, step));
  check_form(bytes);
  return 0;
}
