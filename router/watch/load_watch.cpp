#include "router/watch/load_watch.h"

#include <chrono>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>

#include "router/kv/kv_routing.h"
#include "router/routing/engine_load.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

/// For engines that have no metrics, or none that are known.
constexpr Duration kWithoutMetrics = std::chrono::minutes(1);

/// The question to an engine, which ends with its scope.
class Question {
 public:
  explicit Question(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  ~Question() { engine_->load.is_asked = false; }
  Question(const Question&) = delete;
  Question& operator=(const Question&) = delete;

 private:
  std::shared_ptr<Engine> engine_;
};

asio::awaitable<void> ask(Shared& shared, std::shared_ptr<Engine> engine) {
  const Question question(engine);
  const Result<ShortResponse> got = co_await get_from_engine(
      shared.engine_connections, engine, get_head(*engine, "/metrics", shared.engine_key),
      shared.options.health_timeout, kMaxEngineMetrics);
  --engine->counters.requests;  // Counts requests of clients only.
  if (shared.kv == nullptr || engine->is_removed) co_return;
  bool is_known = false;
  if (got && got->status == 200) {
    for (const RankLoad& each : read_engine_load(got->body)) {
      shared.kv->set_load(engine->id, each.rank, each.load, shared.now());
      is_known = true;
    }
  }
  // One that is slow or fails may have the page.
  if (got && got->status < 500 && !is_known) engine->load.next = shared.now() + kWithoutMetrics;
}

}  // namespace

void refresh_engine_load(Shared& shared, const std::shared_ptr<Engine>& engine) {
  const Duration interval = shared.options.engine_load_interval;
  if (shared.kv == nullptr || interval == Duration::zero() || engine->load.is_asked) return;
  const TimePoint now = shared.now();
  if (now < engine->load.next) return;
  engine->load.is_asked = true;
  engine->load.next = now + interval;
  asio::co_spawn(shared.io, ask(shared, engine), asio::detached);
}

}  // namespace pegaflow::router
