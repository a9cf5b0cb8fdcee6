#pragma once
/// \file
/// The answers to POST /score, POST /learn and GET /index/dump.

#include <string>
#include <string_view>

#include "base/clock.h"
#include "router/kv/kv_routing.h"
#include "router/routing/fleet.h"
#include "router/score/score_request.h"

namespace pegaflow::router {

/// An answer, or the reason for which there is none.
struct ScoreAnswer {
  unsigned status = 200;
  std::string text{};  ///< JSON with 200, else a sentence for error_response().
};

/// The blocks that each engine of the request's model has of its prompt, and the cost there.
/// `is_rendered`: a server of --render made the tokens of a text, which is learned.
ScoreAnswer answer_score(KvRouting& kv, const Fleet& fleet, ScoreRequest request, bool is_rendered,
                         TimePoint now);

/// Learns what a text becomes.
ScoreAnswer answer_lesson(KvRouting& kv, const Fleet& fleet, ScoreRequest lesson);

/// Part of the index: without a query the holders, with `source=NUMBER&cursor=C` the hashes of one
/// of them, of up to kDumpCells cells of the index.
inline constexpr std::size_t kDumpCells = 65'536;
ScoreAnswer answer_dump(const KvRouting& kv, std::string_view target);

}  // namespace pegaflow::router
