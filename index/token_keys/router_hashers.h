#pragma once
/// \file
/// The block hashes of other routers, which compute their own from token ids: llm-d, and Dynamo
/// with SMG.

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "index/token_keys/prompt.h"

namespace pegaflow::index {

/// llm-d's option hashAlgorithm.
enum class LlmdAlgorithm : std::uint8_t { kCborFnv, kXxh64 };

/// Computes llm-d's keys of the prompt's full blocks. `model` is the adapter's name for prompts
/// with one; `seed` is llm-d's hashSeed. Errors: kInvalidArgument for a block size of 0 or more
/// than 8,192, or wrong items.
Result<void> llmd_keys(LlmdAlgorithm algorithm, std::string_view seed, std::string_view model,
                       std::uint32_t block_size, const TokenPrompt& prompt,
                       std::vector<std::uint64_t>& out);

/// Computes the chained XXH3 hashes of Dynamo and SMG. Errors: as llmd_keys(); and kInvalidArgument
/// for prompts with multimodal items, for which Dynamo has hashes of its own.
Result<void> dynamo_keys(std::uint32_t block_size, const TokenPrompt& prompt,
                         std::vector<std::uint64_t>& out);

}  // namespace pegaflow::index
