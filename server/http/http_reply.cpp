#include "server/http/http_reply.h"

#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "server/http/metrics_page.h"
#include "server/http/router_pages.h"
#include "version.h"

namespace pegaflow::server {
namespace {

/// The NUMA nodes of the pool, with the bytes of their parts.
nlohmann::json to_json(const engine::PoolPlacement& placement) {
  nlohmann::json nodes = nlohmann::json::array();
  for (std::size_t i = 0; i < placement.numa_nodes.size(); ++i) {
    nlohmann::json node = {{"node", placement.numa_nodes[i].number}};
    if (i < placement.ranges.size()) {
      node["bytes"] = placement.ranges[i].end - placement.ranges[i].begin;
    }
    nodes.push_back(std::move(node));
  }
  nlohmann::json body = {{"policy", to_string(placement.policy)}, {"nodes", std::move(nodes)}};
  if (!placement.refused.empty()) body["refused"] = placement.refused;
  if (placement.in_place) body["in_place"] = *placement.in_place;
  return body;
}

/// A directory that is down does not make a node unhealthy: it asks the nodes with links.
nlohmann::json directory_json(const DirectoryReport& directory) {
  nlohmann::json servers = nlohmann::json::array();
  for (const auto& server : directory.stats.servers) {
    nlohmann::json row = {
        {"server", server.name},
        {"state", server.is_ready ? "ready" : server.state},
        {"round_trip_ms", std::chrono::duration<double, std::milli>(server.round_trip).count()}};
    if (!server.why.empty()) row["reason"] = server.why;
    if (!server.info.version.empty()) row["version"] = server.info.version;
    if (!server.info.policy.empty()) {
      row["maxmemory_policy"] = server.info.policy;
      row["maxmemory_bytes"] = server.info.max_bytes;
    }
    servers.push_back(std::move(row));
  }
  return {{"usable", directory.is_usable},
          {"nodes", directory.stats.nodes},
          {"links", directory.links.ready},
          {"servers", std::move(servers)}};
}

/// An unreachable peer does not make a node unhealthy: engines compute what it cannot fetch.
nlohmann::json nodes_json(const Health& health) {
  nlohmann::json peers = nlohmann::json::array();
  for (const Health::Peer& peer : health.peers) {
    nlohmann::json row = {{"peer", peer.address}, {"state", peer.state}};
    if (!peer.node.empty()) row["node"] = peer.node;
    if (!peer.why.empty()) row["reason"] = peer.why;
    if (!peer.lane.empty()) row["lane"] = peer.lane;
    if (!peer.lane_why.empty()) row["lane_reason"] = peer.lane_why;
    peers.push_back(std::move(row));
  }
  nlohmann::json nodes = {{"node", health.node},
                          {"lane", health.lane},
                          {"listen", health.peer_listen},
                          {"peers", std::move(peers)}};
  if (health.directory) nodes["directory"] = directory_json(*health.directory);
  if (!health.cards.empty()) nodes["cards"] = health.cards;
  if (!health.refused_cards.empty()) nodes["refused_cards"] = health.refused_cards;
  if (!health.ucx_library.empty()) {
    nodes["ucx"] = {{"version", health.ucx_version}, {"library", health.ucx_library}};
  }
  if (!health.why_not_rdma.empty()) nodes["no_rdma"] = health.why_not_rdma;
  return nodes;
}

/// A disk that failed does not make a node unhealthy: its blocks are misses.
nlohmann::json keeper_json(const KeptReport& kept) {
  nlohmann::json keeper = {{"state", kept.has_keeper ? "holding" : "missing"},
                           {"socket", kept.socket},
                           {"adopted_blocks", kept.adopted_blocks},
                           {"former_clients", kept.former_clients},
                           {"waits_for_nodes", kept.waits_for_nodes}};
  if (!kept.has_keeper) keeper["why"] = kept.why_not;
  return keeper;
}

nlohmann::json disks_json(const Health& health) {
  nlohmann::json disks = nlohmann::json::array();
  for (const SsdReport::OneDisk& disk : health.disks) {
    disks.push_back({{"path", disk.path},
                     {"state", disk.state},
                     {"io", disk.backend},
                     {"io_reason", disk.backend_reason},
                     {"segments", disk.segments},
                     {"scanned_segments", disk.scanned_segments},
                     {"direct", disk.direct},
                     {"capacity_bytes", disk.capacity_bytes},
                     {"slow", disk.is_slow},
                     {"index_bytes", disk.index_bytes},
                     {"index_limit_bytes", disk.index_limit_bytes}});
  }
  return disks;
}

/// Adds what one side of an engine reported about itself.
void add_engine(nlohmann::json& body, const std::optional<EngineInfo>& engine) {
  if (!engine) return;
  body["loads"] = engine->loads;
  body["saves"] = engine->saves;
}

nlohmann::json to_json(const std::vector<DeclinedInfo>& sides) {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& [decline, build] : sides) {
    nlohmann::json row = {{"side", pegaflow::to_string(decline.side)},
                          {"reason", pegaflow::to_string(decline.reason)},
                          {"detail", decline.detail},
                          {"build", build}};
    if (decline.side == wire::Side::WORKER) row["rank"] = decline.rank;
    list.push_back(std::move(row));
  }
  return list;
}

nlohmann::json to_json(const std::vector<engine::BlockKind>& kinds) {
  nlohmann::json list = nlohmann::json::array();
  for (const engine::BlockKind& kind : kinds) {
    nlohmann::json row = {{"kind", engine::to_string(kind.rule)},
                          {"block_tokens", kind.block_tokens}};
    if (kind.tokens != 0) row["tokens"] = kind.tokens;
    list.push_back(std::move(row));
  }
  return list;
}

nlohmann::json to_json(const InstanceInfo& info) {
  nlohmann::json factors = nlohmann::json::array();
  for (const engine::NamespaceFactor& factor : info.factors) {
    factors.push_back({{"name", factor.name}, {"value", factor.value}});
  }
  nlohmann::json ranks = nlohmann::json::array();
  for (const RankInfo& rank : info.ranks) {
    ranks.push_back({{"rank", rank.rank},
                     {"shard", rank.shard},
                     {"connected", rank.is_connected},
                     {"build", rank.build},
                     {"incarnation", to_string(rank.process)},
                     {"page_bytes", rank.page_bytes.front()},
                     {"block_count", rank.block_count},
                     {"numa_node", rank.numa_node}});
    if (rank.cells != 0) ranks.back()["cells"] = rank.cells;
    if (!info.kinds.kinds.empty()) ranks.back()["page_bytes_by_kind"] = rank.page_bytes;
    if (rank.direct) {
      ranks.back()["direct"] = {{"group", rank.direct->group}, {"lane", rank.direct->lane}};
      if (!rank.direct->network.empty()) ranks.back()["direct"]["network"] = rank.direct->network;
    }
    add_engine(ranks.back(), rank.engine);
    if (rank.engine) {
      ranks.back()["device"] = rank.engine->device;
      ranks.back()["kernels"] = pegaflow::to_string(rank.engine->kernels);
      ranks.back()["copy_path"] = pegaflow::to_string(rank.engine->copy_path);
    }
  }
  nlohmann::json body = {{"instance", info.id},
                         {"state", info.state},
                         {"connected", info.state == "connected"},
                         {"namespace", info.namespace_hash},
                         {"factors", std::move(factors)},
                         {"generation", info.generation},
                         {"rank_count", info.rank_count},
                         {"shard_count", info.shards},
                         {"ranks", std::move(ranks)},
                         {"schedulers", info.schedulers},
                         {"kv_events", info.has_kv_events},
                         {"chains", info.reports_chains},
                         {"not_served", to_json(info.not_served)}};
  if (!info.kinds.kinds.empty()) {
    body["kinds"] = to_json(info.kinds.kinds);
    body["unit_tokens"] = info.kinds.unit_tokens;
    body["alignment_tokens"] = info.kinds.alignment_tokens;
  }
  add_engine(body, info.scheduler);
  if (!info.ranks.empty()) {
    // Fields of the first rank, for readers from the time when an instance had one rank.
    const RankInfo& first = info.ranks.front();
    body["rank"] = first.rank;
    body["build"] = first.build;
    body["incarnation"] = to_string(first.process);
    body["page_bytes"] = first.page_bytes.front();
    body["block_count"] = first.block_count;
  }
  return body;
}

struct ToReply {
  const HttpCounters& http;

