#pragma once
/// \file
/// Reads fields of a form (multipart/form-data, RFC 7578) without copying its files.

#include <optional>
#include <string_view>

namespace pegaflow::router {

/// The value of the last text field named `name`, which is the one that web frameworks use: a view
/// into `body`. Parts with a file name are files and do not count. Nothing without such a field. A
/// malformed form is read as far as possible, because the engine is the one that rejects it.
/// Takes time linear in the size of `body`.
std::optional<std::string_view> form_field(std::string_view body, std::string_view content_type,
                                           std::string_view name);

}  // namespace pegaflow::router
