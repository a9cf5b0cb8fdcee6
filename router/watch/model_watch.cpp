#include "router/watch/model_watch.h"

#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>

#include "router/page/pages.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

namespace asio = boost::asio;

asio::awaitable<void> read_model_list(Shared& shared, std::shared_ptr<Engine> engine) {
  if (engine->models.is_asked) co_return;
  engine->models.is_asked = true;
  engine->models.asked_at = shared.now();
  std::string request = get_head(*engine, "/v1/models", shared.engine_key);
  const Result<ShortResponse> got =
      co_await get_from_engine(shared.engine_connections, engine, std::move(request),
                               shared.options.health_timeout, kModelListBytes);
  --engine->counters.requests;  // Counts requests of clients only.
  engine->models.is_asked = false;
  if (!got || got->status != 200) co_return;
  const auto ids = read_model_ids(got->body);
  if (ids) engine->models.set_adapters(read_adapter_ids(got->body));
  // A request may wait for a model that this engine lists now.
  if (ids && engine->models.set(*ids)) shared.line.serve_all(shared.fleet, shared.now());
}

void refresh_model_list(Shared& shared, const std::shared_ptr<Engine>& engine, Duration pause) {
  ModelList& models = engine->models;
  if (models.is_asked || (models.asked_at && shared.now() - *models.asked_at < pause)) return;
  asio::co_spawn(shared.io, read_model_list(shared, engine), asio::detached);
}

}  // namespace pegaflow::router
