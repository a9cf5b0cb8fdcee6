#include "perf/server/kind_chains.h"

#include <algorithm>
#include <array>

#include "perf/lib/workload.h"

namespace pegaflow::perf {
namespace {

constexpr std::uint32_t kUnitTokens = 16;
constexpr std::uint32_t kStateTokens = 512;
constexpr std::uint32_t kWindowTokens = 1023;  // Without the next token.
constexpr std::uint32_t kChunkTokens = 8192;
constexpr std::size_t kStateUnits = kStateTokens / kUnitTokens;

/// The first unit whose block is sealed, and the units of a block, by kind. Windows and chunks
/// exist in front of the prompt's end only.
struct Sealed {
  std::size_t first = 0;
  std::size_t units = 1;
};
constexpr std::array<Sealed, 4> kSealed{
    {{.first = 0, .units = 1},
     {.first = KindChains::kUnits - (kWindowTokens + kUnitTokens - 1) / kUnitTokens, .units = 1},
     {.first = KindChains::kUnits - kChunkTokens / kUnitTokens, .units = 1},
     {.first = 0, .units = kStateUnits}}};

constexpr std::uint64_t blocks_of_a_prompt() {
  std::uint64_t blocks = 0;
  for (const Sealed& kind : kSealed) blocks += (KindChains::kUnits - kind.first) / kind.units;
  return blocks;
}

Registration engine() {
  const auto kind = [](wire::Kind::Rule rule, std::uint32_t tokens, std::uint32_t block_tokens) {
    return RegisteredKind{.rule = rule,
                          .tokens = tokens,
                          .block_tokens = block_tokens,
                          .page_bytes = kSmallPageBytes};
  };
  return {.instance = "perf kinds",
          .factors = {{"program", "pegaflow-perf kinds"}},
          .block_count = 1024,
          .kinds = {kind(wire::Kind::Rule::PREFIX, 0, kUnitTokens),
                    kind(wire::Kind::Rule::TRAILING, kWindowTokens, kUnitTokens),
                    kind(wire::Kind::Rule::CHUNK, kChunkTokens, kUnitTokens),
                    kind(wire::Kind::Rule::STATE, 0, kStateTokens)},
          .unit_tokens = kUnitTokens,
          .alignment_tokens = kStateTokens};
}

}  // namespace

const std::uint64_t KindChains::kBlocks = kPrompts * blocks_of_a_prompt();

Result<KindChains> KindChains::fill(harness::WireClient& client, std::uint64_t seed) {
  PEGA_TRY(client.register_rank(engine()));
  PEGA_TRY(client.attach("perf kinds"));
  KindChains chains(seed);
  std::uint64_t next_job = 1;
  // In slices of all prompts in turn: the blocks of a prompt are not neighbors in the index.
  for (std::size_t first = 0; first < kUnits; first += kStateUnits) {
    for (std::uint64_t prompt = 0; prompt < kPrompts; ++prompt) {
      const std::vector<BlockKey> slice = chains.keys_.range(prompt * kUnits + first, kStateUnits);
      for (std::size_t kind = 0; kind < kSealed.size(); ++kind) {
        std::vector<BlockKey> keys;
        for (std::size_t i = kSealed[kind].units - 1; i < slice.size(); i += kSealed[kind].units) {
          if (first + i >= kSealed[kind].first) keys.push_back(slice[i]);
        }
        if (keys.empty()) continue;
        const JobId job = client.job(next_job++);
        PEGA_TRY_LET(const std::vector<std::uint32_t> slots,
                     client.reserve(job, keys, 0, static_cast<std::uint8_t>(kind)));
        if (std::count(slots.begin(), slots.end(), harness::WireClient::kNoFrame) != 0) {
          return fail(Errc::kOutOfCapacity, "blocks of kind {} got no slot", kind);
        }
        PEGA_TRY(client.publish(job));
      }
    }
  }
  return chains;
}

}  // namespace pegaflow::perf
