// An engine overwrites its blocks as soon as their save is reported, while another one reads them:
// every block that a load reports as loaded holds the bytes of its key.
#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "tests/integration/direct_worker.h"
#include "tests/support/forked.h"
#include "tests/support/seed.h"
#include "tests/support/server_process.h"

namespace pegaflow::testing {
namespace {

using std::chrono::milliseconds;
using Random = std::mt19937_64;

/// 0 to `below` - 1.
std::size_t pick(Random& random, std::size_t below) { return random() % below; }

/// Different blocks of a worker, in any order.
Blocks some_blocks(Random& random, std::size_t count) {
  Blocks all(DirectWorker::kBlocks);
  std::iota(all.begin(), all.end(), 0U);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  return all;
}

Mover::Options with(const Mover::Options::Mistakes& mistakes) {
  Mover::Options options = patient_mover();
  options.mistakes = mistakes;
  return options;
}

/// Prompts that one engine saves and another one loads at the same time, in any order of events.
class Rounds {
 public:
  explicit Rounds(std::uint64_t seed, const Mover::Options::Mistakes& mistakes = {})
      : random_(seed),
        prefill_(server_.socket(), "prefill", "pd", with(mistakes)),
        decode_(server_.socket(), "decode", "pd", with(mistakes)) {}
  ~Rounds() {
    prefill_.device.allow_all();
    decode_.device.allow_all();
  }

  struct Outcome {
    std::size_t wrong = 0;   ///< Blocks that a load reported as loaded with other bytes.
    std::size_t direct = 0;  ///< Those that were read from the other engine.
    std::size_t failed = 0;
    bool was_cancelled = false;
  };

  Outcome run() {
    const std::size_t count = 2 + pick(random_, 10);
    const Numbers numbers = numbers_from(next_number_, count);
    next_number_ += count;
    const Blocks from = some_blocks(random_, count);
    const Blocks to = some_blocks(random_, count);
    decode_.overwrite(to);
    const bool fails = pick(random_, 2) == 0;
    if (fails) prefill_.device.fail_page(1 + pick(random_, count - 1));
    if (fails && pick(random_, 3) != 0) return run_held(numbers, from, to);
    return run_free(numbers, from, to, fails);
  }

 private:
  /// The save fails while the load has a page in flight, so the engine does not wait for it.
  Outcome run_held(const Numbers& numbers, const Blocks& from, const Blocks& to) {
    prefill_.device.hold();
    REQUIRE(prefill_.engine->start_save(++job_, numbers, from));
    REQUIRE(decode_.finds_offered(numbers, numbers.size()));
    decode_.device.hold();
    decode_.device.allow_pages(pick(random_, numbers.size()));
    REQUIRE(decode_.follow(job_, numbers, to, milliseconds(5)));
    REQUIRE(decode_.device.wait_held(kHang));
    prefill_.device.allow_all();
    const std::size_t steps = pick(random_, 3);
    if (steps == 0) decode_.device.allow_all();
    CHECK(prefill_.engine->next_finished().error);
    if (steps == 1) decode_.device.allow_pages(1);
    prefill_.overwrite(from);
    decode_.device.allow_all();
    return outcome_of(numbers, to);
  }

  /// No page is held: the device's threads and both engines race.
  Outcome run_free(const Numbers& numbers, const Blocks& from, const Blocks& to, bool fails) {
    const Duration patience = fails ? Duration(milliseconds(5)) : Duration(kHang);
    const bool loads_first = pick(random_, 2) == 0;
    if (loads_first) REQUIRE(decode_.follow(++job_, numbers, to, patience));
    REQUIRE(prefill_.engine->start_save(++job_, numbers, from));
    if (!loads_first) REQUIRE(decode_.follow(job_, numbers, to, patience));
    // Its client leaves, and the engine waits until its blocks are free.
    const bool is_cancelled = pick(random_, 8) == 0;
    if (is_cancelled) decode_.engine->mover().cancel_load(job_);
    const Mover::Finished saved = prefill_.engine->next_finished();
    prefill_.overwrite(from);
    CHECK(saved.error.has_value() == fails);
    Outcome outcome = outcome_of(numbers, to);
    if (!fails && !is_cancelled) CHECK(outcome.failed == 0);
    outcome.was_cancelled = is_cancelled;
    return outcome;
  }

  Outcome outcome_of(const Numbers& numbers, const Blocks& to) {
    const Mover::Finished loaded = decode_.engine->next_finished();
    CHECK(loaded.blocks + loaded.failed_blocks.size() == numbers.size());
    return {.wrong = decode_.engine->wrong_blocks(numbers, to, loaded.failed_blocks),
            .direct = loaded.direct_bytes / DirectWorker::kPage,
            .failed = loaded.failed_blocks.size()};
  }

