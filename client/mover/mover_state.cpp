#include "client/mover/mover_state.h"

#include "base/assert.h"

namespace pegaflow {

void MoverState::report(const SaveJob& job, std::size_t sealed_blocks, std::size_t copied_pages,
                        std::optional<Error> error) {
  send({.kind = FinishedJob::Kind::kSave,
        .id = job.id,
        .blocks = sealed_blocks,
        .skipped = job.skipped,
        .bytes = copied_pages * layout.page_bytes(),
        .took = clock.now() - job.accepted,
        .cut = {},
        .failed_blocks = {},
        .error = std::move(error)});
}

void MoverState::report(LoadJob&& job, std::size_t good_blocks, std::size_t copied_pages,
                        std::optional<Error> error) {
  if (!error) job.cut.reset();  // It was completed nevertheless.
  job.blocks.erase(job.blocks.begin(),
                   job.blocks.begin() + static_cast<std::ptrdiff_t>(good_blocks));
  send({.kind = FinishedJob::Kind::kLoad,
        .id = job.id,
        .blocks = good_blocks,
        .bytes = copied_pages * layout.page_bytes(),
        .took = clock.now() - job.accepted,
        .copying = job.copying,
        .cut = job.cut,
        .failed_blocks = std::move(job.blocks),
        .error = std::move(error),
        .verified = job.verified,
        .corrupt = job.corrupt});
}

void MoverState::send(FinishedJob&& report) {
  const bool sent = finished.try_send(std::move(report));
  PEGA_ASSERT(sent, "the queue of {} reports is full", options.max_jobs);
}

}  // namespace pegaflow
