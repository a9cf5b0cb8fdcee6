#include "router/kv/kv_pools.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "router/http/log.h"

namespace pegaflow::router {

namespace {

/// Blocks of one call of the index.
constexpr std::size_t kSlice = 2048;

}  // namespace

void KvPools::set_servers(const std::vector<EngineUrl>& servers) {
  std::map<std::string, Node> before = std::exchange(nodes_, {});
  for (const EngineUrl& url : servers) {
    const auto known = before.find(url.text);
    if (known != before.end()) {
      nodes_.insert(before.extract(known));
      continue;
    }
    Node node{.url = url.text, .host = url.host};
    const auto place = placement_.add_node();
    if (!place) {
      g_log.warn("a server is not used by the policy kv-aware server={} why=\"{}\"", url.text,
                 place.error().detail);
      continue;
    }
    node.place = *place;
    nodes_.emplace(url.text, std::move(node));
  }
  for (auto& [url, node] : before) {
    for (auto& [space, pool] : node.pools) remove_pool(pool);
    placement_.remove_node(node.place);
  }
  attach_engines();
}

void KvPools::set_links(const std::string& server, const LinksPage& page) {
  const auto found = nodes_.find(server);
  if (found == nodes_.end()) return;
  Node& node = found->second;
  node.id = page.node;
  node.has_disks = page.has_disks;
  node.error.clear();
  node.has_chains = page.has_chains;
  for (const LinksPage::Link& link : page.links) {
    for (const auto& [url, other] : nodes_) {
      if (other.id != link.node) continue;
      // A rate of 0 was not measured yet; the placement ignores it.
      placement_.set_link(
          other.place, node.place,
          {.latency_seconds = link.start_seconds, .bytes_per_second = link.bytes_per_second});
    }
  }
  std::set<std::string> spaces;
  std::set<std::string> reported;  // Spaces of which an engine reports the chains of prompts.
  for (const LinksPage::Attached& engine : page.engines) {
    if (engine.is_connected) spaces.insert(engine.space);
    if (engine.is_connected && engine.reports_chains) reported.insert(engine.space);
    if (engine.block_bytes != 0 && engine.block_tokens != 0) {
      placement_.set_bytes_per_token(static_cast<double>(engine.block_bytes) /
                                     static_cast<double>(engine.block_tokens));
    }
    if (node.pools.contains(engine.space)) continue;
    const auto holder = blocks_.add_node();
    if (!holder) {
      node.error = holder.error().detail;
      continue;
    }
    node.pools.emplace(engine.space, Pool{.space = engine.space, .holder = *holder});
  }
  // A pool without engines stays: they may come back, and others read from it.
  for (auto& [space, pool] : node.pools) {
    pool.has_engine = spaces.contains(space);
    pool.has_reports = reported.contains(space);
  }
  attach_engines();
}

void KvPools::lost(const std::string& server, const std::string& why) {
  const auto found = nodes_.find(server);
  if (found == nodes_.end()) return;
  found->second.error = why;
  for (auto& [space, pool] : found->second.pools) restart(pool, why);
}

KvPools::Node* KvPools::node_of(const std::string& engine_url, const std::string& engine_host) {
  const auto named = assigned_.find(engine_url);
  if (named != assigned_.end()) {
    const auto found = nodes_.find(named->second);
    return found == nodes_.end() ? nullptr : &found->second;
  }
  Node* only = nullptr;
  for (auto& [url, node] : nodes_) {
    if (node.host != engine_host) continue;
    if (only != nullptr) return nullptr;  // Several servers on one host.
    only = &node;
  }
  return only;
}

void KvPools::attach_engines() {
  pool_of_.clear();
  for (const auto& [engine, entry] : fleet_.entries()) {
    Node* const node = node_of(entry.url, entry.host);
    // With engines of several namespaces it is not known which one is the engine's.
    const Pool* only = nullptr;
    std::size_t used = 0;
    if (node != nullptr) {
      for (const auto& [space, pool] : node->pools) {
        if (pool.has_engine && ++used == 1) only = &pool;
      }
    }
    if (used != 1) {
      fleet_.attach(engine, std::nullopt, node == nullptr ? index::kNoNode : node->place);
      continue;
    }
    if (const auto dialect = fleet_.dialect_of(engine)) {
      name_blocks(node->pools.find(only->space)->second, *dialect);
    }
    pool_of_.emplace(engine, std::pair(node->url, only->space));
    fleet_.attach(engine, only->holder, node->place);
  }
}

void KvPools::name_blocks(Pool& pool, index::Dialect dialect) {
  const bool is_first = dialect == index::Dialect::kSglang;
  if (std::exchange(pool.has_first_bits, is_first) == is_first) return;
  restart(pool, "the pool is listed with the names of blocks that its engine's events have");
}

std::string KvPools::next_target(const std::string& server, const std::string& space) const {
  const Pool* const pool = find(server, space);
  if (pool == nullptr) return {};
  // Engines of SGLang name blocks by the first bits of a key: their full keys are not asked for.
  const std::string_view keys = pool->has_first_bits    ? "first8"
                                : full_keys_ != nullptr ? "32"
                                                        : "8";
  if (pool->cursor) {
    return fmt::format("/blocks?namespace={}&cursor={}&keys={}", space, *pool->cursor, keys);
  }
  std::string target = fmt::format("/journal?namespace={}&generation={}&position={}&keys={}", space,
                                   pool->generation, pool->position, keys);
  if (!offers_chains(server)) return target;
  target += "&chains=1";
  if (pool->chain_position) target += fmt::format("&chain_position={}", *pool->chain_position);
  return target;
}

bool KvPools::offers_chains(const std::string& server) const {
  const auto node = nodes_.find(server);
  return node != nodes_.end() && node->second.has_chains;
}

bool KvPools::offers_chains(std::uint64_t engine) const {
  const auto found = pool_of_.find(engine);
  return found != pool_of_.end() && offers_chains(found->second.first);
}

void KvPools::restart(Pool& pool, std::string reason) {
  blocks_.clear(pool.holder);
  pool.is_trusted = false;
  pool.reason = std::move(reason);
  pool.cursor = 0;
  pool.incarnation.clear();
}

void KvPools::apply(Pool& pool, const PoolPage& page) {
  // Runs of changes of the same kind keep their order.
  for (std::size_t at = 0; at < page.changes.size();) {
    const bool is_gone = page.changes[at].is_gone;
    keys_.clear();
    while (at < page.changes.size() && keys_.size() < kSlice &&
           page.changes[at].is_gone == is_gone) {
      keys_.push_back(index::key_of(0, page.changes[at++].hash));
    }
    if (is_gone) {
      blocks_.erase(pool.holder, keys_);
    } else {
      blocks_.store(pool.holder, keys_);
    }
  }
  pool.changes += page.changes.size();
  if (full_keys_ == nullptr) return;
  for (std::size_t i = 0; i < page.keys.size(); ++i) {
    if (!page.changes[i].is_gone) full_keys_->add(page.keys[i]);
  }
}

void KvPools::learn(Pool& pool, const PoolPage& page) {
  if (!page.chain_position) return;
  pool.chain_position = page.chain_position;
  for (const PoolPage::Chain& chain : page.chains) {
    // The index has blocks of one size.
    if (chain.block_tokens != page.block_tokens && page.block_tokens != 0) continue;
    std::vector<index::Key> keys;
    keys.reserve(chain.hashes.size());
    for (const std::uint64_t hash : chain.hashes) keys.push_back(index::key_of(0, hash));
    if (lessons_.reported(chain.session, std::move(keys))) ++pool.chains;
  }
}

void KvPools::answered(const std::string& server, const std::string& space, const PoolPage& page) {
  Pool* const pool = find(server, space);
  if (pool == nullptr) return;
  const bool is_other = !pool->incarnation.empty() && pool->incarnation != page.server;
  learn(*pool, page);
  // Another process counts anew.
  if (is_other) pool->chain_position.reset();
  if (is_other || (!page.is_list && (page.has_lost || page.generation != pool->generation))) {
    restart(*pool, is_other ? "the server has started again"
                            : "the journal lost changes, or the pool was reset");
    return;
  }
  if (page.is_list != pool->cursor.has_value()) return;  // An answer that is too late.
  if (page.is_list && *pool->cursor == 0) {
    ++pool->lists;
    // Changes that follow the first part are applied after the last one.
    pool->incarnation = page.server;
    pool->generation = page.generation;
    pool->position = page.position;
  } else if (page.is_list && page.generation != pool->generation) {
    restart(*pool, "the pool was reset while it was listed");
    return;
  }
  if (page.block_tokens != 0) pool->block_tokens = page.block_tokens;
  apply(*pool, page);
  if (!page.is_list) {
    pool->position = page.position;
    pool->is_trusted = true;
    pool->reason.clear();
  } else if (page.has_more) {
    pool->cursor = page.cursor;
  } else {
    // From here on it is as complete as the journal makes it.
    pool->cursor.reset();
    pool->is_trusted = true;
    pool->reason.clear();
  }
}

void KvPools::failed(const std::string& server, const std::string& space, const std::string& why) {
  Pool* const pool = find(server, space);
  if (pool == nullptr) return;
  if (pool->has_engine) return restart(*pool, why);
  // The namespace went with its last engine. Should one come back, its pool is listed anew.
  remove_pool(*pool);
  nodes_.find(server)->second.pools.erase(space);
}

KvPools::Pool* KvPools::find(const std::string& server, const std::string& space) {
  return const_cast<Pool*>(std::as_const(*this).find(server, space));
}

const KvPools::Pool* KvPools::find(const std::string& server, const std::string& space) const {
  const auto node = nodes_.find(server);
  if (node == nodes_.end()) return nullptr;
  const auto pool = node->second.pools.find(space);
  return pool == node->second.pools.end() ? nullptr : &pool->second;
}

const KvPools::Pool* KvPools::pool_of(std::uint64_t engine) const {
  const auto found = pool_of_.find(engine);
  return found == pool_of_.end() ? nullptr : find(found->second.first, found->second.second);
}

std::pair<std::string_view, std::string_view> KvPools::place_of(std::uint64_t engine) const {
  const auto found = pool_of_.find(engine);
  if (found == pool_of_.end()) return {};
  return {found->second.first, found->second.second};
}

bool KvPools::has_disks(const std::string& space) const {
  for (const auto& [url, node] : nodes_) {
    if (node.has_disks && node.error.empty() && node.pools.contains(space)) return true;
  }
  return false;
}

void KvPools::add_sources(const std::string& space, const index::Match& match,
                          std::vector<index::PullSource>& sources) const {
  for (const auto& [url, node] : nodes_) {
    const auto found = node.pools.find(space);
    if (found == node.pools.end() || !found->second.is_trusted) continue;
    const std::uint32_t blocks = match.pool(found->second.holder);
    if (blocks > 0) sources.push_back({.node = node.place, .blocks = blocks});
  }
}

std::string_view KvPools::id_of(index::NodeId place) const {
  for (const auto& [url, node] : nodes_) {
    if (node.place == place) return node.id;
  }
  return {};
}

}  // namespace pegaflow::router
