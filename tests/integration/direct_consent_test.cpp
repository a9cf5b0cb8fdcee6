// Reads of the memory of engines that consent to one process at a time, as Yama demands.
#include <array>
#include <condition_variable>
#include <csignal>
#include <fstream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <linux/capability.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "base/os/pidfd.h"
#include "tests/integration/direct_worker.h"
#include "tests/support/forked.h"
#include "tests/support/server_process.h"
#include "tests/support/skip.h"

namespace pegaflow::testing {
namespace {

/// The kernel's part for an engine of a test: which processes the engine has let in.
class Recorder {
 public:
  ReadConsent consent() {
    return {.is_needed = true, .reads_without = false, .give = [this](int pidfd) {
              const std::scoped_lock lock(mutex_);
              given_.push_back(pidfd < 0 ? 0 : process_of_pidfd(pidfd).value_or(-1));
              changed_.notify_all();
              return error_ ? Result<void>(tl::unexpected<Error>(*error_)) : Result<void>();
            }};
  }
  void fail_with(std::optional<Error> error) {
    const std::scoped_lock lock(mutex_);
    error_ = std::move(error);
  }
  /// All processes so far, 0 for none, once there are so many.
  std::vector<pid_t> given(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kHang, [&] { return given_.size() >= count; });
    return given_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<pid_t> given_;
  std::optional<Error> error_;
};

Mover::Options with(ReadConsent consent) {
  Mover::Options options = patient_mover();
  options.read_consent = std::move(consent);
  return options;
}

/// The bytes that a load of these blocks has read directly; -1 for a wrong one.
std::int64_t bytes_read_directly(DirectWorker& worker, const Numbers& numbers,
                                 const Blocks& blocks) {
  const Mover::Finished loaded = worker.engine->next_finished();
  CHECK(error_of(loaded) == "");
  if (worker.engine->wrong_blocks(numbers, blocks) != 0) return -1;
  return static_cast<std::int64_t>(loaded.direct_bytes);
}

constexpr std::int64_t kEight = 8 * DirectWorker::kPage;

/// A prefill engine that has to consent, its decode engine, and their server.
struct Pair {
  Pair()
      : prefill(server.socket(), "prefill", "pd", with(recorder.consent())),
        decode(server.socket(), "decode", "pd", with({})) {}

  /// Begins a save whose first page stays in flight until the test allows it.
  void begin_save(std::uint64_t job, const Numbers& numbers, const Blocks& blocks) {
    prefill.device.hold();
    REQUIRE(prefill.engine->start_save(job, numbers, blocks));
    REQUIRE(decode.finds_offered(numbers, numbers.size()));
  }

  /// Begins a save, and a read of its 8 blocks, which both stay in flight.
  void begin_held_read(const Numbers& numbers) {
    begin_save(1, numbers, blocks_from(0, 8));
    decode.device.hold();
    REQUIRE(decode.follow(1, numbers, blocks_from(20, 8)));
    REQUIRE(decode.device.wait_held(kHang));
  }

  /// Begins a save of 8 blocks, of which a load reads all directly.
  void read_held_save(std::uint64_t job, const Numbers& numbers) {
    begin_save(job, numbers, blocks_from(0, 8));
    REQUIRE(decode.follow(job, numbers, blocks_from(20, 8)));
    CHECK(bytes_read_directly(decode, numbers, blocks_from(20, 8)) == kEight);
  }

  /// Whether each awaitReader so far was answered because of an event.
  bool no_wait_ended_by_time() {
    try {
      return server.metric(
                 R"(pegaflow_rpc_requests_total{method="await_reader",status="timeout"})") == 0;
    } catch (const std::runtime_error&) {
      return server.metric("pegaflow_direct_workers") >= 2;  // The sample is not there.
    }
  }

