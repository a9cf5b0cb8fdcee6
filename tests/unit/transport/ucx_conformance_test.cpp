// Conformance of the RDMA lane. Here UCX runs over TCP on the loopback device: the same code,
// except for the card's own work.
#include "tests/unit/transport/fabric_conformance.h"
#include "tests/unit/transport/ucx_rails.h"
#include "transport/ucx/ucx_fabric.h"

namespace pegaflow::testing {
namespace {

std::unique_ptr<Fabric> make_ucx(const UcxFabric::Options& options, Fabric::CompletionSink sink) {
  static const SteadyClock clock;
  auto made = UcxFabric::create(options, clock, std::move(sink));
  REQUIRE_MESSAGE(made, to_string(made.error()));
  return std::move(*made);
}

struct UcxBackend {
  static std::unique_ptr<Fabric> make(Fabric::CompletionSink sink) {
    return make_ucx(ucx_options(), std::move(sink));
  }
};

/// Two rails, small pieces, and windows that are hardly larger than a piece.
struct NarrowUcxBackend {
  static std::unique_ptr<Fabric> make(Fabric::CompletionSink sink) {
    UcxFabric::Options options = ucx_options(2);
    options.piece_bytes = 5000;
    options.window_bytes = 12000;
    options.window_operations = 3;
    options.spin = Duration::zero();
    return make_ucx(options, std::move(sink));
  }
};

TEST_CASE_TEMPLATE_INVOKE(fabric_conformance, UcxBackend, NarrowUcxBackend);

}  // namespace
}  // namespace pegaflow::testing
