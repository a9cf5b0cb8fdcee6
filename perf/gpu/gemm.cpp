#include "perf/gpu/gemm.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <random>

#include <dlfcn.h>

#include "transport/cuda/cuda_error.h"

namespace pegaflow::perf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSize = 8192;
constexpr std::uint64_t kMatrixBytes = std::uint64_t{2} * kSize * kSize;
constexpr double kFlop = 2.0 * kSize * kSize * kSize;
constexpr int kGroup = 4;  ///< Products timed together; about 6 ms on an H200.
constexpr std::size_t kAhead = 3;

// As in <cublas_v2.h> and <library_types.h>.
constexpr int kNoTranspose = 0;
constexpr int kBf16 = 14;
constexpr int kCompute32F = 68;
constexpr int kDefaultAlgorithm = -1;

}  // namespace

struct Gemm::Blas {
  void* handle = nullptr;
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*set_stream)(void*, cuda::Stream) = nullptr;
  int (*gemm)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int,
              int, const void*, void*, int, int, int, int) = nullptr;
};

Gemm::Gemm(std::shared_ptr<cuda::Driver> driver, int ordinal)
    : driver_(std::move(driver)), ordinal_(ordinal), blas_(std::make_unique<Blas>()) {}

Result<std::unique_ptr<Gemm>> Gemm::start(std::shared_ptr<cuda::Driver> driver, int ordinal,
                                          const std::string& library) {
  std::unique_ptr<Gemm> gemm(new Gemm(std::move(driver), ordinal));
  PEGA_TRY(gemm->make(library));
  gemm->thread_ = std::thread([raw = gemm.get()] { raw->run(); });
  return gemm;
}

Result<void> Gemm::make(const std::string& library) {
  void* blas = nullptr;
  std::vector<std::string> names = {library};
  if (library.empty()) names = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
  for (const std::string& name : names) {
    if (blas == nullptr) blas = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (blas == nullptr) {
    const char* const why = ::dlerror();
    return fail(Errc::kRefused, "load cuBLAS for the matrix products: {}", why ? why : "not found");
  }
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(blas, name));
    return function != nullptr;
  };
  if (!find("cublasCreate_v2", blas_->create) || !find("cublasDestroy_v2", blas_->destroy) ||
      !find("cublasSetStream_v2", blas_->set_stream) || !find("cublasGemmEx", blas_->gemm)) {
    return fail(Errc::kRefused, "this cuBLAS has no cublasGemmEx");
  }
  cuda::Driver& driver = *driver_;
  PEGA_TRY(cuda::check(driver, driver.retain_primary_context(ordinal_, context_), "use the GPU"));
  const cuda::CurrentContext current(driver, context_);
  PEGA_TRY(cuda::check(driver, driver.create_stream(0, stream_), "make a stream"));
  // Not zeros: products of zeros are faster. bf16 is the upper half of a float.
  std::vector<std::uint16_t> values(kMatrixBytes / 2);
  std::minstd_rand random(3);
  for (std::uint16_t& value : values) {
    const float number = static_cast<float>(random() % 2000) / 1000 - 1;
    std::uint32_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    value = static_cast<std::uint16_t>(bits >> 16);
  }
  for (cuda::DeviceAddress& matrix : matrices_) {
    PEGA_TRY(cuda::check(driver, driver.allocate(kMatrixBytes, matrix), "allocate GPU memory"));
    const cuda::Transfer all{reinterpret_cast<std::byte*>(values.data()), matrix, kMatrixBytes};
    PEGA_TRY(cuda::check(driver, driver.copy(cuda::Direction::kToDevice, &all, 1, stream_),
                         "fill GPU memory"));
  }
  PEGA_TRY(cuda::check(driver, driver.synchronize(stream_), "fill GPU memory"));
  if (const int status = blas_->create(&blas_->handle); status != 0) {
    blas_->handle = nullptr;
    return fail(Errc::kIo, "cublasCreate failed with status {}", status);
  }
  if (const int status = blas_->set_stream(blas_->handle, stream_); status != 0) {
    return fail(Errc::kIo, "cublasSetStream failed with status {}", status);
  }
  return {};
}

