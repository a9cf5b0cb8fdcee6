#pragma once
/// \file
/// The part of CUDA's driver API that we use, loaded at run time.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/os/unique_fd.h"

namespace pegaflow::cuda {

// The types that <cuda.h> calls CUresult, CUstream and so on. Declared here, so that a machine
// without the toolkit builds the same code; tests/unit/transport/cuda_header_test.cpp compares the
// two.
using Status = int;  ///< 0 is success.
using Context = void*;
using Stream = void*;
using EventHandle = void*;
using Module = void*;
using Function = void*;
using DeviceAddress = std::uint64_t;

inline constexpr Status kSuccess = 0;
inline constexpr Status kOutOfMemory = 2;
inline constexpr Status kNotSupported = 801;
inline constexpr Status kNotReady = 600;  ///< From query(): not yet.

/// Device attributes by their number in <cuda.h>.
enum class Attribute : int {
  kMultiprocessors = 16,
  kComputeMajor = 75,
  kComputeMinor = 76,
  kFlushOptions = 117,    ///< Bit 0: this GPU supports flush_network_writes().
  kWritesOrdering = 118,  ///< From kOrderedForOwner on, its kernels see a card's writes without it.
};
inline constexpr int kOrderedForOwner = 100;

/// One copy of a batch; exactly one end is in host memory.
struct Transfer {
  std::byte* host = nullptr;
  DeviceAddress device = 0;
  std::uint64_t bytes = 0;
};

enum class Direction : std::uint8_t { kToHost, kToDevice };

/// The name of an allocation for other processes of this host: CUDA's IPC handle.
using IpcHandle = std::array<std::byte, 64>;

/// The driver. The second implementation is in memory: tests/support/software_cuda.h.
///
/// Thread-safe, as CUDA is. Calls that use a context require it to be current on the calling thread
/// (CurrentContext), except those that create it.
class Driver {
 public:
  /// Loads libcuda.so.1 and initializes it. The library stays loaded.
  /// Errors: kRefused when this machine has no driver, an old one, or no device.
  static Result<std::shared_ptr<Driver>> load();

  virtual ~Driver() = default;

  virtual Status device_count(int& count) = 0;
  virtual Status device_name(int ordinal, std::string& name) = 0;
  virtual Status attribute(int ordinal, Attribute which, int& value) = 0;
  /// Text such as "0000:3b:00.0", the name of the GPU in sysfs.
  virtual Status pci_address(int ordinal, std::string& address) = 0;

  /// The context that the engine in this process uses, too.
  virtual Status retain_primary_context(int ordinal, Context& context) = 0;
  virtual Status release_primary_context(int ordinal) = 0;
  virtual Status push_context(Context context) = 0;
  virtual Status pop_context() = 0;
  /// Replaces the current context of this thread, which keeps the new one.
  virtual Status set_context(Context context) = 0;

  /// The numbers of the least and the greatest priority of a stream; the greatest has the smaller
  /// number.
  virtual Status priority_range(int& least, int& greatest) = 0;
  /// A stream that does not wait for the default one.
  virtual Status create_stream(int priority, Stream& stream) = 0;
  virtual Status destroy_stream(Stream stream) = 0;
  virtual Status synchronize(Stream stream) = 0;

  virtual Status create_event(bool timing, EventHandle& event) = 0;
  virtual Status destroy_event(EventHandle event) = 0;
  virtual Status record(EventHandle event, Stream stream) = 0;
  virtual Status wait(Stream stream, EventHandle event) = 0;
  /// Returns kSuccess, kNotReady, or the device's error.
  virtual Status query(EventHandle event) = 0;
  virtual Status elapsed_ms(EventHandle begin, EventHandle end, float& milliseconds) = 0;

  virtual Status allocate(std::uint64_t bytes, DeviceAddress& address) = 0;
  virtual Status release(DeviceAddress address) = 0;
  /// The handle and the first byte of the allocation that contains `address`. The driver refuses it
  /// for memory of its virtual memory management; see export_mapped().
  virtual Status export_memory(DeviceAddress address, IpcHandle& handle, DeviceAddress& base) = 0;
  /// Maps an allocation of another process, at the same place each time. Its memory is not freed
  /// before close_exported() was called as often, even if that process has ended.
  virtual Status open_exported(const IpcHandle& handle, DeviceAddress& base,
                               std::uint64_t& bytes) = 0;
  virtual Status close_exported(DeviceAddress base) = 0;

  // Virtual memory management: a range of addresses onto which several allocations are mapped, each
  // as a whole.

  /// A descriptor of the allocation that is mapped at `address`, and where it is mapped. The
  /// memory is not freed before the descriptor is closed. The driver refuses it for allocations
  /// that were created without it: vLLM's sleep mode.
  virtual Status export_mapped(DeviceAddress address, UniqueFd& descriptor, DeviceAddress& base,
                               std::uint64_t& bytes) = 0;
  /// Takes addresses for memory that is mapped later.
  virtual Status reserve_addresses(std::uint64_t bytes, DeviceAddress& base) = 0;
  virtual Status free_addresses(DeviceAddress base, std::uint64_t bytes) = 0;
  /// Maps the allocation of a descriptor into reserved addresses. Its memory is not freed before
  /// unmap(), even if the process that has allocated it has ended.
  virtual Status map(DeviceAddress base, std::uint64_t bytes, int descriptor) = 0;
  /// Undoes one map().
  virtual Status unmap(DeviceAddress base, std::uint64_t bytes) = 0;
  /// Lets kernels of the current context's GPU read and write mapped memory.
  virtual Status allow_access(DeviceAddress base, std::uint64_t bytes) = 0;

  /// Page-locked memory that kernels may read and write at the address `on_device`.
  virtual Status allocate_host(std::uint64_t bytes, std::byte*& memory,
                               DeviceAddress& on_device) = 0;
  virtual Status release_host(std::byte* memory) = 0;
  virtual Status register_host(std::byte* memory, std::uint64_t bytes) = 0;
  virtual Status unregister_host(std::byte* memory) = 0;

  /// Queues the copies, in any order. Drivers before 12.8 need one call for each.
  virtual Status copy(Direction direction, const Transfer* transfers, std::size_t count,
                      Stream stream) = 0;
  virtual Status fill(DeviceAddress address, unsigned char value, std::uint64_t bytes,
                      Stream stream) = 0;

  /// Makes what network cards have written to the current GPU visible to its kernels. Blocks for
  /// some microseconds. CUDA before 11.3 has no such call.
  virtual Status flush_network_writes() = 0;

  virtual Status load_module(const void* image, Module& module) = 0;
  virtual Status unload_module(Module module) = 0;
  virtual Status find_function(Module module, const char* name, Function& function) = 0;
  virtual Status launch(Function function, unsigned blocks, unsigned threads, void* arguments,
                        Stream stream) = 0;

  /// Text such as "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)".
  virtual std::string describe(Status status) = 0;

 protected:
  Driver() = default;
  Driver(const Driver&) = default;
  Driver& operator=(const Driver&) = default;
};

/// Makes a context current on this thread as long as it lives.
class CurrentContext {
 public:
  CurrentContext(Driver& driver, Context context)
      : driver_(driver), status_(driver.push_context(context)) {}
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext() {
    if (status_ == kSuccess) driver_.pop_context();
  }
  /// Whether it could be made current.
  [[nodiscard]] Status status() const noexcept { return status_; }

 private:
  Driver& driver_;
  Status status_;
};

}  // namespace pegaflow::cuda
