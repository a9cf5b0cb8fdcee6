#include "transport/cuda/attach/layout_plans.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/log.h"
#include "transport/cuda/attach/direct_share.h"
#include "transport/cuda/cuda_error.h"

namespace pegaflow::cuda {
namespace {

constexpr Log kLog{"cuda"};

/// The speed of direct copies, where it was measured, by the size of a segment.
using SharesBySize = std::map<std::uint64_t, std::optional<double>>;

class Planning {
 public:
  Planning(Driver& driver, const PlanOptions& options, CopyStream& save, CopyStream& load)
      : driver_(driver), options_(options), save_(save), load_(load) {}

  Result<void> plan(Attached& attached) {
    if (options_.has_kernels) {
      PEGA_TRY(upload_pieces(driver_, attached.plan.pieces(), load_.stream(), attached.pieces));
    }
    return choose_path(attached);
  }

  [[nodiscard]] std::optional<double> least_share() const {
    std::optional<double> least;
    for (const auto& [segment, share] : shares_) {
      if (share) least = std::min(least.value_or(*share), *share);
    }
    return least;
  }

 private:
  Result<void> choose_path(Attached& attached) {
    const std::uint64_t segment = attached.plan.mean_segment_bytes();
    attached.path =
        options_.path.value_or(segment >= kSurelyDirectBytes ? Path::kDirect : Path::kStaged);
    if (!options_.has_kernels) attached.path = Path::kDirect;
    if (attached.path == Path::kDirect) return {};
    for (CopyStream* const copy_stream : {&save_, &load_}) {
      if (Result<void> taken = copy_stream->take_staging(); !taken) {
        kLog.warn(
            "no memory for staging: small segments are copied one by one, which is slow "
            "error=\"{}\"",
            to_string(taken.error()));
        attached.path = Path::kDirect;
        return {};
      }
    }
    if (options_.path || segment <= kSurelyStagedBytes) return {};
    if (!shares_.contains(segment)) {
      PEGA_TRY_LET(shares_[segment], measure_direct_share(driver_, load_.stream(), attached.pool,
                                                          options_.register_bytes, load_.staging(),
                                                          load_.staging_bytes(), segment));
    }
    const std::optional<double> share = shares_[segment];
    if (share && *share >= kDirectShare) attached.path = Path::kDirect;
    return {};
  }

  Driver& driver_;
  const PlanOptions& options_;
  CopyStream& save_;
  CopyStream& load_;
  SharesBySize shares_;
};

}  // namespace

Result<void> upload_pieces(Driver& driver, std::span<const Piece> pieces, Stream stream,
                           DeviceAddress& uploaded) {
  PEGA_TRY(check(driver, driver.allocate(pieces.size_bytes(), uploaded),
                 "allocate memory for the places of blocks"));
  // From ordinary memory, which the driver may read until the copy has ended.
  const auto bytes = std::as_bytes(pieces);
  std::vector<std::byte> source(bytes.begin(), bytes.end());
  const Transfer transfer{source.data(), uploaded, source.size()};
  Status status = driver.copy(Direction::kToDevice, &transfer, 1, stream);
  if (status == kSuccess) status = driver.synchronize(stream);
  return check(driver, status, "copy the places of blocks to the GPU");
}

Result<PlannedLayouts> plan_layouts(Driver& driver, const PlanOptions& options,
                                    std::span<const PageLayout> layouts, std::span<std::byte> pool,
                                    CopyStream& save, CopyStream& load) {
  PlannedLayouts planned;
  Planning planning(driver, options, save, load);
  for (const PageLayout& layout : layouts) {
    const bool only = layouts.size() == 1;
    planned.plans.push_back(
        {CopyPlan(layout, options.register_bytes, only), Path::kDirect, pool, 0});
    if (Result<void> done = planning.plan(planned.plans.back()); !done) {
      release_plans(driver, planned.plans);
      return tl::unexpected<Error>(std::move(done.error()));
    }
  }
  planned.direct_share = planning.least_share();
  return planned;
}

void release_plans(Driver& driver, std::span<const Attached> plans) {
  for (const Attached& attached : plans) {
    if (attached.pieces != 0) driver.release(attached.pieces);
  }
}

}  // namespace pegaflow::cuda
