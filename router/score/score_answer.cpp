#include "router/score/score_answer.h"

#include <algorithm>
#include <charconv>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "router/http/json_text.h"
#include "router/page/kv_page.h"

namespace pegaflow::router {

namespace {

using EnginePtr = std::shared_ptr<Engine>;

/// The engines that may serve the model, each once, and of the request's candidates if it has some.
std::vector<EnginePtr> engines_of(const Fleet& fleet, const ScoreRequest& request) {
  std::vector<EnginePtr> engines;
  for (const EnginePtr& engine : fleet.engines()) {
    const bool is_candidate = request.candidates.empty() ||
                              std::find(request.candidates.begin(), request.candidates.end(),
                                        engine->url.text) != request.candidates.end();
    const bool serves =
        request.model.empty() || engine->models.serves(request.model) != Serves::kNo;
    // An engine with both roles is in the list twice.
    const bool is_listed = std::any_of(engines.begin(), engines.end(),
                                       [&](const EnginePtr& e) { return e->id == engine->id; });
    if (is_candidate && serves && !is_listed) engines.push_back(engine);
  }
  return engines;
}

std::string unknown_candidates(const Fleet& fleet, const ScoreRequest& request) {
  std::string list;
  for (const std::string& url : request.candidates) {
    const bool is_known = std::any_of(fleet.engines().begin(), fleet.engines().end(),
                                      [&](const EnginePtr& e) { return e->url.text == url; });
    if (!is_known) list += (list.empty() ? "" : ",") + json_quote(url);
  }
  return list;
}

/// The server of a node of the placement, as JSON.
std::string source_json(const KvRouting& kv, index::NodeId node) {
  if (node == index::kNoNode) return "null";
  for (const auto& [url, each] : kv.pools().nodes()) {
    if (each.place == node) return json_quote(url);
  }
  return "null";
}

std::string rank_json(const KvRouting& kv, const KvScore& score, bool is_up) {
  const KvFleet::Rank& rank = *score.rank;
  const KvFleet::Entry* const entry = kv.fleet().find(rank.engine);
  return fmt::format(
      R"({{"engine":{},"rank":{},"up":{},"trust":"{}","reason":{},"pool":{},"gpu":{},"local":{},)"
      R"("reach":{},"source":{},"uncached_tokens":{},"cost_ms":{:.3f}}})",
      json_quote(rank.url), rank.number, is_up, events_state(rank),
      json_quote(events_reason(*entry, rank)), score.pool != nullptr, score.terms.gpu_blocks,
      score.terms.local_blocks, score.terms.reach_blocks, source_json(kv, score.terms.source),
      score.terms.uncached_tokens, score.terms.cost * 1e3);
}

std::string_view keys_of(const ScoreRequest& request, const KvRequest& kv, bool is_rendered) {
  if (request.form == PromptForm::kKeys) return "given";
  if (kv.hash_mode != 0) return is_rendered ? "rendered" : "computed";
  return kv.known.keys.empty() ? "unknown" : "learned";
}

/// Scores keys: the length of their prompt is known once the tokens of a block are.
KvScores score_keys(KvRouting& kv, std::span<const Candidate> candidates, bool is_length_given,
                    KvRequest& request, TimePoint now) {
  constexpr std::uint32_t kUsualBlock = 16;
  const auto blocks = static_cast<std::uint32_t>(request.known.keys.size());
  if (!is_length_given) request.prompt_tokens = blocks * kUsualBlock + 1;
  KvScores scores = kv.score(candidates, request, now);
  if (is_length_given || scores.block_tokens == 0 || scores.block_tokens == kUsualBlock) {
    return scores;
  }
  // One more: the last token of a prompt is always computed.
  request.prompt_tokens = blocks * scores.block_tokens + 1;
  return kv.score(candidates, request, now);
}

/// Reads the parameter `name` of a query.
bool read_parameter(std::string_view target, std::string_view name, std::uint32_t& out) {
  std::string_view rest = target.substr(target.find('?') + 1);
  while (!rest.empty()) {
    const std::string_view pair = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(rest.size(), pair.size() + 1));
    if (pair.substr(0, pair.find('=')) != name || pair.size() <= name.size() + 1) continue;
    const std::string_view value = pair.substr(name.size() + 1);
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
    return error == std::errc() && end == value.data() + value.size();
  }
  return false;
}

std::string holders_json(const KvRouting& kv) {
  std::string list;
  for (const auto& [id, entry] : kv.fleet().entries()) {
    for (const auto& rank : entry.ranks) {
      list += fmt::format(
          R"({}{{"source":{},"engine":{},"rank":{},"trust":"{}","blocks":{},"block_tokens":{}}})",
          list.empty() ? "\n  " : ",\n  ", rank->holder, json_quote(entry.url), rank->number,
          events_state(*rank), kv.blocks_of(*rank), rank->source.block_size());
    }
  }
  for (const auto& [url, node] : kv.pools().nodes()) {
    for (const auto& [space, pool] : node.pools) {
      list += fmt::format(R"({}{{"source":{},"server":{},"namespace":{},"trust":"{}","blocks":{},)"
                          R"("block_tokens":{}}})",
                          list.empty() ? "\n  " : ",\n  ", pool.holder, json_quote(url),
                          json_quote(space), pool.is_trusted ? "exact" : "untrusted",
                          kv.blocks_of(pool), pool.block_tokens);
    }
  }
  return fmt::format("{{\"sources\":[{}]}}\n", list);
}

}  // namespace

