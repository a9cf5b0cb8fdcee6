#include "router/kv/route_log.h"

#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "router/http/json_text.h"

namespace pegaflow::router {

namespace {

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

std::string candidate_json(const RouteLog::Candidate& each) {
  const index::Terms& terms = each.terms;
  return fmt::format(
      R"({{"engine":{},"rank":{},"trust":{},"chosen":{},"gpu_blocks":{},"local_blocks":{},)"
      R"("reach_blocks":{},"uncached_tokens":{},"pull_bytes":{},"queue_s":{:.6f},)"
      R"("fetch_s":{:.6f},"prefill_s":{:.6f},"delay_s":{:.6f},"decode_s":{:.6f},"space_s":{:.6f},)"
      R"("room_s":{:.6f},"cost_s":{:.6f}}})",
      json_quote(each.engine), each.rank, json_quote(each.trust), each.is_chosen, terms.gpu_blocks,
      terms.local_blocks, terms.reach_blocks, terms.uncached_tokens, terms.pull_bytes, terms.queue,
      terms.fetch, terms.prefill, terms.delay, terms.decode, terms.space, terms.room, terms.cost);
}

template <typename T>
std::string or_null(const std::optional<T>& value) {
  return value ? fmt::format("{}", *value) : "null";
}

std::string prefetch_json(const RouteLog::Entry& entry) {
  if (!entry.prefetch) return "null";
  return fmt::format(R"({{"state":"{}","blocks":{},"cancelled":{}}})", to_string(*entry.prefetch),
                     entry.prefetch_blocks, entry.is_prefetch_cancelled);
}

std::string pair_json(const std::optional<KvPair>& pair) {
  if (!pair) return "null";
  return fmt::format(
      R"({{"skips_prefill":{},"transfer_s":{:.6f},"cost_s":{:.6f},"alone_cost_s":{:.6f}}})",
      pair->skips_prefill, pair->transfer, pair->cost, pair->alone_cost);
}

std::string entry_json(const RouteLog::Entry& entry, TimePoint now) {
  std::string out = fmt::format(
      R"({{"number":{},"age_s":{:.3f},"model":{},"role":{},"policy":{},"prompt_tokens":{},)"
      R"("known_blocks":{},"block_tokens":{},"band_s":{:.6f},"near_equals":{},)"
      R"("candidates":{},"terms":[)",
      entry.number, seconds(now - entry.time), json_quote(entry.model), json_quote(entry.role),
      json_quote(entry.policy), entry.prompt_tokens, entry.known_blocks, entry.block_tokens,
      entry.band, entry.near_equals, entry.candidates);
  for (std::size_t i = 0; i < entry.terms.size(); ++i) {
    if (i > 0) out += ',';
    out += candidate_json(entry.terms[i]);
  }
  std::string first = "null";
  if (entry.first_token) first = fmt::format("{:.6f}", seconds(*entry.first_token));
  out += fmt::format(
      R"(],"predicted_cached_tokens":{},"prefetch":{},"pair":{},"outcome":{{"first_token_s":{},"prompt_tokens":{},)"
      R"("cached_tokens":{},"ended":{}}}}})",
      entry.predicted_cached, prefetch_json(entry), pair_json(entry.pair), first,
      or_null(entry.reported_prompt), or_null(entry.reported_cached), entry.has_ended);
  return out;
}

}  // namespace

std::uint64_t RouteLog::add(Entry entry) {
  entry.number = next_++;
  entries_.push_back(std::move(entry));
  if (entries_.size() > kEntries) entries_.pop_front();
  return entries_.back().number;
}

RouteLog::Entry* RouteLog::find(std::uint64_t number) {
  if (entries_.empty() || number < entries_.front().number || number > entries_.back().number) {
    return nullptr;
  }
  return &entries_[static_cast<std::size_t>(number - entries_.front().number)];
}

std::string RouteLog::json(TimePoint now) const {
  std::string out = R"({"routes":[)";
  for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
    if (entry != entries_.rbegin()) out += ',';
    out += entry_json(*entry, now);
  }
  out += "]}\n";
  return out;
}

}  // namespace pegaflow::router
