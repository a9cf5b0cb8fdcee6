// Replaces ucx_fabric.cpp in a build without UCX's headers.
#include "transport/ucx/ucx_fabric.h"

namespace pegaflow {

struct UcxFabric::Parts {};

namespace {

tl::unexpected<Error> not_built() {
  return fail(Errc::kRefused, "this program was built without UCX (package libucx-dev)");
}

}  // namespace

// The interface's type. NOLINTNEXTLINE(performance-unnecessary-value-param)
Result<std::unique_ptr<UcxFabric>> UcxFabric::create(const Options&, const Clock&, CompletionSink) {
  return not_built();
}
Result<UcxFabric::Library> UcxFabric::load_library(const std::string&) { return not_built(); }

// create() returns no fabric, so these have nothing to do.
UcxFabric::~UcxFabric() = default;
Result<RegionId> UcxFabric::register_region(const Memory&) { return not_built(); }
Result<void> UcxFabric::lend(RegionId, TimePoint) { return not_built(); }
void UcxFabric::unregister_region(RegionId) {}
FabricDescriptor UcxFabric::describe() const { return {}; }
Result<Fabric::PeerId> UcxFabric::connect(const FabricDescriptor&) { return not_built(); }
Result<void> UcxFabric::disconnect(PeerId) { return not_built(); }
Result<void> UcxFabric::read(Batch) { return not_built(); }
Result<void> UcxFabric::cancel(std::uint64_t) { return not_built(); }

}  // namespace pegaflow
