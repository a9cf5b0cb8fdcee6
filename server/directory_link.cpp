#include "server/directory_link.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "capnp/wire/kj_time.h"
#include "capnp/wire/peer_codec.h"
#include "capnp/wire/rpc_error.h"
#include "directory/agent.h"
#include "server/directory_announcements.h"
#include "transport/tcp/socket_address.h"

namespace pegaflow::server {
namespace {

constexpr kj::Duration kTick = 25 * kj::MILLISECONDS;
constexpr std::size_t kMostQuestions = 4096;

constexpr std::string_view kPurpose = "directory 1";

directory::Keys keys_of(const cluster::PeerSecrets& secrets) {
  directory::Keys keys{.anchors = secrets.first().derive(kPurpose), .all = {}};
  for (const cluster::PeerSecret& secret : secrets.all()) {
    keys.all.push_back(secret.derive(kPurpose));
  }
  return keys;
}

Result<unsigned> bucket_bits_of(std::int64_t buckets) {
  unsigned bits = directory::kLeastBucketBits;
  while ((std::int64_t{1} << bits) < buckets) ++bits;
  if ((std::int64_t{1} << bits) != buckets) {
    return fail(Errc::kInvalidArgument, "--directory-buckets: {} is no power of two", buckets);
  }
  return bits;
}

Result<void> check_own(const ServerOptions& options, const cluster::OwnNode& own) {
  if (options.peer_secret_file.empty()) {
    return fail(Errc::kInvalidArgument,
                "--directory needs --peer-secret-file: names in the directory are made with it");
  }
  if (options.peer_networks.empty()) {
    return fail(Errc::kInvalidArgument,
                "--directory needs --peer-networks: nodes of other networks are not dialed");
  }
  const auto address = tcp::SocketAddress::parse(own.listen);
  if (!own.listen.empty() && (!address || address->is_wildcard())) {
    return fail(Errc::kInvalidArgument,
                "--peer-listen {}: with --directory this address is sent to other nodes; name an "
                "IP address of this machine",
                own.listen);
  }
  return {};
}

}  // namespace

Result<DirectoryLink::Plan> DirectoryLink::plan(const ServerOptions& options,
                                                const cluster::OwnNode& own,
                                                const std::vector<std::string>& lanes) {
  PEGA_TRY(check_own(options, own));
  if (options.directory.size() > directory::kMostServers) {
    return fail(Errc::kInvalidArgument, "--directory: {} servers, the limit is {}",
                options.directory.size(), directory::kMostServers);
  }
  Plan plan;
  PEGA_TRY_LET(plan.networks, cluster::Networks::parse(options.peer_networks));
  std::optional<directory::RedisLogin> login;
  if (!options.directory_secret_file.empty()) {
    PEGA_TRY_LET(login, directory::RedisLogin::read(options.directory_secret_file));
  }
  std::shared_ptr<directory::TlsContext> tls;
  for (const std::string& text : options.directory) {
    directory::RedisServer::Options server;
    PEGA_TRY_LET(server.url, directory::RedisUrl::parse(text));
    const auto& named = plan.directory.servers;
    if (std::any_of(named.begin(), named.end(),
                    [&](const auto& other) { return other.url.name() == server.url.name(); })) {
      return fail(Errc::kInvalidArgument, "--directory: {} is named twice", server.url.name());
    }
    if (login && server.url.password.empty()) {
      server.url.user = login->user;
      server.url.password = login->password;
    }
    if (server.url.is_tls && tls == nullptr) {
      PEGA_TRY_LET(tls, directory::TlsContext::create(options.directory_ca_file));
    }
    server.tls = tls;
    server.deadline = kDeadline;
    plan.directory.servers.push_back(std::move(server));
  }
  plan.directory.keys = keys_of(own.secrets);
  auto made = std::make_shared<directory::AgentOptions>();
  directory::AgentOptions& agent = *made;
  PEGA_TRY_LET(agent.servers.bucket_bits, bucket_bits_of(options.directory_buckets));
  agent.leases.own = {.node = own.node, .address = own.listen, .lanes = {}};
  for (const std::string& lane : lanes) {
    agent.leases.own.lanes += (agent.leases.own.lanes.empty() ? "" : ",") + lane;
  }
  agent.seed = Id128::random().low;
  plan.directory.agent = std::move(made);
  return plan;
}

DirectoryLink::DirectoryLink(kj::AsyncIoContext& io, CacheService& service,
                             std::function<void()> changed)
    : io_(io),
      service_(service),
      changed_(std::move(changed)),
      announcements_(std::make_unique<DirectoryAnnouncements>(
          service,
          [this](directory::Announcement&& made) { return directory_->try_send(std::move(made)); },
          DirectoryAnnouncements::Options())),
      tasks_(*this) {}

DirectoryLink::~DirectoryLink() noexcept(false) = default;

Result<std::unique_ptr<DirectoryLink>> DirectoryLink::start(kj::AsyncIoContext& io, Plan plan,
                                                            CacheService& service,
                                                            std::function<void()> changed) {
  PEGA_TRY(service.store().keep_journal());
  std::unique_ptr<DirectoryLink> made(new DirectoryLink(io, service, std::move(changed)));
  PEGA_TRY_LET(made->directory_, directory::Directory::start(std::move(plan.directory)));
  made->observer_ = kj::heap<kj::UnixEventPort::FdObserver>(
      io.unixEventPort, made->directory_->news().fd(), kj::UnixEventPort::FdObserver::OBSERVE_READ);
  made->tasks_.add(made->read_news());
  made->tasks_.add(made->announce_again(kTick));
  return made;
}

// ---- questions

bool DirectoryLink::was_tried() const noexcept {
  if (report_.is_usable || report_.knows_epochs) return true;
  // All servers have failed once.
  const auto& servers = report_.stats.servers;
  return has_report_ && std::all_of(servers.begin(), servers.end(), [](const auto& server) {
           return server.failures + server.losses != 0 || !server.why.empty();
         });
}

kj::Promise<cluster::FoundPeers::Finding> DirectoryLink::find(const Bytes32& space,
                                                              std::span<const BlockKey> keys) {
  using Finding = cluster::FoundPeers::Finding;
  if (!is_usable()) {
    ++withheld_;
    return Finding{};
  }
  directory::Question question{.ticket = ++last_ticket_,
                               .space = space,
                               .epoch = service_.epochs().of(space),
                               .candidates = directory::candidates_of(keys),
                               .deadline = clock_.now() + kDeadline};
  if (question.candidates.empty()) {
    ++short_;
    return Finding{.is_known = true};
  }
  const std::uint64_t ticket = question.ticket;
  if (asked_.size() >= kMostQuestions || !directory_->try_send(std::move(question))) {
    ++withheld_;
    return Finding{};
  }
  auto pair = kj::newPromiseAndFulfiller<Finding>();
  asked_.emplace(ticket, kj::mv(pair.fulfiller));
  return pair.promise
      .exclusiveJoin(io_.provider->getTimer().afterDelay(to_kj(kDeadline)).then([this, ticket]() {
        asked_.erase(ticket);
        ++late_;
        is_overdue_ = true;
        return Finding{};
      }))
      .attach(kj::defer([this, ticket]() { asked_.erase(ticket); }));
}

void DirectoryLink::answer(directory::Found&& found) {
  is_overdue_ = false;
  const auto asked = asked_.find(found.ticket);
  if (asked == asked_.end()) return;
  Fulfiller fulfiller = kj::mv(asked->second);
  asked_.erase(asked);
  // Links to nodes of which the directory knows none are asked, as without a directory.
  cluster::FoundPeers::Finding finding{
      .is_known = found.result != directory::Found::Result::kDown && !found.is_alone};
  for (directory::Found::Owner& owner : found.owners) {
    finding.nodes.push_back({.node = owner.node, .address = std::move(owner.address)});
  }
  fulfiller->fulfill(kj::mv(finding));
}

/// Whether /health, or what waits for the directory, has another state with that report.
bool DirectoryLink::has_changed(const directory::Report& report) const {
  const auto& now = report.stats.servers;
  const auto& before = report_.stats.servers;
  const bool has_servers = std::equal(
      now.begin(), now.end(), before.begin(), before.end(), [](const auto& one, const auto& other) {
        return one.is_ready == other.is_ready && one.why == other.why && one.info == other.info;
      });
  return !has_servers || report.is_usable != report_.is_usable ||
         report.knows_epochs != report_.knows_epochs || report.stats.nodes != report_.stats.nodes;
}

void DirectoryLink::take(directory::News&& news) {
  if (auto* const found = std::get_if<directory::Found>(&news)) {
    answer(std::move(*found));
  } else if (const auto* const known = std::get_if<KnownEpochs>(&news)) {
    KnownEpochs in_time = *known;
    // As with peers: a clock that is wrong raises no epoch here.
    std::erase_if(in_time.spaces, [](const auto& each) { return !is_in_time(each.second); });
    if (!is_in_time(in_time.floor)) in_time.floor = Epoch{};
    service_.epochs().learn(in_time);
    note_epochs();
  } else if (auto* const report = std::get_if<directory::Report>(&news)) {
    const bool is_news = has_changed(*report);
    report_ = std::move(*report);
    has_report_ = true;
    is_overdue_ = false;
    if (is_news) changed_();
  }
}

kj::Promise<void> DirectoryLink::read_news() {
  return observer_->whenBecomesReadable().then([this]() {
    directory_->news().drain([this](directory::News&& news) { take(std::move(news)); });
    return read_news();
  });
}

void DirectoryLink::set_secrets(const cluster::PeerSecrets& secrets) {
  new_keys_ = keys_of(secrets);
  send_keys();
}

void DirectoryLink::send_keys() {
  // A full inbox is tried again with the next tick.
  if (!new_keys_ || !directory_->try_send(directory::Keys(*new_keys_))) return;
  new_keys_.reset();
  announcements_->start_over();
}

// ---- announcements

kj::Promise<void> DirectoryLink::announce_again(kj::Duration pause) {
  return io_.provider->getTimer().afterDelay(pause).then([this]() {
    note_epochs();
    send_keys();
    // What the event loop has meanwhile comes between two parts of the journal.
    return announce_again(announcements_->step() ? 0 * kj::SECONDS : kTick);
  });
}

void DirectoryLink::note_epochs() {
  const std::uint64_t changes = service_.epochs().changes();
  if (epochs_sent_ == changes) return;
  if (directory_->try_send(service_.epochs().known())) epochs_sent_ = changes;
}

DirectoryReport DirectoryLink::report() const {
  return {.stats = report_.stats,
          .is_usable = is_usable(),
          .late = late_,
          .withheld = withheld_,
          .without_anchor = short_};
}

void DirectoryLink::taskFailed(kj::Exception&& exception) {
  PEGA_ASSERT(false, "the link to the directory failed: {}", error_from(exception).detail);
}

}  // namespace pegaflow::server