  ServerProcess server;
  Recorder recorder;
  DirectWorker prefill;
  DirectWorker decode;
};

// ---- with the kernel's own rule

bool has_yama() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope && scope == 1;
}

/// From here on this process needs the consent of others.
void drop_cap_sys_ptrace() {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> sets{};
  if (::syscall(SYS_capget, &header, sets.data()) != 0) throw std::runtime_error("capget failed");
  sets[0].effective &= ~(1U << CAP_SYS_PTRACE);
  sets[0].permitted &= ~(1U << CAP_SYS_PTRACE);
  if (::syscall(SYS_capset, &header, sets.data()) != 0) throw std::runtime_error("capset failed");
}

/// A decode engine in a process follows the save of another one. Throws unless all blocks are right
/// and were read directly.
void load_directly(const std::string& socket, const std::string& name, const Numbers& numbers) {
  drop_cap_sys_ptrace();
  auto* const worker = new DirectWorker(socket, name);
  if (!worker->follow(1, numbers, blocks_from(20, numbers.size()))) {
    throw std::runtime_error("the load was rejected");
  }
  const Mover::Finished loaded = worker->engine->next_finished();
  if (loaded.error) throw std::runtime_error(to_string(*loaded.error));
  if (loaded.direct_bytes != numbers.size() * DirectWorker::kPage) {
    throw std::runtime_error(fmt::format("{} bytes were read directly", loaded.direct_bytes));
  }
  if (worker->engine->wrong_blocks(numbers, blocks_from(20, numbers.size())) != 0) {
    throw std::runtime_error("wrong bytes");
  }
}

TEST_SUITE("direct reads with consent") {
  TEST_CASE("blocks are read once the other engine's process has consented") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);

    f.read_held_save(1, numbers);

