#pragma once
/// \file
/// The name of a session where its id must not be shown.

#include <cstdint>
#include <string_view>

namespace pegaflow {

/// XXH3-64 of the id of a session, which routers and engines compute alike. Servers and their
/// answers have this name only: the id may be a client's.
[[nodiscard]] std::uint64_t session_name(std::string_view id) noexcept;

}  // namespace pegaflow
