#include "perf/replay/replay_nodes.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "base/job_id.h"
#include "engine/eviction/eviction.h"
#include "harness/sim_cluster.h"
#include "perf/lib/keys.h"

namespace pegaflow::perf {
namespace {

/// How far a hit rate may lie below that of one pool.
constexpr double kOnePoint = 0.01;

/// Nodes with one engine each that has no cache of its own.
class Replay {
 public:
  Replay(const NodesReplayOptions& options, kj::WaitScope& scope)
      : keys_(options.seed), cluster_(options_of(options), scope) {
    for (std::size_t i = 0; i < cluster_.size(); ++i) {
      engines_.push_back(cluster_.node(i)->add_engine({1, i + 1}));
    }
    cluster_.run_for(std::chrono::milliseconds(10));  // All links are greeted.
  }

  Result<void> serve(std::size_t at, const Prompt& prompt) {
    std::vector<BlockKey> keys;
    keys.reserve(prompt.size());
    for (const std::uint64_t block : prompt) keys.push_back(keys_.key(block));
    PEGA_TRY_LET(const std::size_t found, load(at, keys));
    PEGA_TRY(save(at, std::span(keys).subspan(found)));
    ++result_.requests;
    result_.asked += keys.size();
    result_.found += found;
    // Leases are returned before the next request.
    cluster_.run_for(std::chrono::milliseconds(1));
    return {};
  }

  Result<NodesReplayResult> end() {
    for (std::size_t i = 0; i < cluster_.size(); ++i) {
      harness::SimCluster::Node& node = *cluster_.node(i);
      const engine::BlockStore::Stats stats = node.service().stats().store;
      if (!node.service().store().is_idle() || node.source().stats().batches != 0) {
        return fail(Errc::kInternal, "node {} has work left at the end", i);
      }
      PEGA_TRY(node.service().store().check());
      result_.brought += stats.fetched;
      result_.evictions += stats.evictions;
      result_.evicted_replicas += stats.evicted_replicas;
      result_.replicas += stats.replicas;
    }
    return result_;
  }

 private:
  static harness::SimCluster::Options options_of(const NodesReplayOptions& options) {
    harness::SimCluster::Options made;
    made.nodes = options.nodes;
    made.blocks = options.blocks;
    made.seed = options.seed;
    made.service.store.eviction = options.eviction;
    return made;
  }

  Result<std::size_t> load(std::size_t at, std::span<const BlockKey> keys) {
    harness::SimCluster::Node& node = *cluster_.node(at);
    server::CacheService& service = node.service();
    const Id128& engine = engines_[at];
    const Id128 token{2, ++last_};
    PEGA_TRY_LET(
        server::CacheService::Found claimed,
        service.claim(engine, token,
                      keys.first(std::min(keys.size(), server::CacheService::kClaimSlice))));
    while (claimed.blocks != 0 && claimed.blocks % server::CacheService::kClaimSlice == 0 &&
           claimed.blocks < keys.size()) {
      const auto rest = keys.subspan(claimed.blocks);
      PEGA_TRY_LET(
          const server::CacheService::Found more,
          service.claim_more(engine, token,
                             rest.first(std::min(rest.size(), server::CacheService::kClaimSlice))));
      if (more.blocks == 0) break;
      claimed.blocks += more.blocks;
    }
    std::size_t total = claimed.blocks;
    KJ_IF_MAYBE (extending, node.fetches().extend(engine, token, keys, claimed.blocks)) {
      total += cluster_.wait(kj::mv(*extending)).blocks;
    }
    std::size_t next = 0;
    while (next < total) {
      const engine::PinId pin{++last_};
      PEGA_TRY_LET(const server::Fetches::Arrived arrived,
                   cluster_.wait(node.fetches().open(engine, token, next, total - next, pin,
                                                     {.patience = std::chrono::seconds(2)})));
      const server::CacheService::Opened& opened = arrived.opened;
      if (opened.slots.empty()) {
        return fail(Errc::kInternal, "a block in flight did not arrive");
      }
      for (std::size_t i = 0; i < opened.slots.size(); ++i) {
        if (!has_name(node.page(opened.slots[i]), keys[next + i])) {
          return fail(Errc::kCorrupt, "a page of node {} holds the bytes of another block", at);
        }
      }
      PEGA_TRY(service.release(engine, pin));
      next += opened.slots.size();
    }
    node.fetches().ended(token);
    PEGA_TRY(service.unclaim(engine, token));
    node.poke();
    return total;
  }

