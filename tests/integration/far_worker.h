#pragma once
/// \file
/// Engines that engines of other nodes read, and that read those, for tests.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/integration/direct_worker.h"
#include "transport/network_device.h"
#include "transport/tcp/tcp_fabric.h"

namespace pegaflow::testing {

/// The behavior of a HeldFabric.
struct HowToRead {
  std::atomic<bool> is_held = false;     ///< The next read waits.
  std::atomic<bool> is_refused = false;  ///< No read begins.
};

/// A fabric whose reads wait until the test lets them go.
class HeldFabric final : public Fabric {
 public:
  HeldFabric(std::unique_ptr<Fabric> inner, const HowToRead& how)
      : inner_(std::move(inner)), how_(how) {}

  Result<RegionId> register_region(const Memory& memory) override {
    return inner_->register_region(memory);
  }
  Result<void> lend(RegionId region, TimePoint until) override {
    return inner_->lend(region, until);
  }
  void unregister_region(RegionId region) override { inner_->unregister_region(region); }
  [[nodiscard]] FabricDescriptor describe() const override { return inner_->describe(); }
  Result<PeerId> connect(const FabricDescriptor& peer) override { return inner_->connect(peer); }
  Result<void> disconnect(PeerId peer) override { return inner_->disconnect(peer); }
  Result<void> read(Batch batch) override {
    if (how_.is_refused) return fail(Errc::kPeerLost, "the test lets no read begin");
    if (!how_.is_held) return inner_->read(std::move(batch));
    const std::lock_guard lock(mutex_);
    held_.emplace_back([this, batch = std::move(batch)]() mutable {
      while (how_.is_held) std::this_thread::yield();
      batch.deadline = std::chrono::steady_clock::now() + kHang;
      if (!inner_->read(std::move(batch))) std::abort();
    });
    return {};
  }
  Result<void> cancel(std::uint64_t ticket) override { return inner_->cancel(ticket); }
  ~HeldFabric() override {
    for (std::thread& each : held_) each.join();
  }

 private:
  std::unique_ptr<Fabric> inner_;
  const HowToRead& how_;
  std::mutex mutex_;
  std::vector<std::thread> held_;
};

/// A worker whose memory engines of other nodes read over sockets.
struct FarWorker {
  static constexpr std::size_t kBlocks = 64;
  static constexpr std::size_t kPage = 2 * 8 * 1024;

  FarWorker(const std::string& socket, const std::string& name, const std::string& group = "pd",
            bool has_network = true, Mover::Options mover = patient_mover(),
            std::size_t piece_bytes = kPage / 2)
      : memory(engine_memory(2, piece_bytes, kBlocks)) {
    mover.direct_group = group;
    TestEngine::Options options;
    options.socket = socket;
    options.instance = name;
    options.mover = std::move(mover);
    options.session.scheduler = Id128::random();
    if (has_network) {
      network = NetworkDevice::create(
                    device, memory.layout(),
                    [this](Fabric::CompletionSink sink) -> Result<std::unique_ptr<Fabric>> {
                      PEGA_TRY_LET(auto sockets, TcpFabric::create({.listen = "127.0.0.1:0"},
                                                                   clock(), std::move(sink)));
                      return std::make_unique<HeldFabric>(std::move(sockets), how);
                    },
                    clock(), {})
                    .value();
    }
    Device& used = network ? static_cast<Device&>(*network) : *device;
    engine = std::make_unique<TestEngine>(options, memory, used);
    engine->scheduler = options.session.scheduler;
    engine->wait_ready();
  }
  ~FarWorker() { device->allow_all(); }
  FarWorker(const FarWorker&) = delete;
  FarWorker& operator=(const FarWorker&) = delete;

  static const SteadyClock& clock() {
    static const SteadyClock the_clock;
    return the_clock;
  }

  Result<void> follow(std::uint64_t load, const Numbers& numbers, const Blocks& blocks,
                      const Id128& node, Duration patience = kHang) {
    return engine->mover().load_following(load, numbered_keys(numbers), blocks, patience, node);
  }

  EngineMemory memory;
  HowToRead how;
  std::shared_ptr<SlowDevice> device = std::make_shared<SlowDevice>();
  std::unique_ptr<NetworkDevice> network;
  std::unique_ptr<TestEngine> engine;
};

}  // namespace pegaflow::testing
