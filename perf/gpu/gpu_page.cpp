#include "perf/gpu/gpu_page.h"

#include <chrono>
#include <numeric>
#include <optional>

#include <poll.h>

#include "base/units.h"
#include "client/cache_session.h"
#include "client/mover.h"
#include "harness/engine_memory.h"
#include "harness/server_process.h"
#include "perf/gpu/gpu_memory.h"
#include "perf/lib/inbox.h"
#include "perf/lib/workload.h"
#include "transport/cuda/cuda_device.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;
using Direction = Device::Direction;

constexpr std::uint64_t kBlocks = 64;
constexpr std::uint64_t kSegmentBytes = 64 << 10;  ///< vLLM's default for a model of 8B.
constexpr std::uint64_t kPoolBytes = std::uint64_t{1} << 30;

double microseconds(Clock::duration took) {
  return std::chrono::duration<double, std::micro>(took).count();
}

Figure figure_of(const std::string& what, std::uint64_t page_bytes, const Samples& samples,
                 double target) {
  return {.run = fmt::format("{} of one page of {}, p50", what, format_bytes(page_bytes)),
          .params = {{"page_bytes", static_cast<std::int64_t>(page_bytes)},
                     {"segment_bytes", static_cast<std::int64_t>(kSegmentBytes)}},
          .figure = samples.median(),
          .unit = "us",
          .bound = target,
          .bound_name = "the target",
          .side = Side::kAtMost,
          .target = 1,
          .n = samples.count(),
          .spread = fmt::format("p10 {:.0f}, p90 {:.0f}, p99 {:.0f} us", samples.quantile(0.1),
                                samples.quantile(0.9), samples.quantile(0.99))};
}

Result<Mover::Finished> wait_for_job(Mover& mover) {
  for (;;) {
    std::vector<Mover::Finished> finished = mover.take_finished();
    if (!finished.empty()) {
      if (finished.front().error) return tl::unexpected<Error>(*finished.front().error);
      return std::move(finished.front());
    }
    pollfd entry{.fd = mover.finished_fd(), .events = POLLIN, .revents = 0};
    if (::poll(&entry, 1, 30'000) != 1) return fail(Errc::kTimeout, "a job took over 30 s");
  }
}

Result<std::vector<double>> time_device(CudaDevice& device, Inbox& inbox, std::uint64_t page_bytes,
                                        Direction direction, std::size_t count) {
  std::vector<double> took;
  for (std::size_t i = 0; i < count + 20; ++i) {
    const auto begin = Clock::now();
    PEGA_TRY(device.submit(
        {.ticket = i,
         .direction = direction,
         .copies = {{static_cast<std::uint32_t>(i % kBlocks), (i * 7) % kBlocks * page_bytes}}}));
    const Device::Completion done = inbox.take();
    if (done.error) return tl::unexpected<Error>(*done.error);
    if (i >= 20) took.push_back(microseconds(Clock::now() - begin));
  }
  return took;
}

/// Times from the engine's call until the load is reported: open, copy.
Result<std::vector<double>> time_loads(Mover& mover, CacheSession& session, std::size_t count) {
  const KeySource keys(5);
  const Id128 scheduler = Id128::random();
  std::vector<BlockKey> names;
  std::vector<std::uint32_t> blocks(kBlocks);
  std::iota(blocks.begin(), blocks.end(), 0U);
  for (std::uint64_t i = 0; i < kBlocks; ++i) names.push_back(keys.key(i));
  PEGA_TRY(mover.save(scheduler, 1, names, blocks, Device::Event::kNow));
  PEGA_TRY_LET(const Mover::Finished saved, wait_for_job(mover));
  if (saved.blocks != kBlocks) return fail(Errc::kInternal, "{} blocks were saved", saved.blocks);
  std::vector<double> took;
  for (std::size_t i = 0; i < count + 20; ++i) {
    PEGA_TRY_LET(const CacheSession::Ticket ticket, session.claim(std::span(names).subspan(0, 1)));
    const auto answer = session.take(ticket, std::chrono::seconds(5));
    if (!answer) return fail(Errc::kTimeout, "a claim took over 5 s");
    if (!*answer) return tl::unexpected<Error>(answer->error());
    const std::uint32_t block = static_cast<std::uint32_t>(i % kBlocks);
    const auto begin = Clock::now();
    PEGA_TRY(mover.load(i, (*answer)->token, 0, std::span(&block, 1)));
    PEGA_TRY_LET(const Mover::Finished loaded, wait_for_job(mover));
    if (i >= 20) took.push_back(microseconds(Clock::now() - begin));
    if (loaded.blocks != 1) return fail(Errc::kInternal, "a page was not loaded");
    session.unclaim((*answer)->token);
  }
  return took;
}

}  // namespace

Result<void> measure_single_pages(const SinglePages& options,
                                  const std::shared_ptr<cuda::Driver>& driver,
                                  std::vector<Figure>& figures) {
  const std::uint64_t page_bytes = options.page_bytes;
  PEGA_TRY_LET(const harness::ServerProcess server,
               harness::ServerProcess::start(
                   {.program = options.common.server, .pool_size = std::to_string(kPoolBytes)}));
  PEGA_TRY_LET(const auto memory,
               GpuMemory::create(driver, options.device, page_bytes, kSegmentBytes, kBlocks));
  PEGA_TRY_LET(const auto device, CudaDevice::create({.ordinal = options.device}, driver));

  const LinkOptions link{
      .socket_path = server.socket_path(), .instance = "gpu", .build = "pegaflow-perf"};
  {
    PEGA_TRY_LET(const auto mover,
                 Mover::start({.link = link, .factors = {{"program", "pegaflow-perf gpu"}}},
                              memory->layout(), *device));
    PEGA_TRY_LET(const auto session, CacheSession::start(link));
    if (!mover->wait_for(LinkState::kReady, std::chrono::seconds(30)) ||
        !session->wait_for(LinkState::kReady, std::chrono::seconds(30))) {
      return fail(Errc::kPeerLost, "the client library did not connect: {} {}",
                  mover->status().detail, session->status().detail);
    }
    PEGA_TRY_LET(std::vector<double> took, time_loads(*mover, *session, options.count));
    PEGA_TRY_LET(const Samples samples, Samples::of(std::move(took)));
    figures.push_back(figure_of("open and load", page_bytes, samples, 250));
    mover->close();
  }
  PEGA_TRY_LET(const harness::Mapping pool, harness::Mapping::anonymous(kBlocks * page_bytes));
  Inbox inbox;
  PEGA_TRY(device->attach(memory->layout(), pool.bytes(),
                          [&inbox](Device::Completion&& done) { inbox.put(std::move(done)); }));
  for (const Direction direction : {Direction::kLoad, Direction::kSave}) {
    Result<std::vector<double>> took =
        time_device(*device, inbox, page_bytes, direction, options.count);
    if (!took) {
      device->detach();
      return tl::unexpected<Error>(std::move(took.error()));
    }
    PEGA_TRY_LET(const Samples samples, Samples::of(std::move(*took)));
    figures.push_back(
        figure_of(direction == Direction::kLoad ? "load" : "save", page_bytes, samples, 120));
  }
  device->detach();
  return {};
}

}  // namespace pegaflow::perf
