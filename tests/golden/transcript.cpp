#include "tests/golden/transcript.h"

#include <charconv>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

#include <fmt/format.h>

namespace pegaflow::testing {

std::optional<std::size_t> message_bytes(const std::vector<std::byte>& stream) {
  // The number of segments less one, the words of each, and 4 bytes of padding up to a whole word.
  const auto number = [&](std::size_t at) {
    std::uint32_t value = 0;
    std::memcpy(&value, stream.data() + 4 * at, sizeof value);
    return value;
  };
  if (stream.size() < 4) return std::nullopt;
  const std::size_t segments = std::size_t{number(0)} + 1;
  if (segments > 512) throw std::runtime_error("a message of more than 512 segments");
  const std::size_t header = (4 * (segments + 1) + 7) / 8 * 8;
  if (stream.size() < header) return std::nullopt;
  std::size_t bytes = header;
  for (std::size_t i = 1; i <= segments; ++i) bytes += std::size_t{number(i)} * 8;
  return stream.size() < bytes ? std::nullopt : std::optional(bytes);
}

kj::Array<capnp::word> words_of(const std::vector<std::byte>& bytes) {
  auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
  std::memcpy(words.begin(), bytes.data(), bytes.size());
  return words;
}

void write_transcript(const std::filesystem::path& file, const std::vector<RecordedMessage>& all) {
  std::ofstream out(file);
  for (const RecordedMessage& message : all) {
    out << fmt::format("{} {} {} ", message.connection, message.is_from_client ? '>' : '<',
                       message.descriptors);
    for (const std::byte each : message.bytes) out << fmt::format("{:02x}", each);
    out << '\n';
  }
  if (!out) throw std::runtime_error("the transcript cannot be written: " + file.string());
}

std::vector<RecordedMessage> read_transcript(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) throw std::runtime_error("there is no transcript " + file.string());
  std::vector<RecordedMessage> all;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line.front() == '#') continue;
    std::istringstream fields(line);
    RecordedMessage message;
    char direction = 0;
    std::string digits;
    if (!(fields >> message.connection >> direction >> message.descriptors >> digits)) {
      throw std::runtime_error("a transcript's line cannot be read: " + line.substr(0, 40));
    }
    message.is_from_client = direction == '>';
    for (std::size_t at = 0; at + 1 < digits.size(); at += 2) {
      std::uint8_t value = 0;
      const char* const begin = digits.data() + at;
      if (std::from_chars(begin, begin + 2, value, 16).ptr != begin + 2) {
        throw std::runtime_error("a transcript has invalid bytes");
      }
      message.bytes.push_back(static_cast<std::byte>(value));
    }
    all.push_back(std::move(message));
  }
  return all;
}

}  // namespace pegaflow::testing
