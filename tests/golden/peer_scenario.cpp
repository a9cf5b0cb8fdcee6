#include "tests/golden/peer_scenario.h"

#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "tests/support/patience.h"

namespace pegaflow::testing {
namespace {

constexpr std::size_t kPageBytes = 4096;

void require(bool is_so, const char* what) {
  if (!is_so) throw std::runtime_error(std::string("the scenario expects: ") + what);
}

std::vector<std::uint32_t> first_blocks(std::size_t count) {
  std::vector<std::uint32_t> blocks(count);
  for (std::uint32_t i = 0; i < count; ++i) blocks[i] = i;
  return blocks;
}

}  // namespace

GoldenEngine::GoldenEngine(const std::string& socket)
    : memory_(engine_memory(1, kPageBytes, kBlocks)), device_(HostDevice::create({}).value()) {
  TestEngine::Options options;
  options.socket = socket;
  options.instance = options.model = "golden";
  options.mover.coming_patience = kHang;
  options.session.scheduler = kScheduler;
  engine_ = std::make_unique<TestEngine>(std::move(options), memory_, *device_);
  engine_->scheduler = kScheduler;
  engine_->wait_ready();
}

void GoldenEngine::save() {
  const Mover::Finished saved = engine_->save(numbers_from(1, kBlocks), first_blocks(kBlocks));
  require(!saved.error && engine_->last_job == 1, "job 1 is saved");
}

ServerProcess::Options golden_owner(const std::string& address) {
  return {.pool_size = "64mb", .arguments = {"--peer-listen", address, "--nics", "none"}};
}

ServerProcess::Options golden_reader(const std::string& address) {
  return {.pool_size = "64mb",
          .arguments = {"--peers", address, "--nics", "none", "--peer-deadline", "10s",
                        "--fetch-deadline", "8s"}};
}

void run_peer_scenario(const ServerProcess& reader, const std::string& owner, const Id128& node) {
  const auto numbers = numbers_from(1, GoldenEngine::kBlocks + 1);
  require(reader.metric_becomes(fmt::format("pegaflow_peer_ready{{peer=\"{}\"}}", owner), 1),
          "the nodes have greeted each other");
  GoldenEngine at(reader.socket());
  TestEngine& engine = at.engine();

  require(engine.lookup(numbers).value().coming == GoldenEngine::kBlocks,
          "the other node has three blocks of four");
  const CacheSession::Answer claimed = engine.claim(numbers).value();
  require(claimed.coming == GoldenEngine::kBlocks, "three blocks are lent");
  const auto blocks = first_blocks(GoldenEngine::kBlocks);
  require(engine.load(claimed.token, blocks).blocks == GoldenEngine::kBlocks, "they come");
  require(engine.wrong_blocks(numbers_from(1, GoldenEngine::kBlocks), blocks) == 0,
          "the fetched blocks have the saved bytes");
  engine.session().unclaim(claimed.token);

  const auto wait =
      engine.session().await_job(node, {GoldenEngine::kScheduler, 1}, std::chrono::seconds(2));
  require(wait.has_value(), "the wait is sent");
  const auto over = engine.session().take_wait(*wait, kHang);
  require(over.has_value() && over->has_value(), "the other node's save is over");

  require(engine.session().reset_cache(kHang).has_value(), "the cache is reset");
  require(reader.metric("pegaflow_reset_unconfirmed_nodes_total") == 0, "at the other node, too");
  const CacheSession::Answer found = engine.lookup(numbers).value();
  require(found.blocks == 0 && found.coming == 0, "nothing is found after the reset");
}

}  // namespace pegaflow::testing
