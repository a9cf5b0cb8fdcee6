// Conformance of the RDMA lane. Here UCX runs over TCP on the loopback device: the same code,
// except for the card's own work.
#include <atomic>
#include <vector>

#include "tests/support/skip.h"
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

TEST_CASE("memory of a GPU is refused by a UCX without CUDA support, with its version and file") {
  const auto library = UcxFabric::load_library(ucx_options().library).value();
  std::vector<std::byte> memory(4096);
  std::atomic<int> threads = 0;
  UcxFabric::Options options = ucx_options(2);
  options.gpu = {.device = 3, .make_current = [&] {
                   ++threads;
                   return Result<void>();
                 }};
  const auto fabric = make_ucx(options, [](auto&&) {});

  CHECK(threads == 2);
  CHECK(fabric->register_region(memory));
  const auto other = fabric->register_region(Memory::cuda(1 << 20, 4096, 0));
  REQUIRE_FALSE(other);
  CHECK(other.error().code == Errc::kRefused);
  CHECK(other.error().detail == "this fabric was created for GPU 3, and not for memory of GPU 0");

  const auto gpu = fabric->register_region(Memory::cuda(1 << 20, 4096, 3));
  if (gpu || gpu.error().detail.find("no CUDA support") == std::string::npos) {
    PEGA_SKIP("this UCX has CUDA support");
  }
  CHECK(gpu.error().code == Errc::kRefused);
  CHECK(gpu.error().detail == fmt::format("UCX {} at {} has no CUDA support on this machine: name "
                                          "one that has it with --ucx-library or PEGA_UCX_LIBRARY",
                                          library.version, library.file));
}

TEST_CASE("a GPU that cannot be used is an error of the fabric") {
  UcxFabric::Options options = ucx_options();
  options.gpu = {.device = 0, .make_current = [] {
                   return Result<void>(fail(Errc::kIo, "the test has no GPU"));
                 }};
  const SteadyClock clock;
  const auto refused = UcxFabric::create(options, clock, [](auto&&) {});
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == Errc::kIo);
  CHECK(refused.error().detail == "the test has no GPU");
}

}  // namespace
}  // namespace pegaflow::testing
