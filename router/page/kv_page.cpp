#include "router/page/kv_page.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "router/http/json_text.h"

namespace pegaflow::router {

namespace {

using Type = MetricsPage::Type;

std::vector<const KvFleet::Entry*> by_url(const KvRouting& routing) {
  std::vector<const KvFleet::Entry*> entries;
  for (const auto& [id, entry] : routing.fleet().entries()) entries.push_back(&entry);
  std::sort(entries.begin(), entries.end(),
            [](const auto* a, const auto* b) { return a->url < b->url; });
  return entries;
}

/// By which way the router learns what the engine's prompts became.
std::string_view known_by(const KvRouting& routing, const KvFleet::Rank& rank) {
  if (rank.stream != 0) return "events";
  const KvPools::Pool* const pool = routing.pools().pool_of(rank.engine);
  if (pool == nullptr) return "none";
  return pool->has_reports && routing.pools().offers_chains(rank.engine) ? "chains" : "pool";
}

/// The endpoint of the rank's events, and its origin: the engine or an option.
std::string endpoint_json(const KvFleet::Rank& rank) {
  if (rank.stream == 0) return R"("endpoint":null,"endpoint_from":null)";
  return fmt::format(R"("endpoint":{},"endpoint_from":"{}")", json_quote(rank.address.endpoint),
                     rank.address.is_configured ? "--kv-events" : "engine");
}

std::string rank_json(const KvRouting& routing, const KvFleet::Entry& entry,
                      const KvFleet::Rank& rank, TimePoint now) {
  const index::Source::Stats& stats = rank.source.stats();
  return fmt::format(
      R"({{"url":{},"rank":{},"known_by":"{}","events":"{}","reason":{},"blocks":{},"block_size":{},)"
      R"("batches":{},"gaps":{},"restarts":{},"queue_s":{:.3f},"tokens_per_s":{:.0f},"hashes":{},{}}})",
      json_quote(entry.url), rank.number, known_by(routing, rank), events_state(rank),
      json_quote(events_reason(entry, rank)), routing.blocks_of(rank), rank.source.block_size(),
      stats.applied, stats.gaps, stats.restarts, routing.queue_seconds(rank, now),
      routing.tokens_per_second(rank), json_quote(routing.tokens().name_of(rank.hashes.mode)),
      endpoint_json(rank));
}

std::string pool_json(const KvRouting& routing, const KvPools::Node& node,
                      const KvPools::Pool& pool) {
  return fmt::format(
      R"({{"server":{},"namespace":{},"trusted":{},"reason":{},"blocks":{},"block_size":{},)"
      R"("lists":{},"changes":{},"chains":{}}})",
      json_quote(node.url), json_quote(pool.space), pool.is_trusted, json_quote(pool.reason),
      routing.blocks_of(pool), pool.block_tokens, pool.lists, pool.changes, pool.chains);
}

void by_pool(MetricsPage& page, const KvRouting& routing) {
  const auto each = [&](Type type, const char* name, const char* help, auto value) {
    page.begin(type, name, help);
    for (const auto& [url, node] : routing.pools().nodes()) {
      for (const auto& [space, pool] : node.pools) {
        page.sample(value(pool), {{"server", url}, {"namespace", space}});
      }
    }
  };
  each(Type::Gauge, "kv_pool_trusted", "Whether the router knows the blocks of the server's pool",
       [](const KvPools::Pool& pool) { return pool.is_trusted ? 1 : 0; });
  each(Type::Gauge, "kv_pool_blocks", "Blocks of the server's pool in the router's index",
       [&](const KvPools::Pool& pool) { return routing.blocks_of(pool); });
  each(Type::Counter, "kv_pool_changes_total", "Changes of the pool that the router has received",
       [](const KvPools::Pool& pool) { return pool.changes; });
  each(Type::Counter, "kv_pool_lists_total",
       "Times that the router has listed the pool, because it could not follow the changes",
       [](const KvPools::Pool& pool) { return pool.lists; });
  each(Type::Counter, "kv_pool_chains_total",
       "Prompts whose blocks were learned from what engines reported to the server",
       [](const KvPools::Pool& pool) { return pool.chains; });
}

void by_rank(MetricsPage& page, const KvRouting& routing, TimePoint now) {
  const auto each = [&](Type type, const char* name, const char* help, auto value) {
    page.begin(type, name, help);
    for (const KvFleet::Entry* const entry : by_url(routing)) {
      for (const auto& rank : entry->ranks) {
        page.sample(value(*rank), {{"engine", entry->url}, {"rank", std::to_string(rank->number)}});
      }
    }
  };
  each(Type::Gauge, "kv_blocks", "Blocks of the engine's GPU cache in the router's index",
       [&](const KvFleet::Rank& rank) { return routing.blocks_of(rank); });
  each(Type::Gauge, "kv_queue_seconds", "Predicted time until the engine begins a new prompt",
       [&](const KvFleet::Rank& rank) { return routing.queue_seconds(rank, now); });
  each(Type::Gauge, "kv_tokens_per_second", "Speed of the engine's prefill, as measured",
       [&](const KvFleet::Rank& rank) { return routing.tokens_per_second(rank); });
  each(Type::Counter, "kv_batches_total", "Batches of KV events applied",
       [](const KvFleet::Rank& rank) { return rank.source.stats().applied; });
  each(Type::Counter, "kv_gaps_total", "Gaps in the engine's KV events",
       [](const KvFleet::Rank& rank) { return rank.source.stats().gaps; });
  each(Type::Counter, "kv_lost_batches_total", "Batches of KV events that were never received",
       [](const KvFleet::Rank& rank) { return rank.source.stats().lost; });
  each(Type::Counter, "kv_forgotten_total",
       "Times that the router forgot the engine's blocks, since it could no longer rely on them",
       [](const KvFleet::Rank& rank) { return rank.source.stats().forgotten; });
  page.begin(Type::Gauge, "kv_source",
             "1 for the present state of the engine's KV events, by state");
  for (const KvFleet::Entry* const entry : by_url(routing)) {
    for (const auto& rank : entry->ranks) {
      page.sample(1, {{"engine", entry->url},
                      {"rank", std::to_string(rank->number)},
                      {"state", std::string(events_state(*rank))}});
    }
  }
}

void decisions(MetricsPage& page, const KvRouting& routing) {
  const KvRouting::Stats& stats = routing.stats();
  page.counters("kv_decisions_total", "Engines chosen, by the policy that chose", "policy",
                {{"kv-aware", static_cast<double>(stats.chosen)},
                 {"fallback", static_cast<double>(stats.fallbacks)}});
  page.counters("kv_pairs_total",
                "Prompts for whose prefill and decode engine one cost decided, by the decision",
                "prefill",
                {{"sent", static_cast<double>(stats.pairs)},
                 {"skipped", static_cast<double>(stats.skipped_prefills)}});
  page.counters("kv_texts_total", "Prompts, by whether their first blocks were known", "known",
                {{"yes", static_cast<double>(stats.known_texts)},
                 {"no", static_cast<double>(stats.unknown_texts)}});
  page.counters("kv_token_prompts_total",
                "Prompts of token ids, by whether their blocks were computed or are learned",
                "keys",
                {{"computed", static_cast<double>(routing.tokens().stats.hashed)},
                 {"learned", static_cast<double>(routing.tokens().stats.learned)}});
  page.counter("kv_full_reports_total",
               "Requests whose engine was asked to announce reused blocks, too",
               stats.full_reports);
  page.counter("kv_prompt_tokens_total", "Tokens of prompts whose engine reported cached tokens",
               stats.prompt_tokens);
  page.counter("kv_predicted_tokens_total", "Cached tokens that the router predicted for them",
               stats.predicted_tokens);
  page.counter("kv_cached_tokens_total", "Cached tokens that their engines reported",
               stats.reported_tokens);
  page.counters(
      "kv_reports_total", "Reports of cached tokens, by their distance to the prediction",
      "within_a_block",
      {{"yes", static_cast<double>(stats.close_reports)},
       {"evicted", static_cast<double>(stats.evicted_reports)},
       {"no", static_cast<double>(stats.reports - stats.close_reports - stats.evicted_reports)}});
}

void prefetches(MetricsPage& page, const KvRouting& routing) {
  const KvKeys* const keys = routing.keys();
  if (keys == nullptr) return;
  const PrefetchCounts& counts = routing.prefetch_counts();
  page.begin(Type::Counter, "prefetches_total",
             "Prefetches that would have paid, by what became of them at the server");
  for (std::size_t i = 0; i < kPrefetchStateCount; ++i) {
    const auto state = static_cast<PrefetchState>(i);
    page.sample(counts.by_state[i], {{"result", std::string(to_string(state))}});
  }
  page.counter("prefetches_cancelled_total",
               "Prefetches cancelled because the client left or another engine was tried",
               counts.cancelled);
  page.counter("prefetched_blocks_total",
               "Blocks in the prefetches that servers accepted, whether they found them or not",
               counts.blocks);
  page.gauge("kv_keys", "Full keys of blocks that the router has for prefetches", keys->size());
  page.gauge("kv_keys_bytes", "Memory of these keys", keys->bytes());
  page.counter("kv_keys_forgotten_total", "Full keys forgotten because of --prefetch-key-bytes",
               keys->forgotten());
}

void memory(MetricsPage& page, const KvRouting& routing) {
  const index::BlockIndex::Stats blocks = routing.block_stats();
  page.gauge("kv_index_blocks", "Blocks in the index", blocks.blocks);
  page.gauge("kv_index_bytes", "Memory of the index", blocks.block_bytes + blocks.set_bytes);
  page.counter("kv_index_evicted_total", "Blocks forgotten because of --index-blocks",
               blocks.evicted);
  const index::TextIndex::Stats texts = routing.text_stats();
  page.gauge("kv_text_bytes", "Memory of the texts whose blocks are known", texts.bytes);
  page.counter("kv_text_learned_total", "Prompts whose blocks were learned", texts.learned);
  page.counter("kv_text_evicted_total", "Texts forgotten because of --text-index-bytes",
               texts.evicted);
  page.gauge("kv_inflight", "Requests in the accounts of the policy",
             routing.placement_stats().inflight);
}

}  // namespace

std::string_view events_state(const KvFleet::Rank& rank) {
  return rank.stream == 0 ? std::string_view("no_events") : index::to_string(rank.source.trust());
}

std::string_view events_reason(const KvFleet::Entry& entry, const KvFleet::Rank& rank) {
  if (rank.stream != 0) return rank.source.reason();
  if (!entry.sources_error.empty()) return entry.sources_error;
  return entry.was_asked ? "the engine does not list this rank" : "not asked yet";
}

std::string kv_health(const KvRouting& routing, TimePoint now) {
  std::string ranks;
  for (const KvFleet::Entry* const entry : by_url(routing)) {
    for (const auto& rank : entry->ranks) {
      ranks += (ranks.empty() ? "\n  " : ",\n  ") + rank_json(routing, *entry, *rank, now);
    }
  }
  std::string pools;
  for (const auto& [url, node] : routing.pools().nodes()) {
    if (node.pools.empty()) {
      pools += fmt::format(R"({}{{"server":{},"namespace":null,"trusted":false,"reason":{}}})",
                           pools.empty() ? "\n  " : ",\n  ", json_quote(url),
                           json_quote(node.error.empty() ? "no engine is connected" : node.error));
    }
    for (const auto& [space, pool] : node.pools) {
      pools += (pools.empty() ? "\n  " : ",\n  ") + pool_json(routing, node, pool);
    }
  }
  const std::string others =
      routing.observer() == nullptr ? std::string() : routing.observer()->health(now);
  return fmt::format(R"({{"blocks":{},"texts":{},{}"sources":[{}],"pools":[{}]}})",
                     routing.block_stats().blocks, routing.text_stats().chains, others, ranks,
                     pools);
}

bool kv_is_good(const KvRouting& routing) {
  for (const auto& [id, entry] : routing.fleet().entries()) {
    for (const auto& rank : entry.ranks) {
      if (rank->stream != 0 && rank->source.trust() == index::Trust::kUntrusted) return false;
    }
  }
  return routing.observer() == nullptr || routing.observer()->is_good();
}

void kv_metrics(MetricsPage& page, const KvRouting& routing, TimePoint now) {
  decisions(page, routing);
  by_rank(page, routing, now);
  by_pool(page, routing);
  prefetches(page, routing);
  memory(page, routing);
  if (routing.observer() != nullptr) routing.observer()->metrics(page);
}

}  // namespace pegaflow::router
