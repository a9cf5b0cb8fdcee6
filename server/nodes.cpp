#include "server/nodes.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <fmt/ranges.h>

#include "base/assert.h"
#include "base/log.h"
#include "capnp/wire/rpc_error.h"
#include "server/direct/direct_reads.h"
#include "server/direct/peer_offers.h"
#include "server/ssd/staging.h"
#include "server/ssd/tiered_source.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"peers"};

/// A request with 8,192 keys has 256 KiB; a greeting is small.
constexpr BoundedStream::Limits kPeerLimits{.hello_words = 1024,
                                            .message_words = std::size_t{256} << 10,
                                            .questions = 1024,
                                            .queued_bytes = std::size_t{16} << 20};

/// The interval between checks of the secret file, of one stat() each.
constexpr kj::Duration kSecretCheck = 1 * kj::SECONDS;

/// A secret of 32 random bytes cannot be guessed, in whatever digits it is written.
void warn_of_short(const cluster::PeerSecrets& secrets) {
  constexpr std::size_t kLongEnough = 32;
  if (secrets.shortest() >= kLongEnough) return;
  kLog.warn(
      "the peer secret is short: any host that reaches --peer-listen can try guesses offline; "
      "make one with `head -c 32 /dev/urandom | base64` bytes={}",
      secrets.shortest());
}

/// The host of "HOST:PORT", with any port.
std::string on_any_port(const std::string& address) {
  return address.substr(0, address.rfind(':')) + ":0";
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address.starts_with("[::1]:");
}

/// Half of what fetches may have; the rest is for the claims of engines of this node.
std::uint64_t most_staged(std::size_t pool_bytes) {
  const double share = engine::BlockStore::Options{}.fetch_share / 2;
  return static_cast<std::uint64_t>(static_cast<double>(pool_bytes) * share);
}

Result<void> refuse_options_of_nodes(const ServerOptions& options) {
  // The secret alone is for routers.
  if (!options.peer_fabric_listen.empty() || options.require_rdma || !options.nics.empty() ||
      !options.deny_nics.empty() || !options.directory.empty() || !options.peer_networks.empty()) {
    return fail(Errc::kInvalidArgument, "options about other nodes need --peers or --peer-listen");
  }
  return {};
}

Result<PoolReads::Use> read_direct_pool(const std::string& value) {
  if (value == "auto") return PoolReads::Use::kAuto;
  if (value == "force") return PoolReads::Use::kForce;
  if (value == "off") return PoolReads::Use::kOff;
  return fail(Errc::kInvalidArgument, "--direct-pool: \"{}\" is not auto, force or off", value);
}

/// Each address once: two links by one name would replace each other's connection without end.
Result<std::vector<std::string>> distinct(const std::vector<std::string>& peers) {
  for (const std::string& peer : peers) {
    const std::size_t colon = peer.rfind(':');
    if (colon == 0 || colon == std::string::npos || colon + 1 == peer.size()) {
      return fail(Errc::kInvalidArgument, "--peers: \"{}\" is not HOST:PORT", peer);
    }
  }
  std::vector<std::string> addresses;
  for (const std::string& peer : peers) {
    if (std::find(addresses.begin(), addresses.end(), peer) == addresses.end()) {
      addresses.push_back(peer);
    }
  }
  return addresses;
}

/// Seconds since the rate was measured; 0 while it is unknown.
double age_of(const cluster::SourceRate* rate, TimePoint now) {
  if (rate == nullptr || !rate->is_known()) return 0;
  return std::chrono::duration<double>(now - rate->measured_at()).count();
}

Result<TcpListener> listen_for_nodes(const ServerOptions& options) {
  PEGA_TRY_LET(TcpListener listener, listen_tcp(options.peer_listen, "--peer-listen"));
  if (options.peer_secret_file.empty() && !is_loopback(listener.address)) {
    kLog.warn(
        "any host that reaches this node may read its cache; set --peer-secret-file address={}",
        listener.address);
  }
  return listener;
}

/// The address at which the lanes listen, when the node listens for others at `own`, or at none.
Result<std::string> fabric_address(const ServerOptions& options,
                                   const std::optional<TcpListener>& own) {
  std::string listen = !options.peer_fabric_listen.empty() ? options.peer_fabric_listen
                       : own                               ? on_any_port(own->address)
                                                           : "127.0.0.1:0";
  const auto address = tcp::SocketAddress::parse(listen);
  if (!address || address->is_wildcard()) {
    return fail(
        Errc::kInvalidArgument,
        "{}: peers need an address to read the bytes from; name an IP address of this machine "
        "with --peer-fabric-listen IP:PORT",
        options.peer_fabric_listen.empty() ? "--peer-listen " + options.peer_listen
                                           : "--peer-fabric-listen " + options.peer_fabric_listen);
  }
  return listen;
}

}  // namespace

