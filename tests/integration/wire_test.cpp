// The response to each call of the protocol, from a real server.
#include <csignal>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "tests/integration/wire_engine.h"
#include "tests/support/server_process.h"
#include "tests/support/wire_client.h"

namespace pegaflow::testing {
namespace {

/// One engine may hold the whole pool.
const std::vector<std::string> kNoShares = {"--instance-share-percent", "100",
                                            "--node-share-percent", "100"};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_SUITE("hello") {
  TEST_CASE("the newest common version of both sides is used") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();

    WireClient newer(io, server.socket());
    const auto greeting = newer.hello({.minimum = kWireMaximum, .maximum = kWireMaximum + 1});

    CHECK(greeting.version == kWireMaximum);
    CHECK_FALSE(greeting.refused);
    CHECK_FALSE(greeting.server.is_none());
    CHECK_FALSE(greeting.connection.is_none());
  }

  TEST_CASE("without a common version both ranges and the side to upgrade are named") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();

    WireClient newer(io, server.socket());
    const auto too_new = newer.hello({.minimum = 5, .maximum = 6});
    WireClient older(io, server.socket());
    const auto too_old = older.hello({.minimum = 0, .maximum = 0});

    CHECK(too_new.version == 0);
    CHECK(too_new.minimum == kWireMinimum);
    CHECK(too_new.maximum == kWireMaximum);
    REQUIRE(too_new.refused);
    CHECK(too_new.refused->code == Errc::kRefused);
    CHECK(has(too_new.refused->detail, "versions 5 to 6"));
    CHECK(has(too_new.refused->detail, "1 to 4"));
    CHECK(has(too_new.refused->detail, "upgrade the server"));
    REQUIRE(too_old.refused);
    CHECK(has(too_old.refused->detail, "upgrade the client"));
    CHECK(server.metric(R"(pegaflow_rpc_requests_total{method="hello",status="refused"})") == 2);
  }

  TEST_CASE("a second hello is rejected") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient client(io, server.socket());
    client.hello();

    const auto second = client.hello();

    CHECK(second.version == 0);
    REQUIRE(second.refused);
    CHECK(second.refused->code == Errc::kInvalidArgument);
  }

  TEST_CASE("a hello that names the previous connection of another process is rejected") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient first(io, server.socket());
    const auto greeting = first.hello();

    WireClient second(io, server.socket());
    const auto refused = second.hello({.previous_connection = greeting.connection});

    REQUIRE(refused.refused);
    CHECK(refused.refused->code == Errc::kInvalidArgument);
    CHECK(first.attach("engine"));  // The first connection still works.
  }

  TEST_CASE("a process that cannot be watched can look up and gets no pool") {
    WireEngine engine;
    const auto keys = make_keys(1, 10);
    REQUIRE(engine.worker.save(engine.pool, engine.job(), keys) == 10);
    using Handle = WireClient::Handle;
    for (const Handle handle : {Handle::kNone, Handle::kNoDescriptor, Handle::kNoPidfd}) {
      WireClient client(engine.io, engine.server.socket());
      CHECK(client.hello({.handle = handle}).version == kWireMaximum);

      const auto pool = client.register_rank("another", kPage);

      REQUIRE_FALSE(pool);
      CHECK(pool.error().code == Errc::kRefused);
      CHECK(has(pool.error().detail, "pidfd"));
      CHECK(client.attach("engine"));
      CHECK(client.lookup(keys).blocks == 10);
    }
  }
}