  Random random_;
  ServerProcess server_;
  DirectWorker prefill_;
  DirectWorker decode_;
  std::uint64_t next_number_ = 1;
  std::uint64_t job_ = 0;
};

/// The prefill engine of another process: saves a prompt for each byte of a pipe, and overwrites
/// its blocks as soon as that is reported. The byte 'h' begins a save that is in flight until the
/// next byte.
void save_for_each(int commands, const std::string& socket, std::uint64_t seed, std::size_t count) {
  auto* const worker = new DirectWorker(socket, "prefill");  // Lives as long as the process.
  std::thread([worker, commands, seed, count] {
    Random random(seed);
    char byte = 0;
    for (std::uint64_t job = 1; ::read(commands, &byte, 1) == 1; ++job) {
      const Blocks from = some_blocks(random, count);
      if (byte == 'h') {
        worker->device.hold();
      } else if (pick(random, 3) == 0) {
        worker->device.fail_page(1 + pick(random, count - 1));
      }
      if (!worker->engine->start_save(job, numbers_from(job * count, count), from)) ::_exit(1);
      if (byte == 'h' && ::read(commands, &byte, 1) != 1) ::_exit(1);
      worker->device.allow_all();
      worker->engine->next_finished();
      worker->overwrite(from);
    }
  }).detach();
}

TEST_SUITE("direct reads of blocks that are overwritten") {
  TEST_CASE("no load reports other bytes than those of its keys") {
    CAPTURE(seed());
    Rounds rounds(seed());
    const std::size_t count = direct_rounds(400);
    std::size_t direct = 0;
    std::size_t cancelled = 0;
    for (std::size_t round = 0; round < count; ++round) {
      CAPTURE(round);
      const Rounds::Outcome outcome = rounds.run();
      REQUIRE(outcome.wrong == 0);
      direct += outcome.direct;
      if (outcome.was_cancelled) ++cancelled;
    }
    MESSAGE(count, " prompts, ", direct, " blocks were read directly, ", cancelled, " cancelled");
    CHECK(direct > count / 4);
    CHECK(cancelled > 0);
  }

  TEST_CASE("a guard that stays open, or that is compared too early, is detected") {
    CAPTURE(seed());
    Mover::Options::Mistakes mistakes;
    SUBCASE("it stays open after its job's report") { mistakes.keeps_guards = true; }
    SUBCASE("it is compared before the last copy") { mistakes.checks_guards_first = true; }
    Rounds rounds(seed(), mistakes);
    std::size_t wrong = 0;
    for (int round = 0; round < 400 && wrong == 0; ++round) wrong = rounds.run().wrong;
    CHECK(wrong != 0);
  }

  TEST_CASE("the same holds for an engine in another process, until it is killed") {
    CAPTURE(seed());
    ServerProcess server;
    constexpr std::size_t kCount = 6;
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    const UniqueFd commands(ends[0]);
    const UniqueFd command(ends[1]);
    Forked prefill([&] { save_for_each(commands.get(), server.socket(), seed(), kCount); });
    DirectWorker decode(server.socket(), "decode");
    Random random(seed() + 1);
    const std::uint64_t rounds = direct_rounds(200);
    for (std::uint64_t round = 1; round <= rounds; ++round) {
      CAPTURE(round);
      const bool is_held = round % 10 == 0 && round != rounds;
      const Numbers numbers = numbers_from(round * kCount, kCount);
      const Blocks to = some_blocks(random, kCount);
      decode.overwrite(to);
      const bool loads_first = pick(random, 2) == 0;
      const Duration patience = is_held ? Duration(kHang) : milliseconds(pick(random, 10));
      if (loads_first) REQUIRE(decode.follow(round, numbers, to, patience));
      REQUIRE(::write(command.get(), is_held ? "h" : "x", 1) == 1);
      if (!loads_first) REQUIRE(decode.follow(round, numbers, to, patience));
      if (round == rounds) prefill.kill();
      const Mover::Finished loaded = decode.engine->next_finished();
      REQUIRE(decode.engine->wrong_blocks(numbers, to, loaded.failed_blocks) == 0);
      if (!is_held) continue;
      CHECK(loaded.direct_bytes == kCount * DirectWorker::kPage);
      REQUIRE(::write(command.get(), "x", 1) == 1);
    }
  }
}

}  // namespace
}  // namespace pegaflow::testing
