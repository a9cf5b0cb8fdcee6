// libFuzzer: any bytes as a batch of KV events.
//
// The first byte chooses dialect and tokens. What is decoded obeys the limits, memory is in
// proportion to the input, and each span lies within its batch.
#include "index/events/kv_event.h"

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/assert.h"

namespace pegaflow::index {
namespace {

template <typename T>
bool lies_within(std::span<const T> part, const std::vector<T>& whole) {
  return part.empty() ||
         (part.data() >= whole.data() && part.data() + part.size() <= whole.data() + whole.size());
}

void check(const KvEvent& event, const KvBatch& batch, const KvEventDecoder::Options& options) {
  PEGA_ASSERT(event.hashes.size() <= options.max_hashes, "{} hashes", event.hashes.size());
  PEGA_ASSERT(lies_within(event.hashes, batch.hashes), "hashes of another batch");
  PEGA_ASSERT(lies_within(event.tokens, batch.tokens), "tokens of another batch");
  PEGA_ASSERT(lies_within(event.full_hashes, batch.full_hashes), "bytes of another batch");
  PEGA_ASSERT(event.full_hashes.empty() ||
                  event.full_hashes.size() == event.hashes.size() * event.hash_bytes,
              "{} bytes for {} hashes", event.full_hashes.size(), event.hashes.size());
  PEGA_ASSERT(event.kind != EventKind::kStored ||
                  (event.block_size > 0 && event.block_size <= KvEventDecoder::kMaxBlockSize),
              "a block of {} tokens", event.block_size);
  PEGA_ASSERT(event.session_id.size() <= KvEventDecoder::kMaxText, "a long session");
  PEGA_ASSERT(event.first_extra.size() <= KvEventDecoder::kMaxText, "a long extra key");
  PEGA_ASSERT(options.keep_tokens || event.tokens.size() <= options.head_tokens, "{} tokens",
              event.tokens.size());
}

void run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto choice = std::to_integer<unsigned>(input[0]);
  const KvEventDecoder::Options options{
      .max_hashes = 100,
      .dialect = (choice & 1U) != 0 ? Dialect::kSglang : Dialect::kVllm,
      .keep_tokens = (choice & 2U) != 0,
      .head_tokens = (choice & 4U) != 0 ? 8U : 0U};
  const auto payload = input.subspan(1);
  const Result<KvBatch> batch = KvEventDecoder(options).decode(payload);
  if (!batch) {
    PEGA_ASSERT(batch.error().code == Errc::kCorrupt, "{}", batch.error().detail);
    return;
  }
  PEGA_ASSERT(batch->bytes() <= sizeof(KvBatch) + 64 * payload.size() + 4096, "{} bytes for {}",
              batch->bytes(), payload.size());
  for (const KvEvent& event : batch->events) check(event, *batch, options);
}

}  // namespace
}  // namespace pegaflow::index

// libFuzzer chose the name. NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  pegaflow::index::run(std::as_bytes(std::span(data, size)));
  return 0;
}
