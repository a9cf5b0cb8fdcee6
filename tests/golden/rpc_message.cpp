#include "tests/golden/rpc_message.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>

#include <fmt/format.h>
#include <kj/string.h>

#include "capnp/cache.capnp.h"
#include "capnp/peer.capnp.h"

namespace pegaflow::testing {
namespace {

constexpr std::string_view kDrawnAnew[] = {
    "server",  "connection", "process",   "previousConnection",
    "token",   "position",   "space",     "build",
    "minimum", "maximum",    "features",  "detail",
    "node",    "generation", "challenge", "proof",
    "fabric",  "others",     "lease"};

std::string text_of(capnp::DynamicValue::Reader value) {
  const kj::String text = kj::str(value);
  return {text.begin(), text.size()};
}

void compare(capnp::StructSchema::Field field, capnp::DynamicStruct::Reader older,
             capnp::DynamicStruct::Reader newer, const std::string& path,
             std::vector<std::string>& found) {
  const std::string name(field.getProto().getName().cStr());
  const std::string where = path + "." + name;
  if (std::find(std::begin(kDrawnAnew), std::end(kDrawnAnew), name) != std::end(kDrawnAnew)) return;
  if (!older.has(field, capnp::HasMode::NON_DEFAULT)) return;
  if (!newer.has(field, capnp::HasMode::NON_DEFAULT)) {
    found.push_back(where + " is missing");
    return;
  }
  if (field.getType().isInterface()) return;
  const auto was = older.get(field);
  const auto is = newer.get(field);
  if (field.getType().isStruct()) {
    const auto inner =
        differences(was.as<capnp::DynamicStruct>(), is.as<capnp::DynamicStruct>(), where);
    found.insert(found.end(), inner.begin(), inner.end());
  } else if (name == "slots" || name == "pages") {
    const auto before = was.as<capnp::DynamicList>().size();
    const auto after = is.as<capnp::DynamicList>().size();
    if (before != after) found.push_back(fmt::format("{}: {} instead of {}", where, after, before));
  } else if (text_of(was) != text_of(is)) {
    found.push_back(fmt::format("{}: {} instead of {}", where, text_of(is), text_of(was)));
  }
}

}  // namespace

capnp::InterfaceSchema::Method method_of(MethodId id) {
  for (const capnp::InterfaceSchema schema :
       {capnp::InterfaceSchema(capnp::Schema::from<wire::Gate>()),
        capnp::InterfaceSchema(capnp::Schema::from<wire::Session>()),
        capnp::InterfaceSchema(capnp::Schema::from<wire::PeerGate>()),
        capnp::InterfaceSchema(capnp::Schema::from<wire::Peer>())}) {
    if (schema.getProto().getId() == id.interface_id) return schema.getMethods()[id.method];
  }
  throw std::runtime_error(fmt::format("there is no interface {:x}", id.interface_id));
}

std::vector<std::string> differences(capnp::DynamicStruct::Reader older,
                                     capnp::DynamicStruct::Reader newer, const std::string& path) {
  std::vector<std::string> found;
  for (const auto field : older.getSchema().getNonUnionFields()) {
    compare(field, older, newer, path, found);
  }
  KJ_IF_MAYBE (was, older.which()) {
    KJ_IF_MAYBE (is, newer.which()) {
      if (*was != *is) {
        found.push_back(fmt::format("{}: {} instead of {}", path, is->getProto().getName().cStr(),
                                    was->getProto().getName().cStr()));
      } else {
        compare(*was, older, newer, path, found);
      }
    } else {
      found.push_back(path + ": an unknown value of a union");
    }
  }
  return found;
}

}  // namespace pegaflow::testing
