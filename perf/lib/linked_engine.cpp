#include "perf/lib/linked_engine.h"

#include <optional>
#include <utility>

#include <poll.h>

namespace pegaflow::perf {

Result<std::unique_ptr<LinkedEngine>> LinkedEngine::connect(const Options& options,
                                                            const PageLayout& layout,
                                                            Device& device) {
  std::unique_ptr<LinkedEngine> engine(new LinkedEngine());
  LinkOptions link{
      .socket_path = options.socket, .instance = options.instance, .build = "pegaflow-perf"};
  link.lookup_deadline = link.open_deadline = link.reserve_deadline = kPatience;
  Mover::Options mover{.link = link, .factors = {{"program", options.program}}};
  mover.load_patience = mover.coming_patience = kPatience;
  PEGA_TRY_LET(engine->mover_, Mover::start(mover, layout, device));
  PEGA_TRY_LET(engine->session_, CacheSession::start(link));
  if (!engine->mover_->wait_for(LinkState::kReady, kPatience) ||
      !engine->session_->wait_for(LinkState::kReady, kPatience)) {
    return fail(Errc::kPeerLost, "the client library did not connect: {} {}",
                engine->mover_->status().detail, engine->session_->status().detail);
  }
  return engine;
}

LinkedEngine::~LinkedEngine() {
  if (mover_) mover_->close();
}

Result<CacheSession::Answer> LinkedEngine::claim(std::span<const BlockKey> keys) {
  PEGA_TRY_LET(const CacheSession::Ticket ticket, session_->claim(keys));
  auto answer = session_->take(ticket, kPatience);
  if (!answer) return fail(Errc::kTimeout, "claim: no response");
  if (*answer && (*answer)->blocks != keys.size()) {
    return fail(Errc::kInternal, "{} of {} blocks were claimed", (*answer)->blocks, keys.size());
  }
  return std::move(*answer);
}

Result<void> LinkedEngine::finish(std::size_t jobs, std::size_t blocks) {
  while (jobs != 0) {
    pollfd entry{.fd = mover_->finished_fd(), .events = POLLIN, .revents = 0};
    constexpr auto kMs = std::chrono::milliseconds(kPatience).count();
    if (::poll(&entry, 1, static_cast<int>(kMs)) != 1) {
      return fail(Errc::kTimeout, "a job was not reported");
    }
    for (const Mover::Finished& job : mover_->take_finished()) {
      if (job.error) return tl::unexpected<Error>(*job.error);
      if (job.blocks != blocks) {
        return fail(Errc::kInternal, "{} of {} blocks were copied", job.blocks, blocks);
      }
      if (jobs-- == 0) return fail(Errc::kInternal, "a report came for an unknown job");
    }
  }
  return {};
}

}  // namespace pegaflow::perf
