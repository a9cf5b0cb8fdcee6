#pragma once
/// \file
/// The blocks that the fuzz target of the peers' protocol stores and its corpus requests.

#include <cstdint>
#include <vector>

#include <capnp/message.h>
#include <capnp/rpc.capnp.h>

#include "base/block_key.h"
#include "capnp/peer.capnp.h"
#include "capnp/wire/codec.h"
#include "cluster/peer_proof.h"

namespace pegaflow::fuzz {

inline std::vector<BlockKey> keys(std::size_t count) {
  std::vector<BlockKey> made(count);
  for (std::size_t i = 0; i < count; ++i) made[i].bytes.fill(static_cast<std::byte>(i + 1));
  return made;
}

inline Registration engine() {
  return {
      .instance = "engine", .factors = {{"weights", "a"}}, .page_bytes = 4096, .block_count = 100};
}

/// The namespace of that engine.
inline Bytes32 space() {
  const Registration of = engine();
  std::vector<engine::NamespaceFactor> factors;
  for (const auto& [name, value] : of.factors) factors.push_back({name, value});
  const std::uint64_t page_bytes[] = {of.page_bytes};
  return cluster::space_name(factors, page_bytes);
}

/// A call in `message`: question `number` to the result of `target`, or, with `pointer`, to the
/// first pointer of that result. Returns its parameters.
template <typename Params>
typename Params::Builder call(capnp::MallocMessageBuilder& message, std::uint32_t number,
                              std::uint64_t interface, std::uint16_t method, std::uint32_t target,
                              bool pointer = false) {
  auto call = message.initRoot<capnp::rpc::Message>().initCall();
  call.setQuestionId(number);
  call.setInterfaceId(interface);
  call.setMethodId(method);
  call.getSendResultsTo().setCaller();
  auto to = call.initTarget().initPromisedAnswer();
  to.setQuestionId(target);
  if (pointer) to.initTransform(1)[0].setGetPointerField(0);
  return call.initParams().getContent().template initAs<Params>();
}

}  // namespace pegaflow::fuzz