  Reply operator()(std::monostate /*none*/) const {
    return error_reply(503, "the server is not ready; see /health");
  }
  Reply operator()(Snapshot& snapshot) const {
    snapshot.http = http;
    return {.body = metrics_page(snapshot), .type = "text/plain; version=0.0.4; charset=utf-8"};
  }
  Reply operator()(const std::vector<InstanceInfo>& instances) const {
    nlohmann::json list = nlohmann::json::array();
    for (const auto& instance : instances) list.push_back(to_json(instance));
    return json_reply(200, {{"instances", std::move(list)}});
  }
  Reply operator()(const CleanupReport& report) const {
    const std::uint64_t bytes = report.evicted_bytes;
    return json_reply(200, {{"evicted_blocks", report.evicted_blocks},
                            {"evicted_bytes", bytes},
                            {"reclaimed_bytes", bytes},  // Slots are free at once: equal.
                            {"still_referenced_blocks", report.still_referenced_blocks}});
  }
  Reply operator()(const SsdCleanupReport& report) const {
    if (!report.has_disks) {
      return error_reply(409, "the server has no SSD tier: start it with --ssd-cache-path");
    }
    if (!report.is_durable) {
      return error_reply(500,
                         "the blocks are not found any longer, but a disk did not record it: after "
                         "a restart they may be found again; see the server's log");
    }
    return json_reply(200, {{"dropped_blocks", report.dropped_blocks}});
  }
  Reply operator()(const BlocksAnswer& answer) const {
    return {.body = blocks_body(answer), .type = "application/octet-stream"};
  }
  Reply operator()(const LinksAnswer& answer) const { return {.body = links_body(answer)}; }
  Reply operator()(const Accepted& /*none*/) const { return json_reply(202, {{"accepted", true}}); }
  Reply operator()(const RouterRefusal& refusal) const {
    return error_reply(refusal.status, refusal.why);
  }
  Reply operator()(const OverwriteReport& report) const {
    if (!report.found) return error_reply(404, "there is no such block");
    return json_reply(200, {{"slot", report.slot}, {"bytes", report.bytes}});
  }
};

}  // namespace

