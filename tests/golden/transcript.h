#pragma once
/// \file
/// A conversation of a client and a server over the Unix socket, message by message, as a text
/// file.

#include <cstddef>
#include <filesystem>
#include <optional>
#include <vector>

#include <capnp/common.h>
#include <kj/array.h>
#include <kj/common.h>

namespace pegaflow::testing {

/// One message of Cap'n Proto's RPC, framed as on the wire.
struct RecordedMessage {
  std::size_t connection = 0;  ///< In the order in which connections were accepted.
  bool is_from_client = false;
  std::size_t descriptors = 0;  ///< Descriptors that came with its bytes.
  std::vector<std::byte> bytes{};
};

/// The bytes of the first complete message in `stream`; no value while it is incomplete. Throws
/// std::runtime_error for an invalid message.
std::optional<std::size_t> message_bytes(const std::vector<std::byte>& stream);

/// The words of a message for capnp::FlatArrayMessageReader.
kj::Array<capnp::word> words_of(const std::vector<std::byte>& bytes);

/// One line for each message: connection, > (from the client) or <, descriptors, bytes in
/// hexadecimal. Lines that begin with # are comments.
void write_transcript(const std::filesystem::path& file, const std::vector<RecordedMessage>& all);
std::vector<RecordedMessage> read_transcript(const std::filesystem::path& file);

}  // namespace pegaflow::testing
