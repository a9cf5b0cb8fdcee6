#pragma once
/// \file
/// Stand-in for an engine: matrix products that keep a GPU busy and measure their own rate.

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "transport/cuda/driver.h"

namespace pegaflow::perf {

/// Computes bf16 products of 8192 x 8192 matrices with cuBLAS, on its own stream and thread. Loads
/// cuBLAS at run time, because nothing else needs it.
class Gemm {
 public:
  /// `library` is the path of cuBLAS; empty: the loader searches for it.
  /// Errors: kRefused without cuBLAS; kIo or kOutOfCapacity with CUDA's text.
  static Result<std::unique_ptr<Gemm>> start(std::shared_ptr<cuda::Driver> driver, int ordinal,
                                             const std::string& library);
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  ~Gemm();

  void pause();   ///< Returns when no product is running.
  void resume();  ///< Returns when products are running.

  /// TFLOP/s of the products that began and ended between the two times; 0 if there are none.
  /// Errors: those of the device.
  Result<double> rate(std::chrono::steady_clock::time_point begin,
                      std::chrono::steady_clock::time_point end);

 private:
  struct Blas;
  struct Group {
    std::chrono::steady_clock::time_point begin;
    std::chrono::steady_clock::time_point end;
  };
  Gemm(std::shared_ptr<cuda::Driver> driver, int ordinal);
  Result<void> make(const std::string& library);
  void run();
  cuda::Status run_group();

  const std::shared_ptr<cuda::Driver> driver_;
  const int ordinal_;
  cuda::Context context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  cuda::DeviceAddress matrices_[3] = {};
  std::unique_ptr<Blas> blas_;
  std::atomic<bool> wanted_{false};
  std::atomic<bool> running_{false};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::vector<Group> groups_;
  cuda::Status failed_ = cuda::kSuccess;
  std::thread thread_;
};

}  // namespace pegaflow::perf
