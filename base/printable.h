#pragma once
/// \file
/// Text of others in lines of ours.

#include <algorithm>
#include <string>

#include <fmt/core.h>

namespace pegaflow {

/// `text` with each control character as "\x0a". Every log line passes through it, so that a name
/// that a client or a peer chose can neither begin a line of its own nor command a terminal.
inline std::string printable(std::string text) {
  const auto is_control = [](char byte) {
    return static_cast<unsigned char>(byte) < 0x20 || byte == 0x7f;
  };
  if (std::none_of(text.begin(), text.end(), is_control)) return text;
  std::string escaped;
  escaped.reserve(text.size() + 16);
  for (const char byte : text) {
    if (is_control(byte)) {
      escaped += fmt::format("\\x{:02x}", static_cast<unsigned>(static_cast<unsigned char>(byte)));
    } else {
      escaped += byte;
    }
  }
  return escaped;
}

}  // namespace pegaflow
