#pragma once
/// \file
/// Recorded messages of Cap'n Proto's RPC as calls of cache.capnp and peer.capnp, and their
/// answers.

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

/// A message that can be read for as long as this lives.
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

/// The differences between two structs of one type, a line each; a field that is absent from the
/// older one may have any value in the newer, since it may have been added after it.
///
/// Not compared: what each life of a process draws anew (ids, tokens, positions, challenges and
/// proofs, lanes), what names the build and its versions, texts of errors, capabilities, and where
/// a page lies in the pool: of slots and pages it is compared how many there are.
std::vector<std::string> differences(capnp::DynamicStruct::Reader older,
                                     capnp::DynamicStruct::Reader newer, const std::string& path);

}  // namespace pegaflow::testing
