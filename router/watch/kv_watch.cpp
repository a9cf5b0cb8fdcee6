#include "router/watch/kv_watch.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <fmt/format.h>

#include "router/config/event_endpoints.h"
#include "router/upstream/upstream.h"

namespace pegaflow::router {

namespace asio = boost::asio;
using boost::system::error_code;

namespace {

/// Batches in one event-loop iteration: about 0.1 ms each at most.
constexpr std::size_t kBatches = 16;
constexpr Duration kTick = std::chrono::milliseconds(250);
constexpr Duration kLeastTick = std::chrono::milliseconds(10);

/// The event streams of an engine, or why there are none.
struct Sources {
  std::vector<index::EventAddress> addresses{};
  std::string why{};
};

Sources read_sources(Result<std::vector<index::EventAddress>> read) {
  if (!read) return {.why = read.error().detail};
  if (read->empty()) return {.why = "the engine publishes no KV events (--kv-events-config)"};
  return {.addresses = std::move(*read)};
}

asio::awaitable<void> ask(Shared& shared, std::shared_ptr<Engine> engine) {
  std::string request = get_head(*engine, "/kv_event_sources", shared.engine_key);
  const Result<ShortResponse> got =
      co_await get_from_engine(shared.engine_connections, engine, std::move(request),
                               shared.options.health_timeout, index::kMaxSourcesText);
  --engine->counters.requests;  // Counts requests of clients only.
  if (!got || shared.kv == nullptr || engine->is_removed) {
    engine->event_sources.is_asked = false;  // Asked again with the next health check.
    co_return;
  }
  Sources sources;
  if (got->status == 200) {
    sources = read_sources(index::parse_kv_event_sources(got->body, engine->url.host));
  } else {
    sources.why = fmt::format(
        "GET /kv_event_sources returned {}; --kv-events can name the endpoint", got->status);
  }
  if (got->status == 404) {
    // Not vLLM, or an old one. SGLang tells it elsewhere.
    const Result<ShortResponse> info = co_await get_from_engine(
        shared.engine_connections, engine, get_head(*engine, "/server_info", shared.engine_key),
        shared.options.health_timeout, index::kMaxServerInfoText);
    --engine->counters.requests;
    if (shared.kv == nullptr || engine->is_removed) co_return;
    if (!info || (info->status != 200 && info->status != 404)) {
      // A busy SGLang answers late: its stream stays.
      engine->event_sources.is_asked = false;
      co_return;
    }
    if (info->status == 200) {
      sources = read_sources(index::parse_server_info(info->body, engine->url.host));
    }
  }
  engine->event_sources.is_asked = false;
  shared.kv->fleet().set_addresses(engine->id, std::move(sources.addresses), std::move(sources.why),
                                   shared.now());
}

}  // namespace

Result<KvParts> KvParts::create(const RouterOptions& options, std::uint64_t seed) {
  KvParts parts;
  PEGA_TRY_LET(parts.events, index::EventSocket::start({}));
  index::EventSocket* const events = parts.events.get();
  KvStreams streams{
      .add = [events](
                 index::StreamId id,
                 index::EventSocket::Stream stream) { return events->add(id, std::move(stream)); },
      .remove = [events](index::StreamId id) { events->remove(id); },
      .replay = [events](index::StreamId id, std::uint64_t ticket,
                         std::uint64_t sequence) { return events->replay(id, ticket, sequence); }};
  PEGA_TRY_LET(parts.routing,
               KvRouting::create({.index_blocks = static_cast<std::size_t>(options.index_blocks),
                                  .text_bytes = options.text_index_bytes,
                                  .seed = seed,
                                  .key_bytes = options.full_key_bytes(),
                                  .hash_seeds = options.hash_seeds},
                                 std::move(streams)));
  return parts;
}

KvWatch::KvWatch(Shared& shared, KvParts& parts)
    : shared_(shared), parts_(parts), ready_(shared.io), timer_(shared.io) {}

void KvWatch::start() {
  // A duplicate: Asio closes its own descriptor.
  const int copy = ::dup(parts_.events->fd());
  if (copy >= 0) {
    ready_.assign(copy);
    asio::co_spawn(shared_.io, receive(), asio::detached);
  }
  asio::co_spawn(shared_.io, keep_time(), asio::detached);
}

void KvWatch::stop() {
  stopped_ = true;
  error_code ignored;
  ready_.close(ignored);
  timer_.cancel();
}

asio::awaitable<void> KvWatch::receive() {
  while (!stopped_) {
    error_code ec;
    co_await ready_.async_wait(asio::posix::stream_descriptor::wait_read,
                               asio::redirect_error(asio::use_awaitable, ec));
    if (ec || stopped_) co_return;
    const TimePoint now = shared_.now();
    parts_.events->drain(kBatches, [&](index::Arrival&& arrival) {
      parts_.routing->fleet().arrive(std::move(arrival), now);
    });
    // Others get their turn before the rest.
    co_await asio::post(shared_.io, asio::use_awaitable);
  }
}

asio::awaitable<void> KvWatch::keep_time() {
  // Engines that requests wait for still have half of that to compute.
  const Duration queue_time = shared_.options.engine_queue_time;
  const Duration tick = queue_time > Duration::zero()
                            ? std::clamp<Duration>(queue_time / 2, kLeastTick, kTick)
                            : kTick;
  while (!stopped_) {
    shared_.line.serve_all(shared_.fleet, shared_.now());
    bool has_more = parts_.routing->tick(shared_.now());
    while (has_more && !stopped_) {
      co_await asio::post(shared_.io, asio::use_awaitable);
      has_more = parts_.routing->work();
    }
    error_code ignored;
    timer_.expires_after(tick);
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
}

void refresh_event_sources(Shared& shared, const std::shared_ptr<Engine>& engine) {
  if (shared.kv == nullptr || engine->event_sources.is_asked) return;
  const TimePoint now = shared.now();
  EventSourcesState& state = engine->event_sources;
  const bool is_due = !shared.kv->fleet().was_asked(engine->id) || !state.asked_at ||
                      now - *state.asked_at >= shared.options.event_sources_interval;
  if (!is_due) return;
  state.asked_at = now;
  std::vector<index::EventAddress> named;
  if (shared.event_endpoints != nullptr) named = shared.event_endpoints->of(engine->url);
  if (!named.empty()) {
    shared.kv->fleet().set_addresses(engine->id, std::move(named), {}, now);
    return;
  }
  state.is_asked = true;
  asio::co_spawn(shared.io, ask(shared, engine), asio::detached);
}

}  // namespace pegaflow::router
