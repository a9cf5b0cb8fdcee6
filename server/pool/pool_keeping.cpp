#include "server/pool/pool_keeping.h"

#include <atomic>
#include <cerrno>
#include <utility>

#include <fcntl.h>

#include "base/log.h"
#include "capnp/wire/kj_time.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"pool"};

/// Before another attempt to find a keeper: where there is none, and where one does not answer.
constexpr Duration kPause = std::chrono::seconds(1);
constexpr Duration kLongPause = std::chrono::minutes(1);
/// For the answer of a keeper to a server that serves meanwhile.
constexpr std::chrono::milliseconds kAnswer{200};

}  // namespace

PoolKeeping::PoolKeeping(PoolPreparation::Keep keep, std::filesystem::path socket,
                         const engine::Pool& pool, engine::KeptTables& tables,
                         std::optional<KeeperLink> keeper, const Clock& clock)
    : keep_(keep),
      socket_(std::move(socket)),
      pool_(pool),
      tables_(&tables),
      keeper_(std::move(keeper)),
      clock_(clock) {
  tables_->set_usable(keeper_.has_value());
  if (!keeper_) why_not_ = "no keeper listens at " + socket_.string();
}

bool PoolKeeping::admit(const Id128& connection, const Id128& process, int pidfd) {
  if (!clients_.contains(process)) {
    UniqueFd own(::fcntl(pidfd, F_DUPFD_CLOEXEC, 0));
    if (!own) return false;
    if (keeper_) {
      if (const auto added = keeper_->add_client(process, pidfd); !added) {
        lose(to_string(added.error()));
      }
    }
    clients_.emplace(process, Client{.pidfd = std::move(own)});
  }
  if (connections_.emplace(connection, process).second) ++clients_[process].connections;
  return true;
}

void PoolKeeping::forget(const Id128& connection) {
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return;
  const auto client = clients_.find(found->second);
  connections_.erase(found);
  if (--client->second.connections != 0) return;
  if (keeper_) keeper_->forget_client(client->first);
  clients_.erase(client);
}

void PoolKeeping::lose(const std::string& why) {
  // It may live and hold the pool, and not know of the clients from now on.
  tables_->set_usable(false);
  keeper_.reset();
  why_not_ = why;
  if (lost_.get() != nullptr) lost_->fulfill();
  kLog.error("the keeper is lost, the pool ends with this server until there is one error=\"{}\"",
             why);
}

void PoolKeeping::tend() {
  if (keeper_ && keeper_->is_lost()) lose("the keeper has ended");
  if (keeper_ || clock_.now() < next_try_) return;
  if (const auto found = find_keeper(); !found) {
    keeper_.reset();
    why_not_ = to_string(found.error());
    // One that does not answer holds up this thread.
    next_try_ = clock_.now() + (found.error().code == Errc::kTimeout ? kLongPause : kPause);
    return;
  }
  tables_->set_usable(true);
  why_not_.clear();
  kLog.info("the pool is kept socket={}", socket_.string());
}

kj::Promise<void> PoolKeeping::until_due(kj::UnixEventPort& port, kj::Timer& timer) {
  if (!keeper_) return timer.afterDelay(to_kj(kPause));
  // A descriptor of its own: the link may be closed while this one is observed.
  struct Watch {
    Watch(kj::UnixEventPort& port, UniqueFd observed)
        : fd(std::move(observed)),
          observer(port, fd.get(), kj::UnixEventPort::FdObserver::OBSERVE_READ) {}
    UniqueFd fd;
    kj::UnixEventPort::FdObserver observer;
  };
  UniqueFd fd(::fcntl(keeper_->fd(), F_DUPFD_CLOEXEC, 0));
  if (!fd) return timer.afterDelay(to_kj(kPause));  // No descriptor is free: look at times.
  auto watch = kj::heap<Watch>(port, std::move(fd));
  kj::Promise<void> ended = watch->observer.whenBecomesReadable();
  auto lost = kj::newPromiseAndFulfiller<void>();
  lost_ = kj::mv(lost.fulfiller);
  return ended.attach(kj::mv(watch)).exclusiveJoin(kj::mv(lost.promise));
}

Result<void> PoolKeeping::find_keeper() {
  if (keep_ == PoolPreparation::Keep::kYes) {
    PEGA_TRY_LET(keeper_, KeeperLink::open(socket_, kAnswer));
  } else {
    PEGA_TRY_LET(keeper_, KeeperLink::connect(socket_, kAnswer));
    if (!keeper_) return fail(Errc::kPeerLost, "no keeper listens at {}", socket_.string());
  }
  const std::atomic<bool> never{false};
  // What another one left there is of no use: this server has a pool.
  PEGA_TRY(keeper_->take(clock_, {.deadline = clock_.now(), .stop = never, .waiting = {}}));
  PEGA_TRY(keeper_->drop());
  for (const auto& [process, client] : clients_) {
    PEGA_TRY(keeper_->add_client(process, client.pidfd.get()));
  }
  return keeper_->put(pool_.fd(), tables_->fd(), pool_.size_bytes());
}

Result<void> PoolKeeping::replace_tables(engine::KeptTables& tables) {
  tables_ = &tables;
  tables.set_usable(keeper_.has_value());
  if (!keeper_) return {};
  return keeper_->put(pool_.fd(), tables.fd(), pool_.size_bytes());
}

Id128 PoolKeeping::pool() const { return keeper_ ? tables_->layout().pool : Id128{}; }

KeptReport PoolKeeping::report() const {
  KeptReport report;
  report.has_keeper = keeper_.has_value();
  report.socket = socket_.string();
  report.why_not = why_not_;
  return report;
}

}  // namespace pegaflow::server