  Result<void> save(std::size_t at, std::span<const BlockKey> keys) {
    harness::SimCluster::Node& node = *cluster_.node(at);
    server::CacheService& service = node.service();
    const JobId job{.scheduler = engines_[at], .number = ++last_};
    std::size_t written = 0;
    for (std::size_t first = 0; first < keys.size(); first += server::CacheService::kSliceBlocks) {
      const auto slice =
          keys.subspan(first, std::min(server::CacheService::kSliceBlocks, keys.size() - first));
      PEGA_TRY_LET(
          const std::vector<std::uint32_t> slots,
          service.reserve(engines_[at], job, first, slice, first + slice.size() < keys.size()));
      for (std::size_t i = 0; i < slots.size(); ++i) {
        if (slots[i] == server::CacheService::kNoPage) continue;
        write_name(node.page(slots[i]), slice[i]);
        ++written;
      }
    }
    if (written != 0) {
      Result<std::size_t> left = std::size_t{1};
      while (left && *left != 0) left = service.publish(engines_[at], job);
      if (!left) return tl::unexpected<Error>(std::move(left.error()));
    }
    node.poke();
    result_.saved += written;
    return {};
  }

  /// At both ends, so that a torn page is detected too.
  static void write_name(std::span<std::byte> page, const BlockKey& key) {
    std::memcpy(page.data(), key.bytes.data(), key.bytes.size());
    std::memcpy(page.last(key.bytes.size()).data(), key.bytes.data(), key.bytes.size());
  }
  static bool has_name(std::span<const std::byte> page, const BlockKey& key) {
    return std::memcmp(page.data(), key.bytes.data(), key.bytes.size()) == 0 &&
           std::memcmp(page.last(key.bytes.size()).data(), key.bytes.data(), key.bytes.size()) == 0;
  }

  KeySource keys_;
  harness::SimCluster cluster_;
  std::vector<Id128> engines_;
  std::uint64_t last_ = 0;
  NodesReplayResult result_;
};

}  // namespace

double NodesReplayResult::hit_rate() const {
  return asked == 0 ? 0 : static_cast<double>(found) / static_cast<double>(asked);
}

Result<NodeChoice> node_choice(const std::string& name) {
  if (name == "round-robin") return NodeChoice::kRoundRobin;
  if (name == "random") return NodeChoice::kRandom;
  return fail(Errc::kInvalidArgument, "'{}' is neither round-robin nor random", name);
}

Result<NodesReplayResult> replay_over_nodes(const NodesReplayOptions& options,
                                            const RequestTrace& trace) {
  kj::EventLoop loop;
  kj::WaitScope scope(loop);
  Replay replay(options, scope);
  std::mt19937_64 random(options.seed);
  std::size_t turn = 0;
  for (const Prompt& prompt : trace.requests) {
    const std::uint64_t draw = options.choice == NodeChoice::kRandom ? random() : turn++;
    PEGA_TRY(replay.serve(draw % options.nodes, prompt));
  }
  return replay.end();
}

std::vector<Figure> nodes_figures(const NodesReplayOptions& options, const RequestTrace& trace,
                                  const NodesReplayResult& nodes, const NodesReplayResult& one) {
  const Params params = {
      {"trace", trace.name},
      {"nodes", static_cast<std::int64_t>(options.nodes)},
      {"blocks", static_cast<std::int64_t>(options.blocks)},
      {"eviction", std::string(to_string(options.eviction))},
      {"deal", options.choice == NodeChoice::kRandom ? "random" : "round-robin"}};
  const auto count = [&](const char* run, std::uint64_t blocks) {
    return Figure{.run = run,
                  .params = params,
                  .figure = static_cast<double>(blocks),
                  .unit = "blocks",
                  .n = nodes.requests,
                  .spread = "exact"};
  };
  return {{.run = "prefix hit rate of all nodes",
           .params = params,
           .figure = nodes.hit_rate(),
           .unit = "of the requested blocks",
           .bound = one.hit_rate() - kOnePoint,
           .bound_name = fmt::format("one pool of {} times the blocks, less one point: {:.4f}",
                                     options.nodes, one.hit_rate()),
           .side = Side::kAtLeast,
           .target = 1.0,
           .n = nodes.requests,
           .spread = "exact"},
          count("found at another node", nodes.brought),
          count("saved", nodes.saved),
          count("evictions", nodes.evictions),
          count("evictions of replicas", nodes.evicted_replicas),
          count("replicas at the end", nodes.replicas)};
}

}  // namespace pegaflow::perf
