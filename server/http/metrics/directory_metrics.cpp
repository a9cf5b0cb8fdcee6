#include "server/http/metrics/directory_metrics.h"

#include <chrono>
#include <cstdint>
#include <vector>

namespace pegaflow::server {
namespace {

using Type = MetricsPage::Type;

double number(std::uint64_t value) { return static_cast<double>(value); }

void directory_servers(MetricsPage& page, const std::vector<directory::Stats::Server>& servers) {
  const auto by_server = [&](Type type, const char* name, const char* help, auto&& value) {
    page.begin(type, name, help);
    for (const auto& server : servers) page.sample(value(server), {{"server", server.name}});
  };
  by_server(Type::Gauge, "directory_server_ready", "Servers of the directory that can be asked",
            [](const auto& server) { return server.is_ready ? 1.0 : 0.0; });
  by_server(Type::Counter, "directory_server_losses_total",
            "Connections to servers of the directory that were lost",
            [](const auto& server) { return number(server.losses); });
  by_server(Type::Counter, "directory_server_failures_total",
            "Attempts to connect to servers of the directory that failed",
            [](const auto& server) { return number(server.failures); });
  by_server(Type::Counter, "directory_server_late_total",
            "Times that a server of the directory did not answer within 5 ms",
            [](const auto& server) { return number(server.late); });
  by_server(Type::Counter, "directory_commands_total", "Commands to servers of the directory",
            [](const auto& server) { return number(server.commands); });
  by_server(Type::Gauge, "directory_round_trip_seconds",
            "Time of the last command at servers of the directory", [](const auto& server) {
              return std::chrono::duration<double>(server.round_trip).count();
            });
}

}  // namespace

void directory_metrics(MetricsPage& page, const DirectoryReport& now) {
  const directory::Stats& stats = now.stats;
  page.gauge("directory_usable", "1 while the directory is asked for owners of blocks",
             now.is_usable ? 1 : 0);
  page.counters("directory_lookups_total", "Questions for owners of blocks, by their answer",
                "result",
                {{"found", number(stats.found)},
                 {"none", number(stats.none)},
                 {"down", number(stats.down)},
                 {"late", number(now.late)},
                 {"withheld", number(now.withheld)},
                 {"short", number(now.without_anchor)}});
  page.counter("directory_probes_total", "Anchors that lookups asked for", stats.members);
  page.counter("directory_trips_total", "Round trips of lookups", stats.trips);
  page.gauge("directory_anchors", "Blocks that this node announces", number(stats.anchors));
  page.gauge("directory_pending_writes", "Announcements that are not sent yet",
             number(stats.pending));
  page.counters("directory_writes_total", "Announcements of this node", "kind",
                {{"added", number(stats.added)},
                 {"removed", number(stats.removed)},
                 {"repeated", number(stats.repeated)},
                 {"repaired", number(stats.repaired)},
                 {"dropped", number(stats.dropped)}});
  page.counter("directory_rebuilds_total",
               "Times that a server had lost data or announcements of this node", stats.rebuilds);
  page.counters("directory_ignored_total", "Contents of the directory that were ignored", "reason",
                {{"dead_node", number(stats.dead)},
                 {"member", number(stats.bad_members)},
                 {"lease", number(stats.bad_leases)},
                 {"epochs", number(stats.bad_epochs)},
                 {"reply", number(stats.bad_replies)},
                 {"error", number(stats.errors)},
                 {"network", number(now.links.outside)}});
  page.gauge("directory_nodes", "Nodes with a lease in the directory", number(stats.nodes));
  page.counter("directory_number_conflicts_total",
               "Times that another node had the number of this node", stats.conflicts);
  page.counter("directory_epochs_learned_total",
               "Texts with resets of other nodes that were read from the directory",
               stats.epochs_learned);
  page.gauge("directory_links", "Links to nodes that the directory named", number(now.links.links));
  page.gauge("directory_ready_links", "Those of them that can be asked", number(now.links.ready));
  page.counters("directory_dials_total", "Links to named nodes, by what became of them", "result",
                {{"dialed", number(now.links.dials)},
                 {"closed", number(now.links.closed)},
                 {"withheld", number(now.links.withheld)}});
  directory_servers(page, stats.servers);
}

}  // namespace pegaflow::server
