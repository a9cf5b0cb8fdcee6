#include "router/request/engine_models.h"

#include <cstddef>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>

#include "router/page/pages.h"
#include "router/upstream/upstream.h"
#include "router/watch/model_watch.h"

namespace pegaflow::router {

namespace asio = boost::asio;

namespace {

using Lists = std::vector<std::string>;

/// Reads one engine's list, and appends it to `lists`.
asio::awaitable<void> read_list(std::shared_ptr<Lists> lists, Shared& shared,
                                std::shared_ptr<Engine> engine, std::string head) {
  const Result<ShortResponse> got =
      co_await get_from_engine(shared.engine_connections, engine, std::move(head),
                               shared.options.health_timeout, kModelListBytes);
  if (!got || got->status != 200) co_return;
  if (const auto ids = read_model_ids(got->body)) {
    engine->models.set(*ids);
    engine->models.set_adapters(read_adapter_ids(got->body));
  }
  lists->push_back(got->body);
}

}  // namespace

asio::awaitable<void> EngineModels::poll(
    const std::function<asio::awaitable<void>(std::shared_ptr<Engine>)>& poll_one) {
  // The polls outlive this coroutine when the client leaves: they share this state.
  struct Polls {
    std::size_t pending = 0;
    ClientWait* waiter = nullptr;  // nullptr after the client left.
  };
  Shared& shared = request_.shared();
  const auto polls = std::make_shared<Polls>();
  polls->waiter = &wait_;
  const auto count_down = [](std::shared_ptr<Polls> all,
                             asio::awaitable<void> one) -> asio::awaitable<void> {
    co_await std::move(one);
    if (--all->pending == 0 && all->waiter != nullptr) all->waiter->wake();
  };
  for (const auto& engine : shared.fleet.engines()) {
    if (!engine->is_up) continue;
    ++polls->pending;
    asio::co_spawn(shared.io, count_down(polls, poll_one(engine)), asio::detached);
  }
  if (polls->pending > 0) co_await wait_.wait_for_wake();
  polls->waiter = nullptr;
}

asio::awaitable<bool> EngineModels::is_unknown(const EngineNeeds& needs) {
  Shared& shared = request_.shared();
  if (needs.model.empty() || needs.pinned || !shared.fleet.is_unknown_model(needs.model)) {
    co_return false;
  }
  if (shared.now() - shared.models_refreshed < kModelsPause) co_return true;
  // An adapter may have been loaded since the last poll.
  shared.models_refreshed = shared.now();
  co_await poll([&shared](std::shared_ptr<Engine> engine) {
    return read_model_list(shared, std::move(engine));
  });
  co_return shared.fleet.is_unknown_model(needs.model);
}

asio::awaitable<Lists> EngineModels::lists() {
  Shared& shared = request_.shared();
  const auto lists = std::make_shared<Lists>();
  co_await poll([&](std::shared_ptr<Engine> engine) {
    std::string head = request_.engine_head(*engine, 0, false);
    return read_list(lists, shared, std::move(engine), std::move(head));
  });
  co_return *lists;
}

}  // namespace pegaflow::router
