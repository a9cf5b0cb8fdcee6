#pragma once
/// \file
/// Engines that read each other's memory, for tests.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/os/unique_fd.h"
#include "tests/support/slow_device.h"
#include "tests/support/test_engine.h"

namespace pegaflow::testing {

using Blocks = std::vector<std::uint32_t>;
using Numbers = std::vector<std::uint64_t>;

inline Errc code_of(const Mover::Finished& job) {
  REQUIRE(job.error);
  return job.error->code;
}

inline std::string error_of(const Mover::Finished& job) {
  return job.error ? to_string(*job.error) : std::string();
}

/// PEGA_DIRECT_ROUNDS, the number of random rounds of each test, or this many.
inline std::size_t direct_rounds(std::size_t usual) {
  const char* const given = std::getenv("PEGA_DIRECT_ROUNDS");
  return given != nullptr ? std::stoull(given) : usual;
}

/// Whether so many blocks after the sealed ones are offered to this engine, within kHang.
inline bool finds_offered_blocks(TestEngine& engine, const Numbers& numbers, std::size_t count) {
  const auto end = std::chrono::steady_clock::now() + kHang;
  while (engine.lookup(numbers).value().offered != count) {
    if (std::chrono::steady_clock::now() >= end) return false;
  }
  return true;
}

/// One end of a pipe in each process.
struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    read = UniqueFd(ends[0]);
    write = UniqueFd(ends[1]);
  }
  void send() const {
    if (::write(write.get(), "x", 1) != 1) throw std::runtime_error("the pipe is broken");
  }
  /// False at its end.
  [[nodiscard]] bool receive() const {
    char byte = 0;
    return ::read(read.get(), &byte, 1) == 1;
  }
  UniqueFd read;
  UniqueFd write;
};

/// An engine of one worker with a device that follows the test's commands.
struct DirectWorker {
  static constexpr std::size_t kBlocks = 64;
  static constexpr std::size_t kPage = 2 * 8 * 1024;

  DirectWorker(const std::string& socket, const std::string& name, std::string group = "pd",
               Mover::Options mover = patient_mover())
      : memory(engine_memory(2, kPage / 2, kBlocks)) {
    mover.direct_group = std::move(group);
    TestEngine::Options options;
    options.socket = socket;
    options.instance = name;
    options.mover = std::move(mover);
    options.session.scheduler = Id128::random();
    engine = std::make_unique<TestEngine>(options, memory, device);
    engine->scheduler = options.session.scheduler;
    engine->wait_ready();
  }
  ~DirectWorker() { device.allow_all(); }
  DirectWorker(const DirectWorker&) = delete;
  DirectWorker& operator=(const DirectWorker&) = delete;

  Result<void> follow(std::uint64_t load, const Numbers& numbers, const Blocks& blocks,
                      Duration patience = kHang) {
    return engine->mover().load_following(load, numbered_keys(numbers), blocks, patience);
  }

  bool finds_offered(const Numbers& numbers, std::size_t count) {
    return finds_offered_blocks(*engine, numbers, count);
  }

  /// Fills blocks anew, as the engine does once no job uses them.
  void overwrite(const Blocks& blocks, std::uint64_t seed = 0xBAD) {
    for (const std::uint32_t block : blocks) memory.fill(block, seed);
  }

  EngineMemory memory;
  SlowDevice device;
  std::unique_ptr<TestEngine> engine;
};

/// A /proc of this process's PID namespace, as a container has.
inline void mount_own_proc() {
  const bool is_mounted = ::unshare(CLONE_NEWNS) == 0 &&
                          ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                          ::mount("proc", "/proc", "proc", 0, nullptr) == 0;
  if (!is_mounted) throw std::runtime_error("/proc could not be mounted");
}

/// The prefill engine of a forked process: a save whose first page stays in flight until the test
/// allows it. Throws when it is rejected. The engine lives as long as its process.
inline DirectWorker& save_held(const std::string& socket, const Numbers& numbers,
                               const Blocks& blocks) {
  auto* const worker = new DirectWorker(socket, "prefill");
  worker->device.hold();
  if (!worker->engine->start_save(1, numbers, blocks)) {
    throw std::runtime_error("the save was rejected");
  }
  return *worker;
}

}  // namespace pegaflow::testing
