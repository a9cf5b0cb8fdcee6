#include "server/nodes.h"

#include <thread>
#include <utility>

#include <fmt/ranges.h>

#include "base/log.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow {
namespace {

constexpr Log kLog{"peers"};

/// Connections that peers may make: a restarted one may have two for a moment.
constexpr std::size_t kConnectionsFromPeers = 4 * Peers::kMaxPeers;

/// A question of 8,192 keys has 256 KiB; a greeting has next to nothing.
constexpr BoundedStream::Limits kPeerLimits{.hello_words = 1024,
                                            .message_words = std::size_t{256} << 10,
                                            .questions = 1024,
                                            .queued_bytes = std::size_t{16} << 20};

/// The host of "HOST:PORT", to have another port.
std::string on_any_port(const std::string& address) {
  return address.substr(0, address.rfind(':')) + ":0";
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address.starts_with("[::1]:");
}

}  // namespace

Result<std::optional<Nodes::Plan>> Nodes::plan(const ServerOptions& options,
                                               const std::string& build) {
  const bool has_listen = !options.peer_listen.empty();
  if (options.peers.empty() && !has_listen) {
    if (!options.peer_secret_file.empty() || !options.peer_fabric_listen.empty() ||
        options.require_rdma || !options.nics.empty() || !options.deny_nics.empty()) {
      return fail(Errc::kInvalidArgument,
                  "options of other nodes need --peers or --peer-listen, which name them");
    }
    return std::optional<Plan>();
  }
  if (options.peers.size() > Peers::kMaxPeers) {
    return fail(Errc::kInvalidArgument, "--peers: {} nodes, {} are the limit", options.peers.size(),
                Peers::kMaxPeers);
  }
  Plan plan;
  plan.own = {.node = Id128::random(), .build = build, .secret = {}};
  if (!options.peer_secret_file.empty()) {
    PEGA_TRY_LET(plan.own.secret, PeerSecret::read(options.peer_secret_file));
  }
  for (const std::string& peer : options.peers) {
    const std::size_t colon = peer.rfind(':');
    if (colon == 0 || colon == std::string::npos || colon + 1 == peer.size()) {
      return fail(Errc::kInvalidArgument, "--peers: \"{}\" is not HOST:PORT", peer);
    }
  }
  plan.peers.addresses = options.peers;
  plan.peers.link.call_deadline = options.peer_deadline;
  plan.fetches.deadline = options.fetch_deadline;
  if (has_listen) {
    PEGA_TRY_LET(plan.listener, listen_tcp(options.peer_listen, "--peer-listen"));
    if (options.peer_secret_file.empty() && !is_loopback(plan.listener->address)) {
      kLog.warn(
          "whoever reaches this node may read its cache; --peer-secret-file closes it address={}",
          plan.listener->address);
    }
  }
  const std::string fabric_listen = !options.peer_fabric_listen.empty() ? options.peer_fabric_listen
                                    : has_listen ? on_any_port(plan.listener->address)
                                                 : "127.0.0.1:0";
  const auto address = tcp::SocketAddress::parse(fabric_listen);
  if (!address || address->is_wildcard()) {
    return fail(Errc::kInvalidArgument,
                "{}: peers are told where to read the bytes; name an IP address of this machine "
                "with --peer-fabric-listen IP:PORT",
                options.peer_fabric_listen.empty()
                    ? "--peer-listen " + options.peer_listen
                    : "--peer-fabric-listen " + options.peer_fabric_listen);
  }
  PEGA_TRY_LET(plan.lanes, Lanes::plan(options, fabric_listen));
  return std::optional<Plan>(std::move(plan));
}

Nodes::Nodes(kj::AsyncIoContext& io, Plan plan) : plan_(std::move(plan)), io_(io) {}

Nodes::~Nodes() noexcept(false) = default;

Result<std::unique_ptr<Nodes>> Nodes::start(kj::AsyncIoContext& io, Plan plan, Pool& pool,
                                            CacheService& service, Background& background,
                                            const Clock& clock,
                                            const std::function<void()>& changed) {
  std::unique_ptr<Nodes> nodes(new Nodes(io, std::move(plan)));
  PEGA_TRY_LET(nodes->lanes_,
               Lanes::open(nodes->plan_.lanes, pool.bytes(), clock, nodes->plan_.fetches.batches));
  Lanes& lanes = *nodes->lanes_;
  nodes->peers_ = std::make_unique<Peers>(io, nodes->plan_.own, nodes->plan_.peers, lanes, changed);
  std::vector<Fetches::Lane> open;
  for (std::size_t lane = 0; lane < lanes.count(); ++lane) {
    open.push_back({.fabric = &lanes.fabric(lane), .pool = lanes.pool(lane)});
  }
  nodes->fetches_ =
      std::make_unique<Fetches>(service, *nodes->peers_, std::move(open), background,
                                io.provider->getTimer(), clock, nodes->boot_, nodes->plan_.fetches);
  nodes->context_.reset(new PeerContext{.service = service,
                                        .background = background,
                                        .lanes = lanes,
                                        .own = nodes->plan_.own,
                                        .clock = clock});
  if (nodes->plan_.listener) {
    RpcServer::Options options;
    options.max_connections = kConnectionsFromPeers;
    options.hello_timeout = std::chrono::seconds(2);
    options.limits = kPeerLimits;
    nodes->rpc_ = std::make_unique<RpcServer>(io, std::move(options), nodes->rpc_counters_);
    nodes->rpc_->serve(peer_service(*nodes->context_), nodes->plan_.listener->fd.get());
  }
  const NodesReport report = nodes->report();
  kLog.info("among other nodes lanes={} peers={} listen={}{}", fmt::join(report.lanes, ","),
            report.peers.size(), report.listen.empty() ? "nowhere" : report.listen,
            report.why_not_rdma.empty() ? "" : fmt::format(" no_rdma=\"{}\"", report.why_not_rdma));
  return nodes;
}

void Nodes::read_completions() {
  lanes_->read_completions([this](const Fabric::Completion& done) { fetches_->completed(done); });
}

NodesReport Nodes::report() const {
  NodesReport report;
  report.node = plan_.own.node;
  const Lanes::Plan& lanes = lanes_->plan();
  for (std::size_t lane = 0; lane < lanes_->count(); ++lane) {
    report.lanes.push_back(lanes_->name(lane));
  }
  report.cards = lanes.cards;
  report.refused_cards = lanes.refused;
  report.why_not_rdma = lanes.why_not;
  if (plan_.listener) report.listen = plan_.listener->address;
  for (const auto& link : peers_->links()) {
    report.peers.push_back({.address = link->address(), .link = link->stats()});
  }
  report.fetches = fetches_->stats();
  report.waits = peers_->waits();
  report.gate = context_->counters;
  report.rpc = rpc_counters_;
  return report;
}

}  // namespace pegaflow
