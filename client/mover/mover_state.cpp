#include "client/mover/mover_state.h"

#include "base/assert.h"

namespace pegaflow {

void MoverState::report(const SaveJob& job, std::size_t sealed_blocks, std::optional<Error> error) {
  send({.kind = FinishedJob::Kind::kSave,
        .id = job.id,
        .blocks = sealed_blocks,
        .skipped = job.skipped,
        .bytes = job.copies.bytes_copied(),
        .took = clock.now() - job.accepted,
        .cut = {},
        .failed_blocks = {},
        .error = std::move(error)});
}

void MoverState::report(const LoadJob& job) {
  std::size_t good = 0;
  std::vector<std::uint32_t> failed;
  for (const LoadPart& part : job.parts) {
    const std::size_t done = job.in_doubt ? 0 : part.done;
    const std::size_t loaded = done * kinds[part.kind].blocks_per_key();
    good += done;
    failed.insert(failed.end(), part.blocks.begin() + static_cast<std::ptrdiff_t>(loaded),
                  part.blocks.end());
  }
  send({.kind = FinishedJob::Kind::kLoad,
        .id = job.id,
        .blocks = good,
        .bytes = job.bytes,
        .direct_bytes = job.direct_bytes,
        .took = clock.now() - job.accepted,
        .copying = job.copying,
        .cut =
            job.error ? job.cut : std::nullopt,  // Without an error it was completed nevertheless.
        .failed_blocks = std::move(failed),
        .error = job.error,
        .verified = job.verified,
        .corrupt = job.corrupt});
}

void MoverState::send(FinishedJob&& report) {
  const bool sent = finished.try_send(std::move(report));
  PEGA_ASSERT(sent, "the queue of {} reports is full", options.max_jobs);
}

}  // namespace pegaflow