ScoreAnswer answer_score(KvRouting& kv, const Fleet& fleet, ScoreRequest request, bool is_rendered,
                         TimePoint now) {
  if (!request.model.empty() && fleet.is_unknown_model(request.model)) {
    return {404, fmt::format("\"model\": no engine serves `{}`", request.model.substr(0, 256))};
  }
  const std::vector<EnginePtr> engines = engines_of(fleet, request);
  std::vector<Candidate> candidates;
  for (const EnginePtr& engine : engines) candidates.push_back({engine->id, engine->inflight});
  const bool is_length_exact = !request.prompt.tokens.empty() || request.prompt_tokens.has_value();
  const std::unique_ptr<KvRequest> prompt = kv.peek(std::move(request.prompt), request.model);
  if (is_rendered && prompt->hash_mode != 0) kv.learn(prompt->text, prompt->known.keys);
  if (prompt->token_count == 0 && request.prompt_tokens) {
    prompt->prompt_tokens = *request.prompt_tokens;
  }
  KvScores scores;
  if (request.form == PromptForm::kKeys) {
    prompt->known.keys = std::move(request.keys);
    scores = score_keys(kv, candidates, request.prompt_tokens.has_value(), *prompt, now);
  } else {
    scores = kv.score(candidates, *prompt, now);
  }
  std::string ranks;
  for (const KvScore& score : scores.ranks) {
    const auto engine = std::find_if(engines.begin(), engines.end(), [&](const EnginePtr& e) {
      return e->id == score.rank->engine;
    });
    ranks += (ranks.empty() ? "\n  " : ",\n  ") +
             rank_json(kv, score, engine != engines.end() && (*engine)->is_up);
  }
  return {200,
          fmt::format(R"({{"model":{},"prompt_tokens":{},"prompt_tokens_exact":{},)"
                      R"("block_tokens":{},"keys":"{}","blocks":{},"unknown_candidates":[{}],)"
                      "\n\"engines\":[{}]}}\n",
                      json_quote(request.model.substr(0, 256)), prompt->prompt_tokens,
                      is_length_exact, scores.block_tokens, keys_of(request, *prompt, is_rendered),
                      prompt->known.keys.size(), unknown_candidates(fleet, request), ranks)};
}

ScoreAnswer answer_lesson(KvRouting& kv, const Fleet& fleet, ScoreRequest lesson) {
  if (!lesson.model.empty() && fleet.is_unknown_model(lesson.model)) {
    return {404, fmt::format("\"model\": no engine serves `{}`", lesson.model.substr(0, 256))};
  }
  const bool is_hashed = !lesson.tokens.empty();
  lesson.prompt.tokens = std::move(lesson.tokens);
  lesson.prompt.is_exact = is_hashed;
  const std::unique_ptr<KvRequest> text = kv.peek(std::move(lesson.prompt), lesson.model);
  if (is_hashed && text->hash_mode == 0) {
    return {503,
            "\"token_ids\": no engine's events have told yet how it hashes such a prompt; send "
            "\"keys\", or try again later"};
  }
  const std::vector<index::Key>& keys = is_hashed ? text->known.keys : lesson.keys;
  kv.learn(text->text, keys);
  return {200, fmt::format("{{\"blocks\":{},\"text_bytes\":{}}}\n", keys.size(), text->text_size)};
}

ScoreAnswer answer_dump(const KvRouting& kv, std::string_view target) {
  if (target.find('?') == std::string_view::npos) return {200, holders_json(kv)};
  index::HolderId source = 0;
  std::uint32_t cursor = 0;
  if (!read_parameter(target, "source", source)) {
    return {400, "the query is not source=NUMBER&cursor=NUMBER; /index/dump lists the sources"};
  }
  if (target.find("cursor=") != std::string_view::npos &&
      !read_parameter(target, "cursor", cursor)) {
    return {400, "\"cursor\": not the number of an earlier answer"};
  }
  std::vector<std::uint64_t> hashes;
  const std::uint32_t next = kv.list(source, cursor, kDumpCells, hashes);
  std::string list;
  list.reserve(hashes.size() * 19);
  for (const std::uint64_t hash : hashes) {
    list += fmt::format("{}\"{:016x}\"", list.empty() ? "" : ",", hash);
  }
  return {200, fmt::format("{{\"source\":{},\"cursor\":{},\"keys\":[{}]}}\n", source,
                           next == 0 ? "null" : std::to_string(next), list)};
}

}  // namespace pegaflow::router
