#pragma once
/// \file
/// Text from other processes in log lines.

#include <algorithm>
#include <string>

#include <fmt/core.h>

namespace pegaflow {

/// Returns `text` with each control character escaped as in "\x0a". Every log line passes through
/// it, so that a name chosen by a client or a peer can neither begin a new line nor control a
/// terminal.
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
