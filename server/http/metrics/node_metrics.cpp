#include "server/http/metrics/node_metrics.h"

#include <string>
#include <utility>
#include <vector>

#include "server/http/metrics/directory_metrics.h"

namespace pegaflow::server {
namespace {

using Type = MetricsPage::Type;

double number(std::uint64_t value) { return static_cast<double>(value); }

void links(MetricsPage& page, const NodesReport& nodes) {
  page.begin(Type::Gauge, "lane_info", "Lanes to other nodes that are open at this node");
  for (const std::string& lane : nodes.lanes) page.sample(1, {{"lane", lane}});
  const auto by_peer = [&](Type type, const char* name, const char* help, auto&& value) {
    page.begin(type, name, help);
    for (const NodesReport::Peer& peer : nodes.peers) {
      page.sample(value(peer.link), {{"peer", peer.address}});
    }
  };
  using Link = cluster::PeerStats;
  by_peer(Type::Gauge, "peer_ready", "1 while requests can be sent to the peer",
          [](const Link& link) { return link.state == cluster::PeerState::kReady ? 1 : 0; });
  by_peer(Type::Counter, "peer_greetings_total", "Times that the peer became ready",
          [](const Link& link) { return number(link.greetings); });
  by_peer(Type::Counter, "peer_losses_total", "Times that the peer was lost while it was ready",
          [](const Link& link) { return number(link.losses); });
  by_peer(Type::Counter, "peer_failures_total", "Failed attempts to connect to the peer",
          [](const Link& link) { return number(link.failures); });
  by_peer(Type::Counter, "peer_refusals_total",
          "Attempts to connect that failed because of another version, secret or lane",
          [](const Link& link) { return number(link.refusals); });
  by_peer(Type::Counter, "peer_late_total",
          "Requests to the peer without a response within their deadline",
          [](const Link& link) { return number(link.late); });
  page.begin(Type::Gauge, "peer_read_bytes_per_second",
             "Recent rate of reads from the peer; 0 while it is unknown");
  for (const NodesReport::Peer& peer : nodes.peers) {
    page.sample(peer.bytes_per_second, {{"peer", peer.address}});
  }
  page.begin(Type::Gauge, "peer_queued_bytes",
             "Bytes requested from the peer that have not arrived");
  for (const NodesReport::Peer& peer : nodes.peers) {
    page.sample(number(peer.queued_bytes), {{"peer", peer.address}});
  }
  by_peer(Type::Counter, "peer_withheld_total",
          "Requests that were not sent because responses of the peer were overdue",
          [](const Link& link) { return number(link.withheld); });
  page.begin(Type::Gauge, "peer_lane", "1 for the lane on which blocks are read from the peer");
  for (const NodesReport::Peer& peer : nodes.peers) {
    for (const std::string& lane : nodes.lanes) {
      page.sample(peer.link.lane == lane ? 1 : 0, {{"peer", peer.address}, {"lane", lane}});
    }
  }
  by_peer(Type::Counter, "peer_lane_failures_total", "Failed trials of RDMA to the peer",
          [](const Link& link) { return number(link.lane_failures); });
  by_peer(Type::Counter, "peer_lane_falls_total",
          "Times that RDMA to the peer broke and reads continued over sockets",
          [](const Link& link) { return number(link.lane_falls); });
}

/// Connections that other nodes make to this one.
void gate(MetricsPage& page, const NodesReport& nodes) {
  page.gauge("peer_connections", "Connections from other nodes", number(nodes.rpc.connections));
  page.counter("peer_entered_total",
               "Greetings in which another node proved that it has the secret",
               nodes.gate.greetings);
  page.counters("peer_refused_total", "Connections of other nodes that were refused", "reason",
                {{"version", number(nodes.gate.refused_version)},
                 {"secret", number(nodes.gate.refused_secret)},
                 {"limit", number(nodes.rpc.refused_limit)}});
  page.counters("peer_connections_closed_total", "Connections of other nodes that were closed",
                "reason",
                {{"no_hello", number(nodes.rpc.closed_no_hello)},
                 {"protocol", number(nodes.rpc.closed_protocol)}});
  page.counter("peer_connections_replaced_total",
               "Connections of other nodes that a newer greeting of the same link ended",
               nodes.gate.replaced);
}

void secrets(MetricsPage& page, const NodesReport::Secrets& secrets) {
  if (!secrets.has_file) return;
  page.gauge("peer_secrets", "Secrets of --peer-secret-file that are accepted, two in a rotation",
             number(secrets.accepted));
  page.gauge("peer_secret_file_valid",
             "0 while the changed --peer-secret-file cannot be used and the former secrets stay",
             secrets.is_file_good ? 1 : 0);
  page.counters("peer_secret_reloads_total", "Times that --peer-secret-file changed", "result",
                {{"used", number(secrets.changed)}, {"rejected", number(secrets.rejected)}});
}

void peers(MetricsPage& page, const NodesReport& nodes) {
  links(page, nodes);
  if (nodes.directory) directory_metrics(page, *nodes.directory);
  gate(page, nodes);
  secrets(page, nodes.secrets);
  page.counter("peer_locates_total", "Lookups by other nodes", nodes.gate.locates);
  page.counter("peer_awaits_total", "Waits of other nodes for saves of engines at this node",
               nodes.gate.awaits);
  page.gauge("peer_job_waits", "Calls that wait for saves of engines of other nodes",
             number(nodes.waits.waiting));
  page.counters("peer_job_waits_total",
                "Waits for saves of engines of other nodes, by how they ended", "result",
                {{"over", number(nodes.waits.over)},
                 {"gone", number(nodes.waits.gone)},
                 {"unknown", number(nodes.waits.unknown)},
                 {"timeout", number(nodes.waits.timed_out)},
                 {"busy", number(nodes.waits.busy)},
                 {"refused", number(nodes.waits.refused)}});
}

void pool_reads(MetricsPage& page, const FetchStats& fetches) {
  page.gauge("direct_pool_claims", "Claims with blocks that workers read from other nodes' pools",
             number(fetches.pool_claims));
  page.gauge("direct_pool_reads", "Reads of such blocks in flight", number(fetches.pool_reads));
  page.counters("direct_pool_blocks_total",
                "Blocks that workers read from other nodes' pools, past that of this node, by "
                "result; unconfirmed: their owner had not kept them in place; through_pool: a "
                "worker could not read them, and they were fetched into this node's pool",
                "result",
                {{"loaded", number(fetches.pool_blocks)},
                 {"unconfirmed", number(fetches.pool_unconfirmed)},
                 {"through_pool", number(fetches.pool_through_local)}});
  page.counter("direct_pool_bytes_total", "Bytes of the blocks loaded in this way",
               fetches.pool_bytes);
}

void peer_reads(MetricsPage& page, const Snapshot& now, const NodesReport& nodes) {
  const FetchStats& fetches = nodes.fetches;
  const cluster::PeerSourceStats& source = nodes.source;
  const engine::BlockStore::Stats& store = now.cache.store;
  page.counters("fetch_troubles_total",
                "Blocks whose read from another node or a disk did not go as planned", "reason",
                {{"retried", number(fetches.retried)},
                 {"lease_ended", number(source.outlived)},
                 {"unconfirmed", number(source.unconfirmed)},
                 {"corrupt", number(source.corrupt)},
                 {"unsettled", number(fetches.unquiesced)}});
  page.begin(Type::Counter, "fetch_lane_bytes_total",
             "Bytes of blocks read from other nodes, whole and in time, by lane");
  for (std::size_t lane = 0; lane < nodes.lanes.size(); ++lane) {
    page.sample(number(source.lane_bytes.at(lane)), {{"lane", nodes.lanes[lane]}});
  }
  page.counter("fetch_pending_blocks_total",
               "Blocks of other nodes that those first read from their disks", source.pending);
  page.counter("ssd_staged_blocks_total", "Blocks that were read from disks for other nodes",
               fetches.staged_blocks);
  page.gauge(
      "ssd_staging_bytes",
      "Bytes of the pool for blocks that are read from disks for other nodes and not lent yet",
      number(nodes.staging_bytes));
  page.gauge("fetch_batches", "Reads from other nodes in flight", number(source.batches));
  page.gauge("oldest_fetch_seconds", "Age of the oldest read from other nodes; 0 without one",
             std::chrono::duration<double>(source.oldest).count());
  page.begin(Type::Histogram, "fetch_duration_seconds",
             "Duration of reads from other nodes, one for each batch");
  page.histogram(source.duration, {});
  page.gauge("replica_blocks",
             "Sealed blocks that came from other nodes, or from disks for other nodes",
             store.replicas);
  page.counter("replica_evictions_total",
               "Evicted blocks that came from other nodes, or from disks for other nodes",
               store.evicted_replicas);
  page.gauge("leases", "Leases of other nodes", number(store.leases));
  page.gauge("lent_bytes", "Bytes of blocks lent to other nodes, counted once for each lease",
             number(store.lent_bytes));
  page.gauge("oldest_lease_seconds", "Age of the oldest lease; 0 without one",
             now.oldest_lease_seconds);
  page.counter("lent_bytes_total", "Bytes of blocks lent to other nodes", now.cache.lent_bytes);
  page.counters("leases_total", "Leases of other nodes", "result",
                {{"made", number(store.leases_made)},
                 {"ran_out", number(store.leases_expired)},
                 {"shortened", number(store.leases_shortened)}});
}

}  // namespace

void fetch_metrics(MetricsPage& page, const FetchStats& fetches,
                   const engine::BlockStore::Stats& store) {
  page.counter("fetch_lookups_total", "Lookups that were sent on to other nodes and disks",
               fetches.lookups);
  page.counters("fetch_claims_total",
                "Claims that were sent on to other nodes and disks, by result: blocks in flight or "
                "none",
                "result",
                {{"coming", number(fetches.claims_coming)},
                 {"none", number(fetches.claims - fetches.claims_coming)}});
  page.counters("fetch_blocks_total",
                "Blocks to be read from other nodes and disks, by result: whole from another node, "
                "restored from a disk, given up, or not read because no claim waited for them any "
                "longer",
                "result",
                {{"whole", number(fetches.blocks)},
                 {"restored", number(fetches.restored_blocks)},
                 {"given_up", number(fetches.given_up)},
                 {"unwanted", number(fetches.unwanted)}});
  page.counter("fetch_declined_blocks_total",
               "Blocks that were not read from another node or a disk because computing them is "
               "faster",
               fetches.declined);
  page.counter("fetch_bytes_total", "Bytes of blocks read from other nodes, whole and in time",
               fetches.bytes);
  page.counter("fetch_joined_blocks_total",
               "Requested blocks that were in flight for another request already",
               store.fetches_joined);
  page.counter("fetch_no_room_total",
               "Claims without room for all blocks that another node or a disk would deliver",
               store.fetches_no_room);
  page.gauge("fetch_bytes", "Bytes of slots that fetches hold", number(store.fetch_bytes));
  page.counters(
      "fetch_hints_total",
      "Searches at the nodes that a router named: their blocks were there, or not and all "
      "nodes were asked",
      "result",
      {{"found", number(fetches.hinted - fetches.wrong_hints)},
       {"wrong", number(fetches.wrong_hints)}});
}

void direct_metrics(MetricsPage& page, const DirectStats& direct) {
  page.gauge("direct_workers", "Workers whose memory others of their group may read",
             number(direct.sources));
  page.gauge("direct_gpu_workers", "Those of them whose memory is on a GPU",
             number(direct.gpu_sources));
  page.gauge("direct_network_workers", "Those of them whose memory engines of other nodes may read",
             number(direct.far_sources));
  page.gauge("direct_waits", "Calls of workers that wait for the next blocks of a prompt",
             number(direct.waits));
  page.gauge("direct_offered_blocks", "Blocks that may be read there while they are saved",
             number(direct.blocks));
  page.gauge("direct_reads", "Reads of such blocks in flight", number(direct.reads));
  page.counter("direct_reads_total", "Reads of such blocks that began", direct.begun);
  page.counter("direct_read_blocks_total", "Blocks of these reads", direct.read_blocks);
  page.counter(
      "direct_far_reads_total",
      "Reads by workers of this node out of the memory of workers of other nodes that began",
      direct.far_begun);
  page.counter("direct_far_read_blocks_total", "Blocks of these reads", direct.far_blocks);
}

void node_metrics(MetricsPage& page, const Snapshot& now) {
  const NodesReport& nodes = *now.nodes;
  peers(page, nodes);
  fetch_metrics(page, nodes.fetches, now.cache.store);
  peer_reads(page, now, nodes);
  pool_reads(page, nodes.fetches);
}

}  // namespace pegaflow::server