Result<std::optional<Nodes::Plan>> Nodes::plan(const ServerOptions& options,
                                               const std::string& build) {
  const bool has_listen = !options.peer_listen.empty();
  if (options.peers.empty() && !has_listen) {
    PEGA_TRY(refuse_options_of_nodes(options));
    return std::optional<Plan>();
  }
  if (options.peers.size() > cluster::Peers::kMaxPeers) {
    return fail(Errc::kInvalidArgument, "--peers: {} nodes, the limit is {}", options.peers.size(),
                cluster::Peers::kMaxPeers);
  }
  Plan plan;
  plan.own = {.node = Id128::random(), .build = build, .secrets = {}, .listen = {}};
  if (!options.peer_secret_file.empty()) {
    plan.secret_file = options.peer_secret_file;
    plan.secret_at.emplace(plan.secret_file);
    PEGA_TRY_LET(plan.own.secrets, cluster::PeerSecrets::read(plan.secret_file));
    warn_of_short(plan.own.secrets);
  }
  PEGA_TRY_LET(plan.peers.addresses, distinct(options.peers));
  plan.peers.link.call_deadline = options.peer_deadline;
  plan.fetches.deadline = options.fetch_deadline;
  PEGA_TRY_LET(plan.fetches.direct_pool, read_direct_pool(options.direct_pool));
  if (has_listen) {
    PEGA_TRY_LET(plan.listener, listen_for_nodes(options));
    plan.own.listen = plan.listener->address;
  }
  PEGA_TRY_LET(const std::string fabric_listen, fabric_address(options, plan.listener));
  PEGA_TRY_LET(plan.lanes, cluster::Lanes::plan({.nics = options.nics,
                                                 .deny_nics = options.deny_nics,
                                                 .require_rdma = options.require_rdma,
                                                 .ucx_library = options.ucx_library},
                                                fabric_listen));
  if (!options.directory.empty()) {
    PEGA_TRY_LET(plan.directory,
                 DirectoryLink::plan(options, plan.own,
                                     plan.lanes.cards.empty() ? std::vector<std::string>{"tcp"}
                                                              : std::vector<std::string>{"rdma"}));
  }
  return std::optional<Plan>(std::move(plan));
}

Nodes::Nodes(kj::AsyncIoContext& io, Plan plan, const Clock& clock)
    : plan_(std::move(plan)), clock_(clock), io_(io) {}

Nodes::~Nodes() noexcept(false) = default;

Result<std::unique_ptr<Nodes>> Nodes::start(kj::AsyncIoContext& io, Plan plan, engine::Pool& pool,
                                            CacheService& service, Background& background,
                                            const Clock& clock, SsdSource* disks,
                                            DirectReads& direct,
                                            const std::function<void()>& changed) {
  std::unique_ptr<Nodes> nodes(new Nodes(io, std::move(plan), clock));
  PEGA_TRY_LET(nodes->lanes_, cluster::Lanes::open(nodes->plan_.lanes, pool.bytes(), clock,
                                                   nodes->plan_.source.batches));
  cluster::Lanes& lanes = *nodes->lanes_;
  nodes->peers_ = std::make_unique<cluster::Peers>(io, nodes->plan_.own, service.epochs(),
                                                   nodes->plan_.peers, lanes, changed);
  if (nodes->plan_.directory) PEGA_TRY(nodes->start_directory(service, changed));
  cluster::Lenders& lenders =
      nodes->found_ != nullptr ? static_cast<cluster::Lenders&>(*nodes->found_) : *nodes->peers_;
  std::vector<cluster::PeerSource::Lane> open;
  for (std::size_t lane = 0; lane < lanes.count(); ++lane) {
    open.push_back({.fabric = &lanes.fabric(lane), .pool = lanes.pool(lane)});
  }
  nodes->source_ = std::make_unique<cluster::PeerSource>(lenders, std::move(open), clock,
                                                         nodes->boot_, nodes->plan_.source);
  cluster::Source* source = nodes->source_.get();
  if (disks != nullptr) {
    nodes->tiers_ = std::make_unique<TieredSource>(*disks, *source);
    source = nodes->tiers_.get();
  }
  nodes->fetches_ = std::make_unique<Fetches>(service, source, background, io.provider->getTimer(),
                                              clock, nodes->plan_.fetches);
  if (disks != nullptr) {
    nodes->staging_ = std::make_unique<Staging>(
        service, *disks, *nodes->fetches_, background, io.provider->getTimer(), clock,
        Staging::Options{.most_bytes = most_staged(pool.bytes().size()),
                         .deadline = nodes->plan_.fetches.deadline});
  }
  nodes->watches_ = std::make_unique<cluster::EpochWatches>(
      service.epochs(), io.provider->getTimer(),
      [&peers = *nodes->peers_](const cluster::EpochWatches::Dialer& dialer) {
        return peers.names(dialer.node, dialer.name);
      });
  direct.use_nodes(nodes->plan_.own.node, *nodes->peers_, *nodes->fetches_);
  nodes->offers_ = std::make_unique<PeerOffers>(service, direct, io.provider->getTimer(), clock);
  nodes->context_.reset(new PeerContext{.service = service,
                                        .watches = *nodes->watches_,
                                        .background = background,
                                        .lanes = lanes,
                                        .own = nodes->plan_.own,
                                        .clock = clock,
                                        .staging = nodes->staging_.get(),
                                        .offers = *nodes->offers_});
  if (nodes->plan_.listener) nodes->listen();
  nodes->start_watch_of_secrets();
  const NodesReport report = nodes->report();
  kLog.info("other nodes configured lanes={} peers={} listen={}{}", fmt::join(report.lanes, ","),
            report.peers.size(), report.listen.empty() ? "nowhere" : report.listen,
            report.why_not_rdma.empty() ? "" : fmt::format(" no_rdma=\"{}\"", report.why_not_rdma));
  return nodes;
}