const char* reason(unsigned status) {
  switch (status) {
    case 200:
      return "OK";
    case 202:
      return "Accepted";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 413:
      return "Content Too Large";
    default:
      return "Service Unavailable";
  }
}

Reply json_reply(unsigned status, const nlohmann::json& body) {
  // Ids come from clients: invalid UTF-8 is replaced, and throws no exception.
  return {.status = status,
          .body = body.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"};
}

Reply error_reply(unsigned status, const std::string& text) {
  return json_reply(status, {{"error", text}});
}

Reply health_reply(const Health& health) {
  nlohmann::json body = {
      {"status", health.status}, {"version", kVersion}, {"pool_bytes", health.pool_bytes}};
  if (health.is_ok) {
    body["numa"] = to_json(health.placement);
    if (!health.lane.empty()) body["nodes"] = nodes_json(health);
    if (!health.disks.empty()) body["ssd"] = disks_json(health);
    if (health.kept) body["keeper"] = keeper_json(*health.kept);
  } else {
    body["done_bytes"] = health.done_bytes;
  }
  return json_reply(health.is_ok ? 200 : 503, body);
}

Reply reply_of(AdminAnswer&& answer, const HttpCounters& http) {
  return std::visit(ToReply{http}, answer);
}

}  // namespace pegaflow::server
