#include "engine/kinds/block_kinds.h"

#include <algorithm>

#include <fmt/core.h>

namespace pegaflow::engine {
namespace {

Result<void> check_kind(const BlockKind& kind, std::size_t number, const BlockKinds& all) {
  if (kind.block_tokens == 0 || kind.block_tokens % all.unit_tokens != 0) {
    return fail(Errc::kInvalidArgument,
                "kind {}: a block of {} tokens is not a multiple of the hash unit of {}", number,
                kind.block_tokens, all.unit_tokens);
  }
  if (all.alignment_tokens % kind.block_tokens != 0) {
    return fail(Errc::kInvalidArgument,
                "kind {}: the alignment of {} tokens is not a multiple of its block of {}", number,
                all.alignment_tokens, kind.block_tokens);
  }
  const bool has_length = kind.rule == KindRule::kTrailing || kind.rule == KindRule::kChunk;
  if (has_length && kind.tokens == 0) {
    return fail(Errc::kInvalidArgument, "kind {}: a window or chunk of 0 tokens", number);
  }
  if (kind.rule == KindRule::kChunk && kind.tokens % kind.block_tokens != 0) {
    return fail(Errc::kInvalidArgument,
                "kind {}: a chunk of {} tokens is not a multiple of its block of {}", number,
                kind.tokens, kind.block_tokens);
  }
  return {};
}

}  // namespace

std::string_view to_string(KindRule rule) noexcept {
  switch (rule) {
    case KindRule::kPrefix:
      return "full";
    case KindRule::kTrailing:
      return "window";
    case KindRule::kChunk:
      return "chunk";
    case KindRule::kState:
      return "state";
  }
  return "unknown";
}

std::string to_string(const BlockKinds& kinds) {
  if (kinds.kinds.empty()) return "one kind";
  std::string text;
  for (const BlockKind& kind : kinds.kinds) {
    if (!text.empty()) text += ", ";
    text += to_string(kind.rule);
    if (kind.tokens != 0) text += fmt::format(" {}", kind.tokens);
    text += fmt::format(" of {} tokens", kind.block_tokens);
  }
  return text + fmt::format("; unit {}, alignment {}", kinds.unit_tokens, kinds.alignment_tokens);
}

Result<void> BlockKinds::check() const {
  if (kinds.empty() || kinds.size() > kMost) {
    return fail(Errc::kInvalidArgument, "{} kinds of blocks, 1 to {} are possible", kinds.size(),
                kMost);
  }
  if (unit_tokens == 0 || alignment_tokens == 0) {
    return fail(Errc::kInvalidArgument, "a hash unit of {} tokens and an alignment of {}",
                unit_tokens, alignment_tokens);
  }
  for (std::size_t i = 0; i < kinds.size(); ++i) PEGA_TRY(check_kind(kinds[i], i, *this));
  return {};
}

BlockRange BlockKinds::needed(const BlockKind& kind, std::uint64_t tokens) {
  const std::size_t end = tokens / kind.block_tokens;
  std::size_t first = 0;
  switch (kind.rule) {
    case KindRule::kPrefix:
      break;
    case KindRule::kTrailing:
      first = (tokens - std::min<std::uint64_t>(tokens, kind.tokens)) / kind.block_tokens;
      break;
    case KindRule::kChunk:
      first = tokens / kind.tokens * kind.tokens / kind.block_tokens;
      break;
    case KindRule::kState:
      first = end == 0 ? 0 : end - 1;
      break;
  }
  return {.first = first, .count = end - first};
}

}  // namespace pegaflow::engine