Result<void> Nodes::start_directory(CacheService& service, const std::function<void()>& changed) {
  cluster::FoundPeers::Options options{.link = plan_.peers.link,
                                       .networks = plan_.directory->networks};
  options.dial_patience = plan_.peers.link.call_deadline;
  PEGA_TRY_LET(directory_,
               DirectoryLink::start(io_, std::move(*plan_.directory), service, changed));
  DirectoryLink& directory = *directory_;
  found_ = std::make_unique<cluster::FoundPeers>(
      io_, plan_.own, service.epochs(), options, *lanes_, *peers_,
      [&directory](const Bytes32& space, std::span<const BlockKey> keys) {
        return directory.find(space, keys);
      },
      [&directory]() { return directory.is_usable(); },
      [&directory]() { return directory.was_tried(); }, changed);
  return {};
}

void Nodes::listen() {
  RpcServer::Options options;
  options.max_connections = plan_.most_connections;
  options.hello_timeout = std::chrono::seconds(2);
  options.limits = kPeerLimits;
  rpc_ = std::make_unique<RpcServer>(io_, std::move(options), rpc_counters_);
  context_->end_connection = [rpc = rpc_.get()](const Id128& connection) {
    rpc->end_later(connection);
  };
  rpc_->serve(peer_service(*context_), plan_.listener->fd.get());
}

void Nodes::start_watch_of_secrets() {
  secrets_.accepted = plan_.own.secrets.count();
  secrets_.has_file = plan_.secret_at.has_value();
  if (!secrets_.has_file) return;
  watching_ = watch_secrets().eagerlyEvaluate([](kj::Exception&& problem) {
    PEGA_ASSERT(false, "reading the secret file again failed: {}", error_from(problem).detail);
  });
}

kj::Promise<void> Nodes::watch_secrets() {
  return io_.provider->getTimer().afterDelay(kSecretCheck).then([this]() {
    // Corrected permissions do not change the stamp, so a bad file is read again each time.
    if (plan_.secret_at->has_changed() || !secrets_.is_file_good) read_secrets();
    return watch_secrets();
  });
}

/// Open connections stay: a proof is for one greeting.
void Nodes::read_secrets() {
  auto read = cluster::PeerSecrets::read(plan_.secret_file);
  if (!read) {
    if (!std::exchange(secrets_.is_file_good, false)) return;
    ++secrets_.rejected;
    kLog.error("the changed secret file is rejected, the former secrets stay in use reason=\"{}\"",
               read.error().detail);
    return;
  }
  secrets_.is_file_good = true;
  if (*read == plan_.own.secrets) return;
  plan_.own.secrets = std::move(*read);
  secrets_.accepted = plan_.own.secrets.count();
  if (directory_ != nullptr) directory_->set_secrets(plan_.own.secrets);
  ++secrets_.changed;
  kLog.info("the secret file was read again secrets={}", secrets_.accepted);
  warn_of_short(plan_.own.secrets);
}

void Nodes::read_completions() {
  lanes_->read_completions([this](const Fabric::Completion& done) { source_->completed(done); });
}

NodesReport Nodes::report() const {
  NodesReport report;
  report.node = plan_.own.node;
  const cluster::Lanes::Plan& lanes = lanes_->plan();
  for (std::size_t lane = 0; lane < lanes_->count(); ++lane) {
    report.lanes.push_back(lanes_->name(lane));
  }
  report.cards = lanes.cards;
  report.refused_cards = lanes.refused;
  report.ucx_version = lanes.ucx_version;
  report.ucx_library = lanes.ucx_library;
  report.why_not_rdma = lanes.why_not;
  if (plan_.listener) report.listen = plan_.listener->address;
  for (const auto& link : peers_->links()) {
    const cluster::SourceRate* const rate = source_->rate(*link);
    report.peers.push_back({.address = link->address(),
                            .link = link->stats(),
                            .bytes_per_second = rate == nullptr ? 0 : rate->bytes_per_second(),
                            .measured_ago_seconds = age_of(rate, clock_.now()),
                            .queued_bytes = rate == nullptr ? 0 : rate->queued_bytes()});
  }
  report.fetches = fetches_->stats();
  if (staging_ != nullptr) report.staging_bytes = staging_->stats().bytes;
  report.source = source_->stats();
  report.waits = peers_->waits();
  report.gate = context_->counters;
  report.rpc = rpc_counters_;
  report.secrets = secrets_;
  if (directory_ != nullptr) {
    report.directory = directory_->report();
    report.directory->links = found_->stats();
  }
  return report;
}

}  // namespace pegaflow::server
