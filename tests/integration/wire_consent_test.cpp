// The consent of workers to reads of their memory, at a real server.
#include <sys/mman.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "capnp/wire/carried_descriptor.h"
#include "tests/integration/wire_engine.h"

namespace pegaflow::testing {
namespace {

constexpr std::uint32_t kGuards = 4;

UniqueFd guards() {
  UniqueFd fd(::memfd_create("guards", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(fd.get(), kGuards * sizeof(std::uint64_t)) == 0);
  REQUIRE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  return fd;
}

/// A worker of a direct group that registers nothing but its words about consent.
class Worker : public WireClient {
 public:
  Worker(WireEngine& engine, const std::string& name, bool needs_consent)
      : WireClient(engine.io, engine.server.socket()), scope_(engine.io.waitScope) {
    hello();
    const Registration registration{.instance = name,
                                    .factors = {{"dtype", "float16"}, {"weights", "a"}},
                                    .page_bytes = kPage,
                                    .block_count = 100,
                                    .direct = OfferedMemory{.group = "pd",
                                                            .blocks = 100,
                                                            .segments = {{.bytes = kPage}},
                                                            .guards = kGuards,
                                                            .needs_consent = needs_consent}};
    auto request = session().registerRequest();
    write_registration(registration, request);
    request.getDirect().setGuards(kj::heap<CarriedDescriptor<wire::Guards>>(guards_.get()));
    REQUIRE(request.send().wait(scope_).hasPool());
  }

  using Answer = capnp::Response<wire::Session::AwaitReaderResults>;
  kj::Promise<Answer> await_reader(std::uint64_t permitted) {
    auto request = session().awaitReaderRequest();
    request.setPermitted(permitted);
    return request.send();
  }
  static Errc code(Answer& answer) {
    REQUIRE(answer.hasError());
    return read_error(answer.getError()).code;
  }
  /// Offers these blocks under a guard that is open.
  void offer(const JobId& job, std::span<const BlockKey> keys, std::uint64_t guard_value = 7) {
    auto request = session().reserveRequest();
    write_job(job, request.initJob());
    write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
    auto blocks = request.initBlocks(static_cast<unsigned>(keys.size()));
    for (unsigned i = 0; i < blocks.size(); ++i) blocks.set(i, i);
    request.setGuard(1);
    request.setGuardValue(guard_value);
    REQUIRE_FALSE(request.send().wait(scope_).hasError());
  }
  auto open_next(std::span<const BlockKey> keys, std::uint64_t pin, std::uint32_t patience_ms) {
    auto request = session().openNextRequest();
    request.setPin(pin);
    write_keys(keys, BlockKey::kMaxBytes, request.initKeys());
    request.setPatienceMs(patience_ms);
    return request.send();
  }

 private:
  kj::WaitScope& scope_;
  UniqueFd guards_ = guards();
};

/// An engine whose worker needs consent, at a server with another one.
struct SourceEngine : WireEngine {
  SourceEngine() {
    scheduler_of_source.hello();
    REQUIRE(scheduler_of_source.attach("source"));
  }
  [[nodiscard]] JobId save(std::uint64_t number) const {
    return {.scheduler = scheduler_of_source.process(), .number = number};
  }
  Worker source{*this, "source", true};
  WireClient scheduler_of_source{io, server.socket()};
};

TEST_SUITE("consent over the wire") {
  TEST_CASE("awaitReader is for workers whose memory needs consent") {
    WireEngine engine;
    auto request = engine.worker.session().awaitReaderRequest();
    auto answer = request.send().wait(engine.io.waitScope);
    CHECK(Worker::code(answer) == Errc::kInvalidArgument);
    Worker open(engine, "open", false);
    auto other = open.await_reader(0).wait(engine.io.waitScope);
    CHECK(Worker::code(other) == Errc::kInvalidArgument);
  }

  TEST_CASE("a later awaitReader of a worker ends the one before it") {
    WireEngine engine;
    Worker source(engine, "source", true);
    auto first = source.await_reader(0);
    CHECK_FALSE(first.poll(engine.io.waitScope));

    auto second = source.await_reader(0);

    auto ended = first.wait(engine.io.waitScope);
    CHECK(Worker::code(ended) == Errc::kCancelled);
    CHECK_FALSE(second.poll(engine.io.waitScope));
  }

  TEST_CASE("blocks are read when their worker has confirmed the consent, not before") {
    SourceEngine f;
    Worker reader(f, "reader", true);
    const auto keys = make_keys(1, 3);
    f.source.offer(f.save(1), keys);
    auto asked = f.source.await_reader(0);

    auto opened = reader.open_next(keys, 1, 10'000);

    auto next = asked.wait(f.io.waitScope);
    CHECK(next.getReader() != 0);
    CHECK(next.hasProcess());
    auto waits = f.source.await_reader(0);  // It could not.
    CHECK_FALSE(opened.poll(f.io.waitScope));
    auto again = waits.wait(f.io.waitScope);  // The reader looks again.
    CHECK(again.getReader() == next.getReader());
    auto last = f.source.await_reader(again.getReader());
    auto found = opened.wait(f.io.waitScope);
    CHECK(found.getBlocks().size() == 3);
    CHECK(found.getMemory().getNeedsConsent());
    CHECK_FALSE(last.poll(f.io.waitScope));
  }

  TEST_CASE("a reader that hangs ends its turn behind a save whose worker does not wait for it") {
    SourceEngine f;
    Worker hangs(f, "hangs", true);
    Worker reader(f, "reader", true);
    const JobId first = f.save(1);
    const auto keys = make_keys(1, 3);
    f.source.offer(first, keys);
    auto asked = f.source.await_reader(0);
    auto opened = hangs.open_next(keys, 1, 10'000);
    auto next = asked.wait(f.io.waitScope);
    auto waits = f.source.await_reader(next.getReader());
    REQUIRE(opened.wait(f.io.waitScope).getBlocks().size() == 3);
    auto published = f.source.session().publishRequest();
    write_job(first, published.initJob());
    SUBCASE("that is sealed") {}
    SUBCASE("that is not, since the cache was reset") {
      (void)f.scheduler_of_source.session().resetCacheRequest().send().wait(f.io.waitScope);
    }
    (void)published.send().wait(f.io.waitScope);
    const auto others = make_keys(2, 3);
    f.source.offer(f.save(2), others, 9);

    auto later = reader.open_next(others, 1, 10'000);

    auto turn = waits.wait(f.io.waitScope);
    REQUIRE_FALSE(turn.hasError());
    CHECK(turn.getReader() != next.getReader());
    auto last = f.source.await_reader(turn.getReader());
    CHECK(later.wait(f.io.waitScope).getBlocks().size() == 3);
  }
}

}  // namespace
}  // namespace pegaflow::testing