    CHECK(f.recorder.given(1) == std::vector<pid_t>{::getpid()});
  }

  TEST_CASE("the consent stays for further reads of one engine") {
    Pair f;
    for (std::uint64_t round = 1; round <= 3; ++round) {
      const Numbers numbers = numbers_from(100 * round, 8);
      f.begin_save(round, numbers, blocks_from(0, 8));
      REQUIRE(f.decode.follow(round, numbers, blocks_from(20, 8)));
      CHECK(bytes_read_directly(f.decode, numbers, blocks_from(20, 8)) == kEight);
      f.prefill.device.allow_all();
      CHECK(error_of(f.prefill.engine->next_finished()) == "");
    }
    CHECK(f.recorder.given(1).size() == 1);
  }

  TEST_CASE("an engine that the other one cannot permit tries itself, and is not named again") {
    Pair f;
    f.recorder.fail_with(Error{Errc::kIo, "no"});
    for (std::uint64_t round = 1; round <= 3; ++round) {
      const Numbers numbers = numbers_from(100 * round, 8);
      f.begin_save(round, numbers, blocks_from(0, 8));
      REQUIRE(f.decode.follow(round, numbers, blocks_from(20, 8)));
      // One process: the kernel lets it read.
      CHECK(bytes_read_directly(f.decode, numbers, blocks_from(20, 8)) == kEight);
      f.prefill.device.allow_all();
      CHECK(error_of(f.prefill.engine->next_finished()) == "");
    }
    CHECK(f.recorder.given(1).size() == 1);
    CHECK(f.no_wait_ended_by_time());
  }

  TEST_CASE("an engine beside another one of its process permits readers once that has ended") {
    Pair f;
    f.recorder.fail_with(Error{Errc::kBusy, "the other one"});
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));
    REQUIRE(f.decode.follow(1, numbers, blocks_from(20, 8)));
    CHECK(f.recorder.given(1).size() == 1);

    f.recorder.fail_with(std::nullopt);

    CHECK(bytes_read_directly(f.decode, numbers, blocks_from(20, 8)) == kEight);
    CHECK(f.recorder.given(2).size() == 2);
  }

  TEST_CASE("an engine that may read in any case waits for no consent") {
    Pair f;
    DirectWorker privileged(f.server.socket(), "privileged", "pd",
                            with({.is_needed = false, .reads_without = true, .give = {}}));
    const Numbers numbers = numbers_from(1, 8);
    f.begin_save(1, numbers, blocks_from(0, 8));

    REQUIRE(privileged.follow(1, numbers, blocks_from(20, 8)));

    CHECK(bytes_read_directly(privileged, numbers, blocks_from(20, 8)) == kEight);
    REQUIRE(f.decode.follow(1, numbers, blocks_from(20, 8)));
    CHECK(bytes_read_directly(f.decode, numbers, blocks_from(20, 8)) == kEight);
    CHECK(f.recorder.given(1) == std::vector<pid_t>{::getpid()});
  }

  TEST_CASE("two engines read in turns, the second when no read of the first is in flight") {
    Pair f;
    DirectWorker second(f.server.socket(), "second", "pd", with({}));
    const Numbers numbers = numbers_from(1, 8);
    f.begin_held_read(numbers);

    REQUIRE(second.follow(1, numbers, blocks_from(20, 8)));

    REQUIRE(f.server.metric_becomes("pegaflow_direct_waits", 1));
    CHECK(f.recorder.given(1).size() == 1);
    CHECK(f.server.metric("pegaflow_direct_reads_total") == 1);
    f.decode.device.allow_all();
    CHECK(bytes_read_directly(second, numbers, blocks_from(20, 8)) == kEight);
    CHECK(bytes_read_directly(f.decode, numbers, blocks_from(20, 8)) == kEight);
    CHECK(f.recorder.given(2).size() == 2);
    CHECK(f.no_wait_ended_by_time());
  }

  TEST_CASE(
      "an engine that is named to a load that was given up is not read, but for the next one") {
    ServerProcess server;
    DirectWorker prefill(server.socket(), "prefill", "pd", with({}));
    DirectWorker decode(server.socket(), "decode", "pd", with({}));
    const Numbers numbers = numbers_from(1, 8);
    prefill.device.hold();
    REQUIRE(prefill.engine->start_save(1, numbers, blocks_from(0, 8)));
    REQUIRE(decode.finds_offered(numbers, numbers.size()));
    server.signal(SIGSTOP);
    REQUIRE(decode.follow(1, numbers, blocks_from(20, 8)));
    decode.engine->mover().cancel_load(1);
    server.signal(SIGCONT);
    CHECK(code_of(decode.engine->next_finished()) == Errc::kCancelled);
    CHECK(decode.device.peers() == 0);

    REQUIRE(decode.follow(2, numbers, blocks_from(20, 8)));

    CHECK(bytes_read_directly(decode, numbers, blocks_from(20, 8)) == kEight);
    CHECK(decode.device.peers() == 1);
  }

  TEST_CASE("many engines read one at the same time, each in its turn") {
    Pair f;
    std::vector<std::unique_ptr<DirectWorker>> readers;
    for (int i = 0; i < 5; ++i) {
      readers.push_back(
          std::make_unique<DirectWorker>(f.server.socket(), fmt::format("r{}", i), "pd", with({})));
    }
    for (std::uint64_t round = 1; round <= 5; ++round) {
      const Numbers numbers = numbers_from(100 * round, 8);
      f.begin_save(round, numbers, blocks_from(0, 8));
      for (auto& each : readers) REQUIRE(each->follow(round, numbers, blocks_from(20, 8)));
      for (auto& each : readers) {
        CHECK(bytes_read_directly(*each, numbers, blocks_from(20, 8)) == kEight);
      }
      f.prefill.device.allow_all();
      CHECK(error_of(f.prefill.engine->next_finished()) == "");
    }
    CHECK(f.no_wait_ended_by_time());
  }

  TEST_CASE("an engine that hangs while it reads keeps others from their turns for 2 s at most") {
    Pair f;
    DirectWorker second(f.server.socket(), "second", "pd", with({}));
    const Numbers first = numbers_from(1, 8);
    f.begin_held_read(first);
    SUBCASE("and the save is sealed") {
      f.prefill.device.allow_all();
      CHECK(error_of(f.prefill.engine->next_finished()) == "");
    }
    SUBCASE("and the save fails") {
      f.prefill.device.fail_page(1);
      f.prefill.device.allow_all();
      CHECK(error_of(f.prefill.engine->next_finished()) != "");
    }
    const Numbers later = numbers_from(50, 8);
    f.prefill.device.hold();
    REQUIRE(f.prefill.engine->start_save(2, later, blocks_from(10, 8)));

    REQUIRE(second.follow(1, later, blocks_from(20, 8)));

    CHECK(bytes_read_directly(second, later, blocks_from(20, 8)) == kEight);
    CHECK(f.no_wait_ended_by_time());
  }

  TEST_CASE("an engine that no longer wants its turn does not keep it from others") {
    Pair f;
    DirectWorker second(f.server.socket(), "second", "pd", with({}));
    DirectWorker third(f.server.socket(), "third", "pd", with({}));
    const Numbers numbers = numbers_from(1, 8);
    f.begin_held_read(numbers);
    REQUIRE(second.follow(1, numbers, blocks_from(20, 8)));
    REQUIRE(f.server.metric_becomes("pegaflow_direct_waits", 1));
    second.engine->mover().cancel_load(1);
    CHECK(code_of(second.engine->next_finished()) == Errc::kCancelled);
    REQUIRE(third.follow(1, numbers, blocks_from(20, 8)));
    REQUIRE(f.server.metric_becomes("pegaflow_direct_waits", 1));

    f.decode.device.allow_all();

    CHECK(bytes_read_directly(third, numbers, blocks_from(20, 8)) == kEight);
  }

  TEST_CASE("the consent ends with the connection of the engine that read, or of its own") {
    Pair f;
    {
      DirectWorker reader(f.server.socket(), "reader", "pd", with({}));
      const Numbers numbers = numbers_from(1, 8);
      f.begin_save(1, numbers, blocks_from(0, 8));
      REQUIRE(reader.follow(1, numbers, blocks_from(20, 8)));
      CHECK(bytes_read_directly(reader, numbers, blocks_from(20, 8)) == kEight);
      f.prefill.device.allow_all();
      CHECK(error_of(f.prefill.engine->next_finished()) == "");
    }
    CHECK(f.recorder.given(2) == std::vector<pid_t>{::getpid(), 0});
    CHECK(f.no_wait_ended_by_time());
    const Numbers numbers = numbers_from(50, 8);
    f.begin_save(2, numbers, blocks_from(0, 8));
    REQUIRE(f.decode.follow(1, numbers, blocks_from(20, 8)));
    CHECK(bytes_read_directly(f.decode, numbers, blocks_from(20, 8)) == kEight);
    f.prefill.device.allow_all();

    f.prefill.engine.reset();

    CHECK(f.recorder.given(4) == std::vector<pid_t>{::getpid(), 0, ::getpid(), 0});
  }

  TEST_CASE("the consent ends with the connection, although copies of a save go on") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.read_held_save(1, numbers);

    f.server.kill();

    CHECK(f.recorder.given(2) == std::vector<pid_t>{::getpid(), 0});
    f.prefill.device.allow_all();
    (void)f.prefill.engine->next_finished();
  }

  TEST_CASE("engines read each other again after their server was killed") {
    Pair f;
    const Numbers numbers = numbers_from(1, 8);
    f.read_held_save(1, numbers);
    f.prefill.device.allow_all();
    f.server.kill();
    (void)f.prefill.engine->next_finished();

    f.server.start();

    CHECK(f.recorder.given(2) == std::vector<pid_t>{::getpid(), 0});
    f.prefill.engine->wait_ready();
    f.decode.engine->wait_ready();
    const Numbers others = numbers_from(50, 8);
    f.read_held_save(2, others);
  }

  TEST_CASE("Yama lets in the engines whose turn it is, one after the other") {
    if (!has_yama()) PEGA_SKIP("kernel.yama.ptrace_scope is not 1 here; see `./dev test rxe`");
    ServerProcess server;
    const Numbers numbers = numbers_from(1, 12);
    const Forked prefill([&] {
      drop_cap_sys_ptrace();
      save_held(server.socket(), numbers, blocks_from(3, 12));
    });
    const Forked first([&] { load_directly(server.socket(), "first", numbers); });
    const Forked second([&] { load_directly(server.socket(), "second", numbers); });
    {
      const Forked third([&] { load_directly(server.socket(), "third", numbers); });
    }
    const Forked fourth([&] { load_directly(server.socket(), "fourth", numbers); });
    CHECK(server.metric("pegaflow_direct_read_blocks_total") == 48);
  }

  TEST_CASE("an engine that the other one's process does not see finds that it may not read") {
    if (!has_yama()) PEGA_SKIP("kernel.yama.ptrace_scope is not 1 here; see `./dev test rxe`");
    ServerProcess server;
    const Pipe release;
    const Numbers numbers = numbers_from(1, 12);
    const Forked prefill(
        [&] {
          mount_own_proc();
          drop_cap_sys_ptrace();
          DirectWorker& worker = save_held(server.socket(), numbers, blocks_from(3, 12));
          std::thread([&worker, &release] {
            if (release.receive()) worker.device.allow_all();
          }).detach();
        },
        {.new_pid_namespace = true});
    const Forked decode([&] {
      drop_cap_sys_ptrace();
      auto* const worker = new DirectWorker(server.socket(), "decode");
      if (!worker->follow(1, numbers, blocks_from(20, 12))) {
        throw std::runtime_error("the load was rejected");
      }
      if (!server.metric_becomes("pegaflow_direct_reads_total", 1)) {
        throw std::runtime_error("the server has not let it try");
      }
      release.send();
      const Mover::Finished loaded = worker->engine->next_finished();
      if (loaded.error) throw std::runtime_error(to_string(*loaded.error));
      if (loaded.direct_bytes != 0) throw std::runtime_error("it was let in");
      if (worker->engine->wrong_blocks(numbers, blocks_from(20, 12)) != 0) {
        throw std::runtime_error("wrong bytes");
      }
    });
    CHECK(server.metric("pegaflow_direct_reads_total") == 1);
  }

  TEST_CASE("without consent Yama lets no engine in, and blocks come from the pool") {
    if (!has_yama()) PEGA_SKIP("kernel.yama.ptrace_scope is not 1 here; see `./dev test rxe`");
    ServerProcess server;
    const Numbers numbers = numbers_from(1, 12);
    const Forked prefill([&] {
      drop_cap_sys_ptrace();
      // As an engine of a version without consent.
      auto* const worker = new DirectWorker(server.socket(), "prefill", "pd", with({}));
      worker->device.hold();
      if (!worker->engine->start_save(1, numbers, blocks_from(3, 12))) {
        throw std::runtime_error("the save was rejected");
      }
    });
    bool is_refused = false;
    try {
      const Forked decode([&] {
        drop_cap_sys_ptrace();
        DirectWorker worker(server.socket(), "decode");
        if (!worker.follow(1, numbers, blocks_from(20, 12), std::chrono::seconds(1))) {
          throw std::runtime_error("the load was rejected");
        }
        const Mover::Finished loaded = worker.engine->next_finished();
        throw std::runtime_error(
            fmt::format("{} bytes, {}", loaded.direct_bytes, error_of(loaded)));
      });
    } catch (const std::runtime_error& ended) {
      is_refused = std::string(ended.what()).find("0 bytes, timeout") != std::string::npos;
      INFO(ended.what());
      CHECK(is_refused);
    }
    CHECK(is_refused);
  }
}

}  // namespace
}  // namespace pegaflow::testing
