// libFuzzer: any bytes as the records of a message between routers, and as a part of a snapshot.
//
// Whatever comes, records that are read can be written again as the same bytes, and nothing exceeds
// the limits.
#include "router/replicas/replica_message.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "base/assert.h"

namespace pegaflow::router {
namespace {

void read_and_write(std::span<const std::byte> bytes) {
  const auto records = read_records(bytes);
  if (!records) return;
  std::string written;
  for (const ReplicaRecord& record : *records) {
    const bool fits = append_record(written, record);
    PEGA_ASSERT(fits || bytes.size() + 1024 > kMaxReplicaMessage, "a record of {} bytes grew",
                bytes.size());
  }
  const auto again = read_records(std::as_bytes(std::span(written)));
  PEGA_ASSERT(again && again->size() == records->size(), "{} records became others",
              records->size());
  std::string rewritten;
  for (const ReplicaRecord& record : *again) append_record(rewritten, record);
  PEGA_ASSERT(written == rewritten, "{} records became others", records->size());
}

void run(std::span<const std::byte> bytes) {
  read_and_write(bytes);
  // Without a valid seal the records are never read.
  const cluster::PeerSecrets secrets;
  const auto opened = open_message(bytes, kPublished, secrets);
  PEGA_ASSERT(!opened || opened->records.size() + kReplicaHeaderBytes + kSealBytes == bytes.size(),
              "{} bytes", bytes.size());
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const std::string sealed = seal_message({}, text, kPublished, secrets.first());
  const auto valid = open_message(std::as_bytes(std::span(sealed)), kPublished, secrets);
  PEGA_ASSERT(valid.has_value() == (sealed.size() <= kMaxReplicaMessage), "a message of {} bytes",
              sealed.size());
}

}  // namespace
}  // namespace pegaflow::router

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  pegaflow::router::run(std::as_bytes(std::span(data, size)));
  return 0;
}
