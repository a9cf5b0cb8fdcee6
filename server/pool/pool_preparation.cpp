#include "server/pool/pool_preparation.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/units.h"

namespace pegaflow::server {
namespace {

constexpr Log kLog{"pool"};

using engine::KeptTables;

constexpr std::uint64_t kReports = 100;  ///< In one attempt.
constexpr int kDiskPollMs = 5;

std::uint32_t parts_of(const engine::Pool& pool) {
  return std::max<std::uint32_t>(1, static_cast<std::uint32_t>(pool.placement().ranges.size()));
}

}  // namespace

Result<std::unique_ptr<PoolPreparation>> PoolPreparation::start(const Options& options,
                                                                const Clock& clock) {
  std::unique_ptr<PoolPreparation> preparation(new PoolPreparation(options, clock));
  try {
    preparation->thread_ = std::thread([&self = *preparation]() { self.run(); });
  } catch (const std::system_error& problem) {
    return fail(Errc::kInternal, "start the thread that prepares the pool: {}", problem.what());
  }
  return preparation;
}

PoolPreparation::PoolPreparation(const Options& options, const Clock& clock)
    // Attempts may each report a little before they fail.
    : options_(options), clock_(clock), deadline_(clock.now() + options.patience), news_(4096) {}

PoolPreparation::~PoolPreparation() {
  stop_.store(true);
  stopped_.signal();
  if (thread_.joinable()) thread_.join();
}

void PoolPreparation::report(PoolNews news) {
  const bool sent = news_.try_send(std::move(news));
  PEGA_ASSERT(sent, "the owner does not read the progress of the pool");
}

void PoolPreparation::report_status(std::string status) {
  report({.status = std::move(status), .done_bytes = 0, .prepared = nullptr, .error = {}});
}

void PoolPreparation::run() {
  auto prepared = std::make_unique<PreparedPool>();
  const auto done = prepare(*prepared);
  if (!done && stop_.load()) return;
  if (!done) {
    report({.status = "failed", .done_bytes = 0, .prepared = nullptr, .error = done.error()});
    return;
  }
  const std::uint64_t bytes = prepared->pool->size_bytes();
  report({.status = "ok", .done_bytes = bytes, .prepared = std::move(prepared), .error = {}});
}

Result<void> PoolPreparation::prepare(PreparedPool& prepared) {
  if (options_.keep == Keep::kNo) {
    warn_of_keeper();
    return create(prepared);
  }
  PEGA_TRY(connect(prepared));
  if (prepared.keeper) PEGA_TRY(take_over(prepared));
  if (prepared.pool == nullptr) PEGA_TRY(create(prepared));
  if (prepared.tables == nullptr) PEGA_TRY(make_tables(prepared));
  return {};
}

void PoolPreparation::warn_of_keeper() const {
  const auto state = keeper_state(options_.keeper);
  if (!state || !*state || (*state)->pool_bytes == 0) return;
  kLog.warn(
      "a keeper at {} holds a pool of {} beside that of this server: start with --keep yes to use "
      "it, or free it with `pegaflow-server --release`",
      options_.keeper.string(), format_bytes((*state)->pool_bytes));
}

Result<void> PoolPreparation::connect(PreparedPool& prepared) {
  if (options_.keep == Keep::kYes) {
    PEGA_TRY_LET(prepared.keeper, KeeperLink::open(options_.keeper));
    return {};
  }
  PEGA_TRY_LET(prepared.keeper, KeeperLink::connect(options_.keeper));
  if (!prepared.keeper) {
    kLog.warn("no keeper listens at {}: the pool ends with this server until one does",
              options_.keeper.string());
  }
  return {};
}

Result<void> PoolPreparation::take_over(PreparedPool& prepared) {
  PEGA_TRY_LET(
      std::optional<KeptPool> kept,
      prepared.keeper->take(
          clock_, {.deadline = deadline_, .stop = stop_, .waiting = [&](std::int32_t pid) {
                     report_status(fmt::format("waiting for the server with pid {} to end", pid));
                   }}));
  if (!kept) return {};
  const std::uint64_t bytes = kept->pool_bytes;
  auto adopted = adopt(std::move(*kept), prepared);
  if (adopted) return {};
  if (adopted.error().code == Errc::kCancelled) return adopted;
  kLog.warn("the kept pool is given up, and another one made pool={} reason=\"{}\"",
            format_bytes(bytes), adopted.error().detail);
  prepared.pool.reset();
  prepared.tables.reset();
  prepared.clients.clear();
  return prepared.keeper->drop();
}

Result<void> PoolPreparation::adopt(KeptPool&& kept, PreparedPool& prepared) {
  engine::Pool::Options wanted = options_.pool;
  if (options_.any_size) wanted.size_bytes = 0;
  PEGA_TRY_LET(engine::Pool pool, engine::Pool::adopt(std::move(kept.pool), wanted));
  PEGA_TRY_LET(KeptTables tables, KeptTables::open(std::move(kept.tables)));
  if (!tables.is_usable()) {
    return fail(Errc::kRefused, "its keeper does not know all processes that may access it");
  }
  const KeptTables::Layout layout = tables.layout();
  if (layout.pool_bytes != pool.size_bytes() || layout.numa_nodes != parts_of(pool)) {
    return fail(Errc::kRefused, "it lies on {} NUMA nodes, this one would on {}", layout.numa_nodes,
                parts_of(pool));
  }
  PEGA_TRY(wait_for_disks(tables));
  prepared.pool = std::make_unique<engine::Pool>(std::move(pool));
  prepared.clients = std::move(kept.clients);
  prepared.pool->set_huge_bytes(tables.huge_bytes());
  prepared.tables = std::make_unique<KeptTables>(std::move(tables));
  prepared.is_adopted = true;
  return {};
}

Result<void> PoolPreparation::wait_for_disks(const KeptTables& tables) {
  const auto record = tables.read(KeptTables::Record::kDisks);
  if (!record) return {};
  const std::string text(reinterpret_cast<const char*>(record->data()), record->size());
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\0', begin), text.size());
    const std::string path = text.substr(begin, end - begin);
    begin = end + 1;
    const UniqueFd file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!file) continue;  // Without the file nothing can be locked: its disk is gone.
    for (bool is_reported = false; ::flock(file.get(), LOCK_EX | LOCK_NB) != 0;) {
      if (errno != EWOULDBLOCK && errno != EINTR) return fail_errno(errno, "lock " + path);
      if (!std::exchange(is_reported, true)) {
        report_status("waiting for the last reads of the former server from " + path);
      }
      if (stopped_.wait(kDiskPollMs)) return fail(Errc::kCancelled, "stopped");
      if (clock_.now() >= deadline_) {
        return fail(Errc::kTimeout, "{} is locked: a process may still read from it into the pool",
                    path);
      }
    }
    ::flock(file.get(), LOCK_UN);
  }
  return {};
}

