#include "router/body/request_body.h"

#include <string_view>
#include <utility>

#include "router/body/steering.h"
#include "router/http/form_text.h"
#include "router/http/http_message.h"

namespace pegaflow::router {
namespace {

std::string_view media_type(const std::string& type) {
  const std::string_view media = std::string_view(type).substr(0, type.find(';'));
  const std::size_t end = media.find_last_not_of(" \t");
  return media.substr(0, end == std::string_view::npos ? 0 : end + 1);
}

/// Whether a web framework may read such a body as JSON.
bool is_like_json(const std::string& type) {
  constexpr std::string_view kSuffix = "+json";
  const std::string_view media = media_type(type);
  return is_json_type(type) ||
         (media.size() > kSuffix.size() &&
          equals_ignoring_case(media.substr(media.size() - kSuffix.size()), kSuffix));
}

}  // namespace

bool is_json_type(const std::string& type) {
  return equals_ignoring_case(media_type(type), "application/json");
}

Result<BodyReading> read_request_body(std::string& body, BodyKind kind,
                                      const std::string* content_type, const Tenant* tenant) {
  BodyReading reading;
  if (kind == BodyKind::kForm) {
    if (content_type != nullptr) {
      reading.model = form_field(body, *content_type, "model").value_or(std::string_view());
    }
    return reading;
  }
  const bool is_known = kind == BodyKind::kJson;
  if (!is_known && (body.empty() || (content_type != nullptr && !is_like_json(*content_type)))) {
    return reading;
  }
  auto read = read_members(body);
  if (is_known && !read) return tl::unexpected<Error>(std::move(read.error()));
  if (!is_known || may_steer(*read)) {
    auto cut =
        without_steering(body, is_known ? SteeringDepth::kKnownPath : SteeringDepth::kAnywhere);
    if (!cut) {
      // Without a type the body may have any format; with a JSON type an engine may read more
      // than this parser.
      if (!is_known && content_type == nullptr) return reading;
      return tl::unexpected<Error>(std::move(cut.error()));
    }
    if (*cut) {
      reading.lost_steering = true;
      body = std::move(**cut);
      read = read_members(body);
    }
  }
  if (tenant != nullptr && is_known) {
    PEGA_TRY(set_cache_salt(body, *read, *tenant));
  } else if (tenant != nullptr) {
    PEGA_TRY(set_cache_salt_anywhere(body, *tenant));
    read = read_members(body);
  }
  if (read) reading.members = std::move(*read);
  const JsonMember* const model = find_member(reading.members, "model");
  if (model != nullptr) reading.model = json_unescape(model->value);
  return reading;
}

}  // namespace pegaflow::router