TEST_SUITE("register") {
  TEST_CASE("the pool's descriptor comes with its size, and its seals hold") {
    WireEngine engine;

    CHECK(engine.pool.mapping.bytes().size() == 64 << 20);
    CHECK(engine.pool.namespace_hash.size() == 32);
    CHECK(::ftruncate(engine.pool.fd.get(), 0) == -1);
    CHECK(::ftruncate(engine.pool.fd.get(), 1 << 30) == -1);
    CHECK(::fcntl(engine.pool.fd.get(), F_ADD_SEALS, F_SEAL_WRITE) == -1);
  }

  TEST_CASE("two ranks save their shards of a block, and it is found once both have") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    const auto rank = [&](std::uint32_t number, std::uint64_t page_bytes) {
      return Registration{.instance = "engine",
                          .rank = number,
                          .ranks = 2,
                          .shard = number,
                          .shards = 2,
                          .factors = {{"weights", "a"}},
                          .page_bytes = page_bytes};
    };
    WireClient first(io, server.socket());
    first.hello();
    const auto first_pool = first.register_rank(rank(0, kPage));
    REQUIRE(first_pool);
    REQUIRE(first.attach("engine"));
    const auto keys = make_keys(1, 5);
    const JobId job{Id128::random(), 1};
    // One rank is missing: everything is a miss, and nothing is reserved.
    CHECK_FALSE(first.lookup(keys).complete);
    CHECK(first.reserve(job, keys).value() == std::vector<std::uint32_t>(5, 0xFFFFFFFF));
    CHECK(has(server.get("/instances").body, "waiting for ranks"));
    WireClient second(io, server.socket());
    second.hello();
    const auto second_pool = second.register_rank(rank(1, 3 * kPage));
    REQUIRE(second_pool);
    CHECK(first.lookup(keys).complete);

    const JobId saved{Id128::random(), 2};
    const auto of_first = first.reserve(saved, keys).value();
    const auto of_second = second.reserve(saved, keys).value();
    for (std::size_t i = 0; i < keys.size(); ++i) {
      CHECK(of_second[i] == of_first[i] + 1);  // Adjacent in a frame.
    }
    REQUIRE(first.publish(saved));
    CHECK(first.lookup(keys).blocks == 0);
    REQUIRE(second.publish(saved));
    CHECK(first.lookup(keys).blocks == 5);

    const Id128 token = Id128::random();
    REQUIRE(first.claim(token, keys).value().blocks == 5);
    CHECK(first.open(token, 0, 5, 1).value() == of_first);
    CHECK(second.open(token, 0, 5, 1).value() == of_second);
    REQUIRE(second.goodbye());
    CHECK_FALSE(first.lookup(keys).complete);
  }

  TEST_CASE("invalid registrations are rejected") {
    ServerProcess server;
    auto io = kj::setupAsyncIo();
    WireClient client(io, server.socket());
    client.hello();
    const auto code = [&](const Registration& registration) {
      const auto pool = client.register_rank(registration);
      REQUIRE_FALSE(pool);
      return pool.error().code;
    };
    const Registration right = {
        .instance = "a", .factors = {{"x", "y"}}, .page_bytes = kPage, .block_count = 1};

    Registration wrong = right;
    wrong.instance = "";
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong.instance = std::string(257, 'i');
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong = right;
    wrong.rank = 1;
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong = right;
    wrong.factors.clear();
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong.factors.assign(2000, {"f", "v"});
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong = right;
    wrong.page_bytes = 0;
    CHECK(code(wrong) == Errc::kInvalidArgument);
    wrong.page_bytes = (std::uint64_t{1} << 30) + 1;
    CHECK(code(wrong) == Errc::kRefused);
    wrong.page_bytes = std::uint64_t{1} << 29;  // More than the pool.
    CHECK(code(wrong) == Errc::kRefused);
    // After all of these a valid one is served.
    CHECK(client.register_rank(right));
  }

  TEST_CASE("another page size in one namespace is rejected, and both sizes are named") {
    WireEngine engine;
    WireClient other(engine.io, engine.server.socket());
    other.hello();

    const auto pool = other.register_rank("other", 8192);

    REQUIRE_FALSE(pool);
    CHECK(pool.error().code == Errc::kRefused);
    CHECK(has(pool.error().detail, "4096"));
    CHECK(has(pool.error().detail, "8192"));
    CHECK(engine.server.metric(R"(pegaflow_registrations_refused_total{reason="page_size"})") == 1);
  }

  TEST_CASE("engines of other page sizes are served side by side, with pages of their own") {
    WireEngine engine;
    const auto keys = make_keys(1, 4);
    REQUIRE(engine.worker.save(engine.pool, engine.job(), keys) == 4);
    WireClient other(engine.io, engine.server.socket());
    other.hello();
    const auto pool = other.register_rank(
        {.instance = "other", .factors = {{"weights", "b"}}, .page_bytes = 10000});
    REQUIRE(pool);
    CHECK(other.save(*pool, {Id128::random(), 1}, keys) == 4);
    REQUIRE(other.attach("other"));

    CHECK(other.lookup(keys).blocks == 4);
    CHECK(engine.scheduler.lookup(keys).blocks == 4);
    CHECK(engine.server.metric(R"(pegaflow_pool_blocks{block_bytes="4096"})") == 4);
    CHECK(engine.server.metric(R"(pegaflow_pool_blocks{block_bytes="12288"})") == 4);
  }

  TEST_CASE("one process at a time serves an instance") {
    WireEngine engine;
    WireClient other(engine.io, engine.server.socket());
    other.hello();

    const auto refused = other.register_rank("engine", kPage);

    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Errc::kRefused);
    CHECK(has(refused.error().detail, to_string(engine.worker.process())));
  }

  TEST_CASE("the same process takes its instance over from its former connection") {
    WireEngine engine;
    WireClient again(engine.io, engine.server.socket());
    again.hello({.process = engine.worker.process()});

    const auto pool = again.register_rank("engine", kPage);

    CHECK(pool);
    // The former connection was closed.
    CHECK(engine.server.metric("pegaflow_connections") == 2);
    CHECK_THROWS_AS((void)engine.worker.reserve(engine.job(), make_keys(1, 1)), kj::Exception);
  }

  TEST_CASE("a repeated registration has the same result; a different one is rejected") {
    WireEngine engine;

    const auto same = engine.worker.register_rank("engine", kPage);
    const auto other = engine.worker.register_rank("another", kPage);

    REQUIRE(same);
    CHECK(same->namespace_hash == engine.pool.namespace_hash);
    REQUIRE_FALSE(other);
    CHECK(other.error().code == Errc::kInvalidArgument);
    CHECK(engine.worker.attach("another").error().code == Errc::kInvalidArgument);
    CHECK(engine.worker.attach("engine"));  // A worker may be its own scheduler.
  }
}