Gemm::~Gemm() {
  stopping_ = true;
  wanted_ = true;
  wanted_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (context_ == nullptr) return;
  {
    const cuda::CurrentContext current(*driver_, context_);
    if (blas_->handle != nullptr) blas_->destroy(blas_->handle);
    for (const cuda::DeviceAddress matrix : matrices_) {
      if (matrix != 0) driver_->release(matrix);
    }
    if (stream_ != nullptr) driver_->destroy_stream(stream_);
  }
  driver_->release_primary_context(ordinal_);
}

void Gemm::pause() {
  wanted_ = false;
  running_.wait(true);
}

void Gemm::resume() {
  wanted_ = true;
  wanted_.notify_all();
  running_.wait(false);
}

void Gemm::run() {
  const cuda::CurrentContext current(*driver_, context_);
  while (!stopping_) {
    if (!wanted_) {
      running_ = false;
      running_.notify_all();
      wanted_.wait(false);
      continue;
    }
    // A few groups are queued ahead, so that the GPU never waits for this thread.
    std::array<cuda::EventHandle, kAhead + 1> ends{};
    for (cuda::EventHandle& end : ends) driver_->create_event(false, end);
    cuda::Status status = run_group();
    driver_->record(ends[0], stream_);
    running_ = true;
    running_.notify_all();
    std::size_t queued = 1;
    std::size_t ended = 0;
    Clock::time_point last{};
    while (status == cuda::kSuccess && ended < queued) {
      while (wanted_ && !stopping_ && queued - ended < kAhead && status == cuda::kSuccess) {
        status = run_group();
        driver_->record(ends[queued % ends.size()], stream_);
        ++queued;
      }
      while ((status = driver_->query(ends[ended % ends.size()])) == cuda::kNotReady) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      const auto now = Clock::now();
      const std::lock_guard lock(mutex_);
      if (ended != 0) groups_.push_back({last, now});
      last = now;
      ++ended;
    }
    for (const cuda::EventHandle end : ends) driver_->destroy_event(end);
    if (status != cuda::kSuccess) {
      const std::lock_guard lock(mutex_);
      failed_ = status;
      wanted_ = false;
    }
  }
  running_ = false;
  running_.notify_all();
}

cuda::Status Gemm::run_group() {
  const float one = 1;
  const float zero = 0;
  for (int i = 0; i < kGroup; ++i) {
    // NOLINTBEGIN(performance-no-int-to-ptr): addresses on the GPU.
    const int status = blas_->gemm(blas_->handle, kNoTranspose, kNoTranspose, kSize, kSize, kSize,
                                   &one, reinterpret_cast<void*>(matrices_[0]), kBf16, kSize,
                                   reinterpret_cast<void*>(matrices_[1]), kBf16, kSize, &zero,
                                   reinterpret_cast<void*>(matrices_[2]), kBf16, kSize, kCompute32F,
                                   kDefaultAlgorithm);
    // NOLINTEND(performance-no-int-to-ptr)
    if (status != 0) return status;
  }
  return cuda::kSuccess;
}

Result<double> Gemm::rate(Clock::time_point begin, Clock::time_point end) {
  const std::lock_guard lock(mutex_);
  PEGA_TRY(cuda::check(*driver_, failed_, "multiply matrices"));
  double seconds = 0;
  double count = 0;
  for (const Group& group : groups_) {
    if (group.begin < begin || group.end > end) continue;
    seconds += std::chrono::duration<double>(group.end - group.begin).count();
    count += kGroup;
  }
  return seconds > 0 ? count * kFlop / seconds / 1e12 : 0;
}

}  // namespace pegaflow::perf
