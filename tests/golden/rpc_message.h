#pragma once
/// \file
/// Recorded messages of Cap'n Proto's RPC as calls of cache.capnp and peer.capnp, and their
/// results.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <capnp/dynamic.h>
#include <capnp/message.h>
#include <capnp/rpc.capnp.h>
#include <capnp/schema.h>
#include <capnp/serialize.h>

#include "tests/golden/transcript.h"

namespace pegaflow::testing {

/// A message that can be read for as long as this object lives.
class RpcMessage {
 public:
  explicit RpcMessage(const std::vector<std::byte>& bytes)
      : words_(words_of(bytes)), reader_(words_) {}
  capnp::rpc::Message::Reader get() { return reader_.getRoot<capnp::rpc::Message>(); }

 private:
  kj::Array<capnp::word> words_;
  capnp::FlatArrayMessageReader reader_;
};

/// A method of Gate or Session, PeerGate or Peer.
struct MethodId {
  std::uint64_t interface_id = 0;
  std::uint16_t method = 0;
  auto operator<=>(const MethodId&) const = default;
};
capnp::InterfaceSchema::Method method_of(MethodId id);

/// The differences between two structs of one type, one line each. A field that is absent from the
/// older struct may have any value in the newer one, since it may have been added later.
///
/// Excluded are values that differ in each run of a process (ids, tokens, positions, challenges and
/// proofs, lanes), the build and its versions, texts of errors, capabilities, and places in the
/// pool: only the numbers of slots and pages are compared.
std::vector<std::string> differences(capnp::DynamicStruct::Reader older,
                                     capnp::DynamicStruct::Reader newer, const std::string& path);

}  // namespace pegaflow::testing