TEST_SUITE("save and load") {
  TEST_CASE("a saved block is found, claimed and opened, and has its bytes") {
    WireEngine engine;
    const auto keys = make_keys(1, 1500);  // Three slices.
    CHECK(engine.scheduler.lookup(keys).blocks == 0);

    CHECK(engine.worker.save(engine.pool, engine.job(), keys) == 1500);

    CHECK(engine.scheduler.lookup(keys).blocks == 1500);
    const Id128 token = Id128::random();
    const auto claimed = engine.scheduler.claim(token, keys);
    REQUIRE(claimed);
    CHECK(claimed->blocks == 1500);
    const auto slots = engine.worker.open(token, 100, 1000, 7);
    REQUIRE(slots);
    bool all_right = true;
    for (std::size_t i = 0; i < slots->size(); ++i) {
      const auto page = engine.pool.slot((*slots)[i]);
      all_right = all_right && page.front() == keys[100 + i].bytes[0] &&
                  page.back() == keys[100 + i].bytes[0];
    }
    CHECK(all_right);
    CHECK(engine.server.metric("pegaflow_pins") == 1);
    CHECK(engine.server.metric("pegaflow_claims") == 1);
    CHECK(engine.server.metric("pegaflow_oldest_pin_seconds") > 0);
    CHECK(engine.server.metric("pegaflow_save_bytes_total") == 1500 * kPage);
    CHECK(engine.server.metric("pegaflow_load_bytes_total") == 1000 * kPage);
    CHECK(engine.server.metric(R"(pegaflow_load_blocks_total{written_by="this_process"})") == 1000);
    CHECK(engine.server.metric("pegaflow_cache_block_insertions_total") == 1500);

    // Repeated under one name it is the same pin, and no second load.
    CHECK(*engine.worker.open(token, 100, 1000, 7) == *slots);
    CHECK(engine.server.metric("pegaflow_load_bytes_total") == 1000 * kPage);
    CHECK(engine.worker.open(token, 0, 1000, 7).error().code == Errc::kInvalidArgument);

    CHECK(engine.worker.release(7));
    CHECK(engine.worker.release(7));
    CHECK(engine.scheduler.unclaim(token));
    CHECK(engine.scheduler.unclaim(token));
    CHECK(engine.server.metric("pegaflow_pins") == 0);
    CHECK(engine.server.metric("pegaflow_claims") == 0);
    CHECK(engine.server.metric("pegaflow_oldest_pin_seconds") == 0);
  }

  TEST_CASE("blocks that another process wrote are counted as such") {
    WireEngine engine;
    const auto keys = make_keys(1, 8);
    REQUIRE(engine.worker.save(engine.pool, engine.job(), keys) == 8);
    REQUIRE(engine.worker.goodbye());
    WireClient heir(engine.io, engine.server.socket());
    heir.hello();
    REQUIRE(heir.register_rank("engine", kPage));
    const Id128 token = Id128::random();
    REQUIRE(engine.scheduler.claim(token, keys));

    REQUIRE(heir.open(token, 0, 8, 1));

    CHECK(engine.server.metric(R"(pegaflow_load_blocks_total{written_by="another_process"})") == 8);
    CHECK(engine.server.metric(R"(pegaflow_load_blocks_total{written_by="this_process"})") == 0);
  }

  TEST_CASE("a reservation has as many depths as keys, or none") {
    WireEngine engine;
    const auto keys = make_keys(1, 3);
    const std::vector<std::uint8_t> depths = {1, 2, 255};

    const auto refused =
        engine.worker.reserve(engine.job(), keys, 0, 0, std::span(depths).first(2));
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == Errc::kInvalidArgument);
    CHECK(has(refused.error().detail, "2 depths for 3 keys"));
    CHECK(engine.server.metric("pegaflow_reservations") == 0);

    const JobId job = engine.job();
    CHECK(engine.worker.reserve(job, keys, 0, 0, depths));
    CHECK(engine.worker.publish(job));
    CHECK(engine.worker.lookup(keys).blocks == 3);
  }

  TEST_CASE("a block that exists or is being saved is skipped") {
    WireEngine engine;
    const auto keys = make_keys(1, 6);
    REQUIRE(engine.worker.save(engine.pool, engine.job(), std::span(keys).first(2)) == 2);
    const JobId pending = engine.job();
    REQUIRE(engine.worker.reserve(pending, std::span(keys).subspan(2, 2)));

    const auto slots = engine.worker.reserve(engine.job(), keys);

    REQUIRE(slots);
    std::size_t skipped = 0;
    for (const std::uint32_t slot : *slots) skipped += slot == ~std::uint32_t{0} ? 1 : 0;
    CHECK(skipped == 4);
    CHECK(engine.server.metric("pegaflow_reservations") == 2);
    CHECK(engine.worker.abandon(pending));
    CHECK(engine.worker.abandon(pending));
    CHECK(engine.server.metric("pegaflow_reservations") == 1);
  }

  TEST_CASE("an abandon behind a long reserve finds it completed") {
    WireEngine engine;
    const JobId job = engine.job();
    const auto keys = make_keys(1, 8192);  // Sixteen slices.
    auto reserve = engine.worker.session().reserveRequest();
    write_job(job, reserve.initJob());
    write_keys(keys, 32, reserve.initKeys());
    auto abandon = engine.worker.session().abandonRequest();
    write_job(job, abandon.initJob());

    auto reserved = reserve.send();
    auto abandoned = abandon.send();
    abandoned.wait(engine.io.waitScope);
    const auto slots = reserved.wait(engine.io.waitScope);

    CHECK(slots.getSlots().size() == 8192);
    CHECK(engine.server.metric("pegaflow_reservations") == 0);
    CHECK(engine.server.metric_becomes(R"(pegaflow_pool_slots{state="reserved"})", 0));
    CHECK(engine.worker.publish(job).error().code == Errc::kGone);
  }

  TEST_CASE("a long claim and a long open run in slices and have one response each") {
    WireEngine engine({.arguments = kNoShares});
    const auto keys = make_keys(1, 8192);
    const JobId job = engine.job();
    const auto slots = engine.worker.reserve(job, keys);
    REQUIRE(slots);
    REQUIRE(engine.worker.publish(job));
    const Id128 token = Id128::random();
    CHECK(engine.scheduler.claim(token, keys)->blocks == 8192);
    const auto pages = engine.worker.open(token, 0, 8192, 1);
    REQUIRE(pages);
    CHECK(*pages == *slots);
    CHECK(*engine.worker.open(token, 0, 8192, 1) == *slots);
    CHECK(engine.server.metric("pegaflow_pins") == 1);
  }

  TEST_CASE("a call that ends a long claim or a long pin finds it completed") {
    WireEngine engine({.arguments = kNoShares});
    const auto keys = make_keys(1, 8192);
    REQUIRE(engine.worker.save(engine.pool, engine.job(), keys) == 8192);
    const Id128 token = Id128::random();
    const auto claim = [&](WireClient& client) {
      auto request = client.session().claimRequest();
      write_id(token, request.initToken());
      write_keys(keys, 32, request.initKeys());
      return request.send();
    };
    const auto unclaim = [&](WireClient& client) {
      auto request = client.session().unclaimRequest();
      write_id(token, request.initToken());
      return request.send();
    };
    auto claimed = claim(engine.scheduler);
    unclaim(engine.scheduler).wait(engine.io.waitScope);
    CHECK(claimed.wait(engine.io.waitScope).getReady() == 8192);
    CHECK(engine.server.metric_becomes("pegaflow_held_blocks", 0));

    CHECK(engine.scheduler.claim(token, keys)->blocks == 8192);
    auto open = engine.worker.session().openRequest();
    write_id(token, open.initToken());
    open.setCount(8192);
    open.setPin(1);
    auto release = engine.worker.session().releaseRequest();
    release.setPin(1);
    auto opened = open.send();
    release.send().wait(engine.io.waitScope);
    CHECK(opened.wait(engine.io.waitScope).getSlots().size() == 8192);
    CHECK(engine.server.metric("pegaflow_pins") == 0);
    CHECK(engine.scheduler.unclaim(token));
    CHECK(engine.server.metric_becomes("pegaflow_held_blocks", 0));
  }

  TEST_CASE("a claim that is revoked between its slices is gone, or has all of its blocks") {
    WireEngine engine({.arguments = kNoShares});
    const auto keys = make_keys(1, 8192);
    REQUIRE(engine.worker.save(engine.pool, engine.job(), keys) == 8192);
    // Both are in the socket, or arrive between two slices.
    engine.server.signal(SIGSTOP);
    auto claim = engine.scheduler.session().claimRequest();
    write_id(Id128::random(), claim.initToken());
    write_keys(keys, 32, claim.initKeys());
    auto claimed = claim.send();
    auto reset = engine.worker.session().resetCacheRequest().send();
    engine.io.waitScope.poll();
    engine.server.signal(SIGCONT);

    reset.wait(engine.io.waitScope);
    const auto answer = claimed.wait(engine.io.waitScope);
    if (answer.hasError()) {
      CHECK(read_error(answer.getError()).code == Errc::kGone);
    } else {
      CHECK((answer.getReady() == 8192 || answer.getReady() == 0));
    }
    CHECK(engine.server.metric_becomes("pegaflow_held_blocks", 0));
    CHECK(engine.server.metric("pegaflow_claims") == 0);
  }

  TEST_CASE("a lookup overtakes a long reserve") {
    WireEngine engine;
    const auto keys = make_keys(1, 4096);  // Eight slices; fits the socket's buffer.
    std::vector<std::string> answered;
    auto reserve = engine.worker.session().reserveRequest();
    write_job(engine.job(), reserve.initJob());
    write_keys(keys, 32, reserve.initKeys());
    auto lookup = engine.worker.session().lookupRequest();
    write_keys(std::span(keys).first(1), 32, lookup);

    // Both are in the socket before the server reads.
    engine.server.signal(SIGSTOP);
    auto reserved = reserve.send().then([&](auto&&) { answered.emplace_back("reserve"); });
    auto looked_up = lookup.send().then([&](auto&&) { answered.emplace_back("lookup"); });
    engine.io.waitScope.poll();
    engine.server.signal(SIGCONT);
    auto first = looked_up.eagerlyEvaluate(nullptr);
    reserved.wait(engine.io.waitScope);
    first.wait(engine.io.waitScope);

    CHECK(answered == std::vector<std::string>{"lookup", "reserve"});
  }

  TEST_CASE("a reservation that timed out is forgotten, and its publish is rejected") {
    WireEngine engine({.arguments = {"--reservation-timeout", "100ms"}});
    const JobId job = engine.job();
    const auto keys = make_keys(1, 3);
    REQUIRE(engine.worker.reserve(job, keys));
    REQUIRE(engine.server.metric_becomes(R"(pegaflow_quarantine_slots{reason="timeout"})", 3));

    const auto late = engine.worker.publish(job);

    CHECK(late.error().code == Errc::kGone);
    CHECK(engine.scheduler.lookup(keys).blocks == 0);
    CHECK(engine.server.metric(R"(pegaflow_quarantine_slots{reason="timeout"})") == 0);
    CHECK(engine.server.metric("pegaflow_reservations_timed_out_total") == 1);
    CHECK(engine.server.metric("pegaflow_late_publishes_total") == 1);
  }

  TEST_CASE("after reset_cache no block is found, and a claimed block is gone") {
    WireEngine engine;
    const auto keys = make_keys(1, 5);
    REQUIRE(engine.worker.save(engine.pool, engine.job(), keys) == 5);
    const Id128 token = Id128::random();
    REQUIRE(engine.scheduler.claim(token, keys));

    const auto generation = engine.scheduler.reset_cache();

    CHECK(generation == 2);
    CHECK(engine.scheduler.lookup(keys).blocks == 0);
    CHECK(engine.worker.open(token, 0, 5, 1).error().code == Errc::kGone);
    CHECK(engine.server.metric_becomes("pegaflow_cache_resident_blocks", 0));
    CHECK(engine.worker.save(engine.pool, engine.job(), keys) == 5);
    CHECK(engine.scheduler.lookup(keys).blocks == 5);
  }

  TEST_CASE("a claim is shortened to the instance's share") {
    WireEngine engine({.pool_size = "1mb", .arguments = {"--instance-share-percent", "25"}});
    const auto keys = make_keys(1, 200);
    REQUIRE(engine.worker.save(engine.pool, engine.job(), keys) == 200);

    const auto claimed = engine.scheduler.claim(Id128::random(), keys);

    REQUIRE(claimed);
    CHECK(claimed->blocks == 64);  // Of 256 slots.
    CHECK(engine.server.metric("pegaflow_claims_shortened_total") == 1);
  }

  TEST_CASE("a pool smaller than a request skips the blocks that do not fit") {
    WireEngine engine({.pool_size = "1mb"});

    const auto written = engine.worker.save(engine.pool, engine.job(), make_keys(1, 400));

    CHECK(written == 256);
    CHECK(engine.server.metric("pegaflow_pool_alloc_failures_total") == 144);
    CHECK(engine.server.metric(R"(pegaflow_save_skipped_blocks_total{reason="no_room"})") == 144);
  }

  TEST_CASE("without its rank an instance is incomplete, and everything is a miss") {
    WireEngine engine;
    const auto keys = make_keys(1, 5);
    REQUIRE(engine.worker.save(engine.pool, engine.job(), keys) == 5);
    CHECK(engine.scheduler.lookup(keys).complete);
    REQUIRE(engine.worker.goodbye());

    const auto found = engine.scheduler.lookup(keys);
    const auto claimed = engine.scheduler.claim(Id128::random(), keys);

    CHECK(found.blocks == 0);
    CHECK_FALSE(found.complete);
    REQUIRE(claimed);
    CHECK(claimed->blocks == 0);
    CHECK_FALSE(claimed->complete);
    CHECK(engine.scheduler.reset_cache().error().code == Errc::kGone);

    // Its next incarnation finds the blocks of the former one.
    WireClient heir(engine.io, engine.server.socket());
    heir.hello();
    REQUIRE(heir.register_rank("engine", kPage));
    CHECK(engine.scheduler.lookup(keys).blocks == 5);
  }

  TEST_CASE("calls in the wrong state are rejected and change nothing") {
    WireEngine engine;
    const auto keys = make_keys(1, 3);
    WireClient stranger(engine.io, engine.server.socket());
    stranger.hello();

    CHECK(stranger.claim(Id128::random(), keys).error().code == Errc::kInvalidArgument);
    CHECK(stranger.reserve(engine.job(), keys).error().code == Errc::kInvalidArgument);
    CHECK(stranger.lookup(keys).blocks == 0);
    // A scheduler is no worker.
    CHECK(engine.scheduler.reserve(engine.job(), keys).error().code == Errc::kInvalidArgument);
    CHECK(engine.scheduler.open(Id128::random(), 0, 1, 1).error().code == Errc::kInvalidArgument);
    CHECK(engine.scheduler.release(1).error().code == Errc::kInvalidArgument);
    CHECK(engine.scheduler.publish(engine.job()).error().code == Errc::kInvalidArgument);
    CHECK(engine.scheduler.abandon(engine.job()).error().code == Errc::kInvalidArgument);
    CHECK(engine.worker.open(Id128::random(), 0, 1, 1).error().code == Errc::kGone);
    CHECK(engine.scheduler.claim(Id128(), keys).error().code == Errc::kInvalidArgument);
    // Beyond the limits of the wire.
    CHECK(engine.worker.reserve(engine.job(), make_keys(1, 8193)).error().code ==
          Errc::kInvalidArgument);
    CHECK(engine.server.metric("pegaflow_reservations") == 0);
  }

  TEST_CASE("after goodbye nothing is left, and no call is answered") {
    WireEngine engine;
    const auto keys = make_keys(1, 5);
    REQUIRE(engine.worker.reserve(engine.job(), keys));

    REQUIRE(engine.worker.goodbye());

    CHECK(engine.server.metric("pegaflow_reservations") == 0);
    CHECK(engine.server.metric("pegaflow_pool_used_bytes") == 0);
    CHECK(engine.worker.reserve(engine.job(), keys).error().code == Errc::kGone);
    CHECK(engine.worker.goodbye().error().code == Errc::kGone);
  }
}

}  // namespace
}  // namespace pegaflow::testing
