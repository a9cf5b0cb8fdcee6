// libFuzzer: any bytes as a message, read as each struct of the wire by the codec.
//
// The first byte chooses the struct. Nothing may crash, and values that the codec accepts keep
// their bounds.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>

#include "base/assert.h"
#include "capnp/wire/codec.h"
#include "capnp/wire/peer_codec.h"

namespace pegaflow {
namespace {

void read_one(unsigned kind, capnp::MessageReader& message) {
  switch (kind % 8) {
    case 0: {
      std::vector<BlockKey> scratch;
      if (const auto keys = read_keys(message.getRoot<wire::Keys>(), scratch)) {
        PEGA_ASSERT(keys->size() <= kMaxKeysPerCall, "{} keys", keys->size());
      }
      break;
    }
    case 1:
      if (const auto registration = read_registration(message.getRoot<wire::Registration>())) {
        PEGA_ASSERT(registration->factors.size() <= kMaxFactorsOnWire, "too many factors");
        PEGA_ASSERT(registration->rank < registration->ranks, "a rank beyond its ranks");
        PEGA_ASSERT(registration->shard < registration->shards, "a shard beyond its shards");
        PEGA_ASSERT(registration->instance.size() <= kMaxInstanceBytes, "a long id");
        // An accepted registration survives encoding and decoding.
        capnp::MallocMessageBuilder again;
        auto builder = again.initRoot<wire::Registration>();
        write_registration(*registration, builder);
      }
      break;
    case 2:
      (void)read_job(message.getRoot<wire::JobId>());
      break;
    case 3: {
      const Error error = read_error(message.getRoot<wire::Error>());
      PEGA_ASSERT(static_cast<std::size_t>(error.code) < kErrcCount, "an unknown code");
      break;
    }
    case 4:
      (void)read_done(message.getRoot<wire::Done>());
      break;
    case 6:
      if (const auto fabric = read_fabric(message.getRoot<wire::Fabric>())) {
        PEGA_ASSERT(fabric->regions.size() <= kMaxRegionsOnWire, "{} regions",
                    fabric->regions.size());
        capnp::MallocMessageBuilder again;
        write_fabric(*fabric, again.initRoot<wire::Fabric>());
      }
      break;
    case 7: {
      // The request that belongs to the response, as its reader knows it.
      constexpr std::size_t kKeys = 8;
      constexpr std::size_t kShards = 2;
      const auto grant = read_grant(message.getRoot<wire::Peer::LeaseResults>(), kKeys, kShards);
      if (!grant) break;
      PEGA_ASSERT(grant->pages.size() <= kKeys * kShards && grant->pages.size() % kShards == 0,
                  "{} pages", grant->pages.size());
      PEGA_ASSERT(grant->checksums.empty() || grant->checksums.size() == grant->pages.size(),
                  "{} checksums", grant->checksums.size());
      PEGA_ASSERT(grant->pages.empty() == (grant->lease == 0), "a lease of nothing");
      break;
    }
    default: {
      const auto hello = message.getRoot<wire::Hello>();
      const std::uint16_t version = common_version(hello.getMinimum(), hello.getMaximum());
      PEGA_ASSERT(version == 0 || (version >= kWireMinimum && version <= kWireMaximum), "{}",
                  version);
      (void)read_id(hello.getProcess());
      (void)read_id(hello.getPreviousConnection());
      (void)hello.getBuild().size();
    }
  }
}

}  // namespace
}  // namespace pegaflow

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  // Words have to be aligned; what is left over of the last one is dropped.
  std::vector<capnp::word> words((size - 1) / sizeof(capnp::word));
  if (!words.empty()) std::memcpy(words.data(), data + 1, words.size() * sizeof(capnp::word));
  // A message with pointers out of its bounds throws, by Cap'n Proto's contract.
  (void)kj::runCatchingExceptions([&]() {
    capnp::FlatArrayMessageReader message(kj::arrayPtr(words.data(), words.size()));
    pegaflow::read_one(data[0], message);
  });
  return 0;
}
