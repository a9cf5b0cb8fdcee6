// Engines of pods: which of them read each other, by the PID namespaces that they are in.
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

#include <unistd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tests/integration/direct_worker.h"
#include "tests/support/forked.h"
#include "tests/support/server_process.h"
#include "tests/support/skip.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kCount = 12;

const Numbers& numbers() {
  static const Numbers all = numbers_from(1, kCount);
  return all;
}

/// The prefill engine of a process: a save begins, and ends when the pipe receives something.
void save_until(const Pipe& release, const std::string& socket) {
  DirectWorker& worker = save_held(socket, numbers(), blocks_from(3, kCount));
  std::thread([&worker, &release] {
    if (release.receive()) worker.device.allow_all();
  }).detach();
}

/// The decode engine of a process follows that save, which ends once its blocks were found in the
/// other engine. Throws unless all blocks are right and so many were read directly.
void load(const Pipe& release, const ServerProcess& server, std::size_t direct) {
  auto* const worker = new DirectWorker(server.socket(), "decode");
  if (!worker->finds_offered(numbers(), kCount)) throw std::runtime_error("no block is offered");
  if (!worker->follow(1, numbers(), blocks_from(20, kCount))) {
    throw std::runtime_error("the load was rejected");
  }
  if (direct == 0) {
    if (!server.metric_becomes("pegaflow_direct_reads_total", 1)) {
      throw std::runtime_error("the server has not answered with the other engine's blocks");
    }
    release.send();
  }
  const Mover::Finished loaded = worker->engine->next_finished();
  if (loaded.error) throw std::runtime_error(to_string(*loaded.error));
  if (loaded.direct_bytes != direct * DirectWorker::kPage) {
    throw std::runtime_error(fmt::format("{} bytes were read directly", loaded.direct_bytes));
  }
  if (worker->engine->wrong_blocks(numbers(), blocks_from(20, kCount)) != 0) {
    throw std::runtime_error("wrong bytes");
  }
}

/// A process in a PID namespace of its own, in which `body` runs, and the server outside.
class Pod {
 public:
  explicit Pod(const std::function<void()>& body)
      : process_(
            [&] {
              mount_own_proc();
              body();
            },
            {.new_pid_namespace = true}) {}

 private:
  Forked process_;
};

/// A server, and the end of the save of its prefill engine.
struct Outside {
  ServerProcess server;
  Pipe release;
};

void require_namespaces() {
  if (!may_make_pid_namespaces()) PEGA_SKIP("this user may not make a PID namespace");
}

TEST_SUITE("direct reads between containers") {
  TEST_CASE("engines that share a PID namespace read each other, wherever their server is") {
    require_namespaces();
    const Outside f;
    const Pod both([&] {
      const Forked prefill([&] { save_until(f.release, f.server.socket()); });
      load(f.release, f.server, kCount);
    });
    CHECK(f.server.metric("pegaflow_direct_read_blocks_total") == kCount);
  }

  TEST_CASE("an engine of the host's PID namespace reads one of another namespace") {
    require_namespaces();
    const Outside f;
    const Pod prefill([&] { save_until(f.release, f.server.socket()); });
    const Forked decode([&] { load(f.release, f.server, kCount); });
  }

  TEST_CASE("engines with PID namespaces of their own load from the pool") {
    require_namespaces();
    const Outside f;
    const Pod prefill([&] { save_until(f.release, f.server.socket()); });
    const Pod decode([&] { load(f.release, f.server, 0); });
    CHECK(f.server.metric("pegaflow_direct_reads_total") == 1);
  }
}

}  // namespace
}  // namespace pegaflow::testing
