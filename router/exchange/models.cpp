// The part of Exchange that asks engines for their models.
#include <utility>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "router/client_connection.h"
#include "router/exchange/exchange.h"
#include "router/page/pages.h"
#include "router/watch/model_watch.h"

namespace pegaflow::router {

namespace asio = boost::asio;
using boost::system::error_code;

asio::awaitable<void> Exchange::ask_engines(
    const std::function<asio::awaitable<void>(std::shared_ptr<Engine>)>& ask) {
  // All at once; the slowest one that answers in time decides how long it takes.
  struct Asked {
    std::size_t open = 0;
    asio::steady_timer* waiting = nullptr;  // None once the client left.
  };
  const auto asked = std::make_shared<Asked>();
  asked->waiting = &timer_;
  timer_.expires_at(TimePoint::max());
  const auto wait_for = [](std::shared_ptr<Asked> all,
                           asio::awaitable<void> question) -> asio::awaitable<void> {
    co_await std::move(question);
    if (--all->open == 0 && all->waiting != nullptr) all->waiting->cancel();
  };
  for (const auto& engine : shared_.fleet.engines()) {
    if (!engine->is_up) continue;
    ++asked->open;
    asio::co_spawn(shared_.io, wait_for(asked, ask(engine)), asio::detached);
  }
  error_code ignored;
  if (asked->open > 0) {
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
  asked->waiting = nullptr;
}

asio::awaitable<bool> Exchange::is_unknown_model() {
  if (model_.empty() || pinned_ || !shared_.fleet.is_unknown_model(model_)) co_return false;
  if (shared_.now() - shared_.models_refreshed < kModelsPause) co_return true;
  // An adapter may have been loaded since the engines were asked.
  shared_.models_refreshed = shared_.now();
  co_await ask_engines([this](std::shared_ptr<Engine> engine) {
    return read_model_list(shared_, std::move(engine));
  });
  co_return shared_.fleet.is_unknown_model(model_);
}

asio::awaitable<bool> Exchange::models() {
  const auto answers = std::make_shared<std::vector<std::string>>();
  const auto ask = [](std::shared_ptr<std::vector<std::string>> all, Shared& shared,
                      std::shared_ptr<Engine> engine,
                      std::string request) -> asio::awaitable<void> {
    const Result<ShortResponse> got =
        co_await get_from_engine(shared.engine_connections, engine, std::move(request),
                                 shared.options.health_timeout, kModelListBytes);
    if (!got || got->status != 200) co_return;
    if (const auto ids = read_model_ids(got->body)) engine->models.set(*ids);
    all->push_back(got->body);
  };
  co_await ask_engines([&](std::shared_ptr<Engine> engine) {
    std::string request = engine_request(*engine, 0, false);
    return ask(answers, shared_, std::move(engine), std::move(request));
  });
  if (client_.is_gone()) co_return false;
  if (answers->empty()) {
    ++shared_.metrics.no_engine;
    co_return co_await answer(503, "no engine says which models it has", "Retry-After: 1\r\n");
  }
  const std::string page = merge_models(*answers);
  status_ = 200;
  const std::string head = fmt::format(
      "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n"
      "X-Request-Id: {}\r\n{}{}\r\n",
      page.size(), request_id_, cors_, keeps_connection() ? "" : "Connection: close\r\n");
  co_return co_await client_.send(head, is_head() ? std::string_view() : page);
}

}  // namespace pegaflow::router
