#include "server/http/metrics_page.h"

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/program/metrics_page.h"
#include "server/http/metrics/node_metrics.h"
#include "version.h"

namespace pegaflow::server {
namespace {

using Type = MetricsPage::Type;

double number(std::uint64_t value) { return static_cast<double>(value); }

/// One sample for each block size.
void by_size(MetricsPage& page, const char* name, const char* help,
             const std::map<std::uint64_t, double>& samples) {
  page.begin(Type::Gauge, name, help);
  for (const auto& [bytes, value] : samples) {
    page.sample(value, {{"block_bytes", std::to_string(bytes)}});
  }
}

void pool(MetricsPage& page, const Snapshot& now) {
  const engine::BlockStore::Stats& store = now.cache.store;
  page.gauge("pool_capacity_bytes", "Size of the pool", number(now.pool_bytes));
  page.gauge("pool_used_bytes", "Bytes of slots that are not free", number(store.used_bytes));
  page.gauge("pool_page_bytes", "Size of the memory pages that back the pool",
             number(now.pool_page_bytes));
  page.gauge("pool_huge_bytes",
             "Bytes of the pool on huge pages, reserved ones and those that the kernel found",
             number(now.pool_huge_bytes));
  page.gauges("pool_slots", "Slots by state; a slot has the pages of a block on all its ranks",
              "state",
              {{"reserved", store.reserved},
               {"sealed", store.sealed},
               {"coming", store.in_flight},
               {"quarantined", store.quarantined_timeout + store.quarantined_writer_lost +
                                   store.quarantined_fetch}});
  page.gauges(
      "pool_units", "Units of the pool, which are dealt out to blocks of different sizes", "state",
      {{"free", number(store.free_units)}, {"used", number(store.units - store.free_units)}});
  std::map<std::uint64_t, double> extents;
  std::map<std::uint64_t, double> used;
  for (const engine::BlockStore::ShapeStats& shape : now.cache.shapes) {
    extents[shape.frame_bytes] += shape.extents;
    used[shape.frame_bytes] += shape.used;
  }
  by_size(page, "pool_extents", "Extents of the pool, by the bytes of the blocks in them", extents);
  by_size(page, "pool_blocks", "Blocks in the pool, by their bytes", used);
  page.counter("pool_extents_taken_total",
               "Extents taken from blocks of one size for blocks of another", store.extents_taken);
  page.counter("pool_alloc_failures_total", "Blocks not saved because no slot could be freed",
               store.skipped_no_room);
  page.gauge("inflight_bytes", "Bytes of slots that are being written",
             number(store.written_bytes - store.quarantined_bytes));
  page.gauges("quarantine_slots", "Slots that a lost client, reader or device may still access",
              "reason",
              {{"timeout", store.quarantined_timeout},
               {"writer_lost", store.quarantined_writer_lost},
               {"fetch", store.quarantined_fetch},
               {"reader_lost", store.pinned_by_lost_readers}});
}

void cache_contents(MetricsPage& page, const CacheStats& cache) {
  const engine::BlockStore::Stats& store = cache.store;
  page.gauge("cache_resident_bytes", "Bytes of slots with sealed blocks",
             number(store.sealed_bytes));
  page.gauge("cache_resident_blocks", "Sealed blocks", store.sealed);
  page.counter("cache_lookups_total", "Lookups", store.lookups);
  page.counter("cache_block_hits_total", "Blocks found by lookups", store.lookup_hits);
  page.counter("cache_block_misses_total", "Requested blocks beyond those that were found",
               store.lookup_misses);
  page.counter("cache_block_insertions_total", "Blocks sealed", store.insertions);
  page.counter("cache_block_evictions_total", "Blocks evicted to make room", store.evictions);
  page.begin(Type::Gauge, "eviction_info", "The eviction policy");
  page.sample(1, {{"policy", std::string(to_string(store.eviction))}});
  page.counters("cache_blocks_dropped_total", "Blocks dropped for a reason other than to make room",
                "reason",
                {{"cleanup", number(store.cleaned)},
                 {"reset", number(store.retired)},
                 {"corrupt", number(store.invalidated)}});
}

void resets(MetricsPage& page, const CacheStats& cache) {
  page.gauge("epochs",
             "Namespaces with an epoch of their own, since they were reset in this cluster",
             number(cache.epochs));
  page.counters(
      "namespace_resets_total",
      "Resets of a namespace, by the node that an engine requested them from: this one or a peer",
      "origin", {{"here", number(cache.resets_here)}, {"peer", number(cache.resets_learned)}});
  page.counter("reset_unconfirmed_nodes_total",
               "Peers that did not confirm a reset of this node before its deadline",
               cache.resets_unconfirmed);
}

void saves_and_loads(MetricsPage& page, const CacheStats& cache) {
  const engine::BlockStore::Stats& store = cache.store;
  page.counter("corrupt_pages_total",
               "Pages with other bytes than were saved, found by engines with pegaflow.verify",
               cache.corrupt_pages);
  page.counter("save_bytes_total", "Bytes of pages sealed", cache.save_bytes);
  page.counter("load_bytes_total", "Bytes of pages opened for a load", cache.load_bytes);
  page.counters("load_blocks_total",
                "Blocks opened for a load, by the process that had written them", "written_by",
                {{"this_process", number(cache.load_blocks_own)},
                 {"another_process", number(cache.load_blocks_other)}});
  page.counters("save_skipped_blocks_total", "Blocks for which a save received no slot", "reason",
                {{"present", number(store.skipped_present)},
                 {"no_room", number(store.skipped_no_room)},
                 {"refused", number(store.skipped_refused)}});
}

/// The parts of sums above, under names of their own: a label on those would change the series that
/// dashboards know.
void kinds(MetricsPage& page, const CacheStats& cache) {
  const auto by_kind = [&](const char* name, const char* help, auto&& value) {
    page.begin(Type::Counter, name, help);
    for (std::size_t rule = 0; rule < cache.kinds.size(); ++rule) {
      page.sample(value(cache.kinds[rule]),
                  {{"kind", std::string(to_string(static_cast<engine::KindRule>(rule)))}});
    }
  };
  by_kind("kind_saved_blocks_total",
          "Blocks sealed by saves, by their kind: full attention, a sliding window, a chunk of "
          "attention or a recurrent state",
          [](const KindStats& kind) { return number(kind.saved_blocks); });
  by_kind("kind_saved_bytes_total", "Bytes of pages sealed by saves, by the kind of their blocks",
          [](const KindStats& kind) { return number(kind.saved_bytes); });
  by_kind("kind_loaded_blocks_total", "Blocks opened for a load by any rank, by their kind",
          [](const KindStats& kind) { return number(kind.loaded_blocks); });
  by_kind("kind_loaded_bytes_total",
          "Bytes of pages opened for a load, by the kind of their blocks",
          [](const KindStats& kind) { return number(kind.loaded_bytes); });
  by_kind("kind_shortened_lookups_total",
          "Lookups that found a shorter prefix than that of full attention, by the first kind of "
          "which a needed block was missing",
          [](const KindStats& kind) { return number(kind.shortened_lookups); });
  by_kind("kind_shortened_tokens_total",
          "Tokens that full attention could have restored in these lookups, by the same kind",
          [](const KindStats& kind) { return number(kind.shortened_tokens); });
}

void held_blocks(MetricsPage& page, const Snapshot& now) {
  const engine::BlockStore::Stats& store = now.cache.store;
  page.gauge("claims", "Claims of schedulers", number(store.claims));
  page.gauge("pins", "Pins of workers", number(store.pins));
  page.gauge("held_blocks", "Distinct blocks that are claimed or pinned", store.held);
  page.gauge("oldest_pin_seconds", "Age of the oldest pin; 0 without one", now.oldest_pin_seconds);
  page.gauge("reservations", "Saves in flight", number(store.reservations));
  page.counter("claims_revoked_total", "Claims revoked to make room, or by a reset",
               store.claims_revoked);
  page.counter("claims_shortened_total", "Claims shortened by a share's limit",
               store.claims_shortened);
  page.counter("reservations_timed_out_total",
               "Saves dropped because they exceeded --reservation-timeout",
               store.reservations_timed_out);
  page.counter("late_publishes_total", "Saves published after they were dropped",
               store.late_publishes);
}

void job_waits(MetricsPage& page, const JobWaitStats& waits) {
  page.gauge("job_waits", "Calls that wait for another engine's saves", number(waits.waiting));
  page.counters("job_waits_total", "Waits for another engine's saves, by how they ended", "result",
                {{"over", number(waits.over)},
                 {"gone", number(waits.gone)},
                 {"timeout", number(waits.timed_out)},
                 {"busy", number(waits.busy)},
                 {"cancelled", number(waits.cancelled)}});
}

void cache(MetricsPage& page, const Snapshot& now) {
  cache_contents(page, now.cache);
  resets(page, now.cache);
  saves_and_loads(page, now.cache);
  kinds(page, now.cache);
  held_blocks(page, now);
  job_waits(page, now.cache.waits);
  page.gauge("memory_bytes", "Memory of the index and its tables, beside the pool",
             number(now.cache.memory_bytes));
}

void misses(MetricsPage& page, const Snapshot& now) {
  page.begin(Type::Counter, "cache_miss_blocks_total",
             "Requested blocks that were not found, by reason; see docs/operations.md");
  const auto reason = [&](std::string_view name, std::uint64_t value) {
    page.sample(value, {{"reason", std::string(name)}});
  };
  for (std::size_t i = 0; i < engine::kMissCount; ++i) {
    reason(to_string(static_cast<engine::Miss>(i)), now.cache.store.misses[i]);
  }
  reason("not_served", now.cache.lookup_blocks_not_served);
}

void ages(MetricsPage& page, const Snapshot& now) {
  const engine::BlockStore::Stats& store = now.cache.store;
  page.begin(Type::Histogram, "cache_residence_seconds",
             "Time that removed blocks had been in the pool, by the reason of their removal");
  page.histogram(store.evicted_age, {{"reason", "evicted"}});
  page.histogram(store.dropped_age, {{"reason", "dropped"}});
  page.histogram("cache_evicted_idle_seconds",
                 "Time since the last use of blocks at their eviction", store.evicted_idle);
  page.gauge("cache_next_victim_idle_seconds",
             "Time since the last use of the next block to be evicted; 0 without one",
             now.cache.next_victim_idle_s.value_or(0));
}

/// "5m", "1h", "1d", "90s": the largest unit of which it is a multiple.
std::string window_label(std::chrono::seconds length) {
  for (const auto& [unit, letter] : {std::pair{86400, 'd'}, {3600, 'h'}, {60, 'm'}}) {
    if (length.count() % unit == 0) return fmt::format("{}{}", length.count() / unit, letter);
  }
  return fmt::format("{}s", length.count());
}

void demand(MetricsPage& page, const std::vector<engine::Demand::Window>& windows) {
  const auto gauges = [&](const char* name, const char* help, auto&& value) {
    page.begin(Type::Gauge, name, help);
    for (const engine::Demand::Window& window : windows) {
      page.sample(value(window), {{"window", window_label(window.length)}});
    }
  };
  using Window = engine::Demand::Window;
  gauges("hll_total_requests", "Blocks requested by lookups in the window",
         [](const Window& window) { return number(window.requested); });
  gauges("hll_cardinality", "Estimated number of different blocks requested or saved in the window",
         [](const Window& window) { return window.distinct; });
  gauges("hll_estimated_hit_rate",
         "Estimated ceiling of the window's hit rate: that of a pool that evicts nothing",
         [](const Window& window) { return window.ceiling(); });
  gauges("window_hit_rate", "Hit rate of the window: blocks found divided by blocks requested",
         [](const Window& window) { return window.hit_rate(); });
  gauges("window_working_set_bytes",
         "Estimated size of a pool that would have evicted nothing in the window",
         [](const Window& window) { return window.bytes; });
}

void clients(MetricsPage& page, const Snapshot& now) {
  const RpcCounters& rpc = now.rpc;
  page.gauge("connections", "Connections to the socket", number(rpc.connections));
  page.gauge("clients", "Connections that have sent their hello", number(now.cache.clients));
  page.gauge("parted_connections", "Ended connections whose process may still access slots",
             number(now.cache.detached));
  page.gauge("instances", "Known engine cores", number(now.cache.instances));
  page.gauge("instances_waiting",
             "Engine cores that run without the cache until all their ranks are connected",
             number(now.cache.instances_waiting));
  page.begin(Type::Gauge, "instances_not_served",
             "Engine cores that are configured to use the cache and do not, by reason");
  for (std::size_t i = 0; i < kDeclineReasons; ++i) {
    page.sample(number(now.cache.instances_declined[i]),
                {{"reason", std::string(kDeclineReasonNames[i])}});
  }
  page.sample(number(now.cache.instances_refused), {{"reason", "refused"}});
  page.gauge("namespaces", "Known namespaces", number(now.cache.namespaces));
  page.counter("connections_accepted_total", "Connections accepted", rpc.accepted);
  page.counters("connections_refused_total", "Connections closed at once", "reason",
                {{"limit", number(rpc.refused_limit)}, {"user", number(rpc.refused_peer)}});
  page.counters(
      "connections_closed_total", "Connections that the server closed", "reason",
      {{"no_hello", number(rpc.closed_no_hello)}, {"protocol", number(rpc.closed_protocol)}});
  page.gauge("http_connections", "Connections of HTTP clients, over TCP and the Unix socket",
             number(now.http.open));
  page.counters("http_connections_closed_total",
                "Connections of HTTP clients that the server closed: the client did not read a "
                "response within 10 s, made room for a newer connection when all places were "
                "taken, or is a user whom the Unix socket does not serve",
                "reason",
                {{"unread", number(now.http.unread)},
                 {"displaced", number(now.http.displaced)},
                 {"user", number(now.http.refused_user)}});
  page.counters("registrations_refused_total", "Engines that serve without the cache", "reason",
                {{"page_size", number(now.cache.refused_page_size)}});
}

void calls(MetricsPage& page, const RpcCounters& rpc) {
  page.begin(Type::Counter, "rpc_requests_total", "Calls answered, by outcome");
  const auto request = [&](Method method, std::string_view status, std::uint64_t value) {
    if (value == 0) return;
    page.sample(value,
                {{"method", std::string(to_string(method))}, {"status", std::string(status)}});
  };
  for (std::size_t i = 0; i < kMethodCount; ++i) {
    const RpcCounters::PerMethod& counters = rpc.methods[i];
    request(static_cast<Method>(i), "ok", counters.ok);
    for (std::size_t code = 0; code < kErrcCount; ++code) {
      request(static_cast<Method>(i), to_string(static_cast<Errc>(code)), counters.failed[code]);
    }
  }
  page.begin(Type::Histogram, "rpc_duration_seconds", "Time from a call's arrival to its answer");
  for (std::size_t i = 0; i < kMethodCount; ++i) {
    page.histogram(rpc.methods[i].duration,
                   {{"method", std::string(to_string(static_cast<Method>(i)))}});
  }
  page.histogram("rpc_turn_seconds", "Duration of event-loop iterations of the RPC thread",
                 rpc.turns);
  page.gauge("rpc_turn_longest_seconds",
             "Longest event-loop iteration of the RPC thread since the start",
             rpc.turns.longest_seconds);
  page.histogram("rpc_turn_cpu_seconds",
                 "Processor time of event-loop iterations of the RPC thread", rpc.turns_cpu);
  page.gauge("rpc_turn_cpu_longest_seconds",
             "Most processor time of an event-loop iteration since the start",
             rpc.turns_cpu.longest_seconds);
}

void routers(MetricsPage& page, const Snapshot& now) {
  const PrefetchStats& prefetches = now.prefetches;
  page.gauge("journal_readers", "Requests of routers that wait for a change of the pool",
             now.journal_readers);
  const PromptChains::Stats& chains = now.chains;
  page.gauge("prompt_chains", "Prompts whose blocks are kept for routers", number(chains.chains));
  page.gauge("prompt_chain_bytes", "Memory of them", number(chains.bytes));
  page.counters("prompt_chains_total", "Prompts whose blocks engines have reported", "result",
                {{"kept", number(chains.kept)}, {"unwanted", number(chains.unwanted)}});
  page.counter("router_requests_refused_total",
               "Requests for pages of routers that had no valid token", now.http.refused_routers);
  page.gauge("prefetches", "Prefetches of routers that are running", prefetches.running);
  page.gauge("prefetch_bytes", "Bytes of the pool that running prefetches may fill",
             number(prefetches.bytes));
  page.counters("prefetches_total", "Prefetches that ended", "result",
                {{"finished", number(prefetches.finished)},
                 {"cancelled", number(prefetches.cancelled)},
                 {"ended", number(prefetches.ended)},
                 {"rejected", number(prefetches.rejected)}});
  page.counter("prefetched_blocks_total", "Blocks of prefetches that finished", prefetches.blocks);
}

/// One sample for each disk.
void by_disk(MetricsPage& page, Type type, const char* name, const char* help, const SsdReport& ssd,
             const std::function<double(const SsdReport::OneDisk&)>& value) {
  page.begin(type, name, help);
  for (const SsdReport::OneDisk& disk : ssd.disks) page.sample(value(disk), {{"disk", disk.path}});
}

void disk_states(MetricsPage& page, const SsdReport& ssd) {
  using OneDisk = SsdReport::OneDisk;
  page.begin(Type::Gauge, "ssd_disk_state", "1 for the present state of each disk of the SSD tier");
  for (const OneDisk& disk : ssd.disks) {
    page.sample(1, {{"disk", disk.path}, {"state", disk.state}});
  }
  by_disk(page, Type::Gauge, "ssd_capacity_bytes", "Bytes of all segments of a disk", ssd,
          [](const OneDisk& disk) { return number(disk.capacity_bytes); });
  by_disk(page, Type::Gauge, "ssd_blocks", "Blocks that can be found on a disk", ssd,
          [](const OneDisk& disk) { return number(disk.blocks); });
  by_disk(page, Type::Gauge, "ssd_index_bytes", "Memory of the index of a disk", ssd,
          [](const OneDisk& disk) { return number(disk.index_bytes); });
  by_disk(page, Type::Gauge, "ssd_segments", "Segments of a disk", ssd,
          [](const OneDisk& disk) { return number(disk.segments); });
  by_disk(page, Type::Gauge, "ssd_free_segments", "Segments of a disk that were never filled", ssd,
          [](const OneDisk& disk) { return number(disk.free_segments); });
  by_disk(page, Type::Gauge, "ssd_bytes_in_flight", "Bytes that a disk reads and writes now", ssd,
          [](const OneDisk& disk) { return number(disk.bytes_in_flight); });
  by_disk(page, Type::Gauge, "ssd_breaker_open",
          "1 while a disk is not read because its reads failed", ssd,
          [](const OneDisk& disk) { return disk.is_breaker_open ? 1.0 : 0.0; });
  by_disk(page, Type::Gauge, "ssd_slow",
          "1 while a disk is not read because its reads take far longer than usual", ssd,
          [](const OneDisk& disk) { return disk.is_slow ? 1.0 : 0.0; });
  by_disk(page, Type::Gauge, "ssd_scan_seconds",
          "Time in which the blocks of an earlier process were found again; 0 until then", ssd,
          [](const OneDisk& disk) { return disk.scan_seconds; });
  by_disk(page, Type::Gauge, "ssd_scan_segments", "Segments that were scanned since the start", ssd,
          [](const OneDisk& disk) { return number(disk.scanned_segments); });
}

void disk_traffic(MetricsPage& page, const SsdReport& ssd) {
  using OneDisk = SsdReport::OneDisk;
  by_disk(page, Type::Counter, "ssd_read_bytes_total", "Bytes of blocks read from a disk", ssd,
          [](const OneDisk& disk) { return number(disk.read_bytes); });
  by_disk(page, Type::Counter, "ssd_hits_blocks_total", "Blocks read from a disk", ssd,
          [](const OneDisk& disk) { return number(disk.read_blocks); });
  by_disk(page, Type::Counter, "ssd_read_seconds_total",
          "Sum of the times of all reads of blocks, waiting included", ssd,
          [](const OneDisk& disk) { return disk.read_seconds; });
  by_disk(page, Type::Counter, "ssd_write_bytes_total",
          "Bytes written to a disk, of blocks and tables", ssd,
          [](const OneDisk& disk) { return number(disk.written_bytes + disk.table_bytes); });
  by_disk(page, Type::Counter, "ssd_written_blocks_total", "Blocks written to a disk", ssd,
          [](const OneDisk& disk) { return number(disk.written_blocks); });
  by_disk(page, Type::Counter, "ssd_reclaimed_blocks_total",
          "Blocks lost because their segment was used again", ssd,
          [](const OneDisk& disk) { return number(disk.reclaimed_blocks); });
  by_disk(page, Type::Counter, "ssd_proof_failures_total",
          "Blocks that were read and are not what was saved; each was a miss", ssd,
          [](const OneDisk& disk) { return number(disk.proof_failures); });
  by_disk(page, Type::Counter, "ssd_damaged_blocks_total",
          "Blocks that differed in the pool from what was saved when they were to be written", ssd,
          [](const OneDisk& disk) { return number(disk.damaged_blocks); });
  page.begin(Type::Counter, "ssd_errors_total", "Reads and writes of a disk that failed");
  for (const OneDisk& disk : ssd.disks) {
    page.sample(number(disk.read_errors), {{"disk", disk.path}, {"op", "read"}});
    page.sample(number(disk.write_errors), {{"disk", disk.path}, {"op", "write"}});
  }
}

void kept_pool(MetricsPage& page, const KeptReport& kept) {
  page.gauge("keeper",
             "Whether a keeper holds the pool, so that it outlives this server (1) or not (0)",
             kept.has_keeper ? 1 : 0);
  page.gauge("adopted_blocks",
             "Blocks of the former server that this one found in the pool at its start",
             number(kept.adopted_blocks));
  page.gauge("adopted_bytes", "Bytes of the blocks that were adopted", number(kept.adopted_bytes));
  page.gauge("adopt_discarded_slots",
             "Slots of the former server whose blocks were not whole or no longer valid",
             number(kept.discarded_frames));
  page.gauge("adopt_seconds", "Time to adopt the pool of the former server", kept.adopt_seconds);
  page.gauge(
      "former_clients",
      "Clients of the former server that have neither ended nor reported the end of their copies; "
      "slots that they may access are not reused",
      number(kept.former_clients));
  page.gauge("adopted_waits_for_nodes",
             "Whether adopted blocks wait for the epochs of other nodes (1) or are served (0)",
             kept.waits_for_nodes ? 1 : 0);
}

void disks(MetricsPage& page, const SsdReport& ssd) {
  disk_states(page, ssd);
  disk_traffic(page, ssd);
  page.counters("ssd_rejected_blocks_total", "Blocks that were not written to a disk", "reason",
                {{"budget", number(ssd.rejected_budget)},
                 {"too_large", number(ssd.rejected_too_large)},
                 {"slow", number(ssd.evicted_unwritten)},
                 {"error", number(ssd.failed_writes)}});
  page.counter("ssd_renewed_blocks_total",
               "Blocks that were written to a disk again because they were read, and their segment "
               "was about to be used again",
               ssd.renewed_blocks);
  page.gauge("ssd_reads_in_flight", "Blocks that are being read from disks, late ones included",
             number(ssd.reads_in_flight));
  page.counter("ssd_late_blocks_total", "Blocks that a disk did not deliver before their deadline",
               ssd.late_blocks);
  page.gauge("ssd_waits_for_peers",
             "1 while blocks of an earlier process wait for the epochs of all peers",
             ssd.waits_for_nodes ? 1 : 0);
}

}  // namespace

std::string metrics_page(const Snapshot& snapshot) {
  MetricsPage page("pegaflow_");
  pool(page, snapshot);
  cache(page, snapshot);
  misses(page, snapshot);
  ages(page, snapshot);
  demand(page, snapshot.cache.demand);
  clients(page, snapshot);
  calls(page, snapshot.rpc);
  routers(page, snapshot);
  direct_metrics(page, snapshot.direct);
  if (snapshot.nodes) node_metrics(page, snapshot);
  if (snapshot.kept) kept_pool(page, *snapshot.kept);
  if (snapshot.ssd) {
    if (!snapshot.nodes) fetch_metrics(page, snapshot.ssd->fetches, snapshot.cache.store);
    disks(page, *snapshot.ssd);
  }
  page.begin(Type::Gauge, "build_info", "The server's version");
  page.sample(1, {{"version", kVersion}});
  return page.text();
}

}  // namespace pegaflow::server