Result<void> record_disks(KeptTables& tables, const std::vector<std::string>& paths) {
  std::string text;
  // The next server may run in another directory.
  for (const std::string& path : paths) text += std::filesystem::absolute(path).string() + '\0';
  return tables.write(KeptTables::Record::kDisks, std::as_bytes(std::span(text)));
}

Result<void> PoolPreparation::make_tables(PreparedPool& prepared) {
  PEGA_TRY_LET(KeptTables tables, KeptTables::create({.pool = Id128::random(),
                                                      .pool_bytes = prepared.pool->size_bytes(),
                                                      .numa_nodes = parts_of(*prepared.pool)},
                                                     clock_));
  tables.set_huge_bytes(prepared.pool->huge_bytes());
  prepared.tables = std::make_unique<KeptTables>(std::move(tables));
  if (!prepared.keeper) return {};
  return prepared.keeper->put(prepared.pool->fd(), prepared.tables->fd(),
                              prepared.pool->size_bytes());
}

Result<engine::Pool> PoolPreparation::allocate() {
  std::atomic<std::uint64_t> reported{0};
  const auto progress = [&](std::uint64_t done, std::uint64_t size) {
    const std::uint64_t step = size / kReports + 1;
    std::uint64_t last = reported.load();
    if (done >= last + step && reported.compare_exchange_strong(last, done)) {
      report(
          {.status = "preparing the pool", .done_bytes = done, .prepared = nullptr, .error = {}});
    }
  };
  return engine::Pool::create(options_.pool, stop_, progress);
}

Result<void> PoolPreparation::create(PreparedPool& prepared) {
  bool is_waiting = false;
  for (;;) {
    if (!is_waiting) report_status("preparing the pool");
    auto pool = allocate();
    if (pool) {
      prepared.pool = std::make_unique<engine::Pool>(std::move(*pool));
      return {};
    }
    if (pool.error().code != Errc::kOutOfCapacity || clock_.now() >= deadline_) {
      return tl::unexpected<Error>(std::move(pool.error()));
    }
    if (!std::exchange(is_waiting, true)) {
      kLog.warn("memory is short, waiting reason=\"{}\"", pool.error().detail);
      report_status("waiting for the memory of a previous server");
    }
    const auto interval =
        std::chrono::duration_cast<std::chrono::milliseconds>(options_.retry_interval);
    if (stopped_.wait(static_cast<int>(interval.count()))) {
      return fail(Errc::kCancelled, "allocate the pool: stopped");
    }
  }
}

}  // namespace pegaflow::server
