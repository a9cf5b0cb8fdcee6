#pragma once
/// \file
/// CUDA's driver in ordinary memory: streams, events and our kernels, run by one thread.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "transport/cuda/driver.h"

namespace pegaflow::testing {

/// Provides the guarantees of CUDA and no others: streams run concurrently in an order that follows
/// from a seed, a copy may not cross page-locked ranges, an event is the last record() of it.
/// Memory "on the device" is the host's. Thread-safe.
class SoftwareCuda final : public cuda::Driver {
 public:
  explicit SoftwareCuda(std::uint64_t seed, std::uint64_t memory_bytes = std::uint64_t{1} << 30);
  /// Runs all queued operations first.
  ~SoftwareCuda() override;

  // ---- observations and faults

  /// Runs no queued operation until resume().
  void hold();
  void resume();
  /// Runs at most this many queued operations while held.
  void allow(std::size_t operations);
  /// Waits until no operation runs and none can start: all ended, or those that were allowed.
  void settle();
  /// Operations that are queued on this stream wait, like those of an engine that computes for
  /// long.
  void block(cuda::Stream stream, bool blocked);
  /// Every call from now on returns this, and no queued operation runs.
  void break_device(cuda::Status status);
  /// The next allocate() of at least this many bytes fails.
  void refuse_allocations_from(std::uint64_t bytes);
  /// Memory of the test counts as an allocation on the device, which can be exported.
  void adopt(std::byte* memory, std::uint64_t bytes);
  /// allocate() makes memory of several allocations of so many bytes each from now on, as
  /// PyTorch's expandable segments are: a multiple of the page size.
  void use_expandable_segments(std::uint64_t piece_bytes);
  /// The same for memory of the test, whose content is lost. It ends after this object.
  cuda::Status adopt_expandable(std::byte* memory, std::uint64_t bytes, std::uint64_t piece_bytes);
  /// No memory is exported or opened from now on.
  void refuse_sharing();
  /// The GPU's kernels do not see what cards have written before flush_network_writes(), which it
  /// has or not.
  void need_flushes(bool has_flushes);
  /// The n-th register_host() from now fails, 0 for the next.
  void fail_registration(std::size_t n);

  [[nodiscard]] std::size_t registered_ranges() const;
  [[nodiscard]] std::size_t live_objects()
      const;  ///< Streams, events, and memory that was not freed or closed.
  [[nodiscard]] std::size_t copies() const;    ///< Transfers queued so far.
  [[nodiscard]] std::size_t launches() const;  ///< Kernels queued so far.
  [[nodiscard]] std::size_t flushes() const;   ///< Calls of flush_network_writes() so far.

  // ---- the driver

  cuda::Status device_count(int& count) override;
  cuda::Status device_name(int ordinal, std::string& name) override;
  cuda::Status attribute(int ordinal, cuda::Attribute which, int& value) override;
  cuda::Status pci_address(int ordinal, std::string& address) override;
  cuda::Status retain_primary_context(int ordinal, cuda::Context& context) override;
  cuda::Status release_primary_context(int ordinal) override;
  cuda::Status push_context(cuda::Context context) override;
  cuda::Status pop_context() override;
  cuda::Status set_context(cuda::Context context) override;
  cuda::Status priority_range(int& least, int& greatest) override;
  cuda::Status create_stream(int priority, cuda::Stream& stream) override;
  cuda::Status destroy_stream(cuda::Stream stream) override;
  cuda::Status synchronize(cuda::Stream stream) override;
  cuda::Status create_event(bool timing, cuda::EventHandle& event) override;
  cuda::Status destroy_event(cuda::EventHandle event) override;
  cuda::Status record(cuda::EventHandle event, cuda::Stream stream) override;
  cuda::Status wait(cuda::Stream stream, cuda::EventHandle event) override;
  cuda::Status query(cuda::EventHandle event) override;
  cuda::Status elapsed_ms(cuda::EventHandle begin, cuda::EventHandle end,
                          float& milliseconds) override;
  cuda::Status allocate(std::uint64_t bytes, cuda::DeviceAddress& address) override;
  cuda::Status release(cuda::DeviceAddress address) override;
  cuda::Status export_memory(cuda::DeviceAddress address, cuda::IpcHandle& handle,
                             cuda::DeviceAddress& base) override;
  cuda::Status open_exported(const cuda::IpcHandle& handle, cuda::DeviceAddress& base,
                             std::uint64_t& bytes) override;
  cuda::Status close_exported(cuda::DeviceAddress base) override;
  cuda::Status export_mapped(cuda::DeviceAddress address, UniqueFd& descriptor,
                             cuda::DeviceAddress& base, std::uint64_t& bytes) override;
  cuda::Status reserve_addresses(std::uint64_t bytes, cuda::DeviceAddress& base) override;
  cuda::Status free_addresses(cuda::DeviceAddress base, std::uint64_t bytes) override;
  cuda::Status map(cuda::DeviceAddress base, std::uint64_t bytes, int descriptor) override;
  cuda::Status unmap(cuda::DeviceAddress base, std::uint64_t bytes) override;
  cuda::Status allow_access(cuda::DeviceAddress base, std::uint64_t bytes) override;
  cuda::Status allocate_host(std::uint64_t bytes, std::byte*& memory,
                             cuda::DeviceAddress& on_device) override;
  cuda::Status release_host(std::byte* memory) override;
  cuda::Status register_host(std::byte* memory, std::uint64_t bytes) override;
  cuda::Status unregister_host(std::byte* memory) override;
  cuda::Status copy(cuda::Direction direction, const cuda::Transfer* transfers, std::size_t count,
                    cuda::Stream stream) override;
  cuda::Status fill(cuda::DeviceAddress address, unsigned char value, std::uint64_t bytes,
                    cuda::Stream stream) override;
  cuda::Status flush_network_writes() override;
  cuda::Status load_module(const void* image, cuda::Module& module) override;
  cuda::Status unload_module(cuda::Module module) override;
  cuda::Status find_function(cuda::Module module, const char* name,
                             cuda::Function& function) override;
  cuda::Status launch(cuda::Function function, unsigned blocks, unsigned threads, void* arguments,
                      cuda::Stream stream) override;
  std::string describe(cuda::Status status) override;

 private:
  struct EventState {
    std::uint64_t recorded = 0;  ///< record() calls so far,
    std::uint64_t reached = 0;   ///< and the latest of them that its stream reached.
  };
  struct Operation {
    std::function<void()> body;
    std::shared_ptr<EventState> waits_for;
    std::uint64_t until = 0;
  };
  struct StreamState {
    std::deque<Operation> queue;
    bool runs = false;
    bool blocked = false;
  };

  /// Memory that is mapped onto reserved addresses.
  struct Mapped {
    UniqueFd allocation;  ///< A memfd.
    std::uint64_t bytes = 0;
  };
  cuda::Status reserve_locked(std::uint64_t bytes, cuda::DeviceAddress& base);
  cuda::Status map_locked(cuda::DeviceAddress base, std::uint64_t bytes, UniqueFd allocation);
  void return_adopted();
  cuda::Status allow_locked(cuda::DeviceAddress base, std::uint64_t bytes);
  cuda::Status allocate_expandable(std::uint64_t bytes, cuda::DeviceAddress& address);
  cuda::Status release_expandable(cuda::DeviceAddress address);

  cuda::Status push(cuda::Stream stream, Operation operation);
  [[nodiscard]] std::vector<StreamState*> runnable();
  [[nodiscard]] bool may_copy(const std::byte* host, std::uint64_t bytes) const;
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::uint64_t memory_left_;
  cuda::Status broken_ = cuda::kSuccess;
  bool held_ = false;
  bool stopping_ = false;
  std::size_t allowed_ = 0;
  std::uint64_t refuse_from_ = ~std::uint64_t{0};
  std::optional<std::size_t> fail_registration_;
  std::size_t copies_ = 0;
  std::size_t launches_ = 0;
  std::map<void*, std::unique_ptr<StreamState>> streams_;
  std::map<void*, std::shared_ptr<EventState>> events_;
  std::map<cuda::DeviceAddress, std::pair<std::unique_ptr<std::byte[]>, std::uint64_t>> memory_;
  std::uint64_t piece_bytes_ = 0;  ///< The allocations of expandable segments; 0: none.
  std::map<cuda::DeviceAddress, std::uint64_t> reserved_;  ///< Bytes, by the first address.
  std::map<cuda::DeviceAddress, Mapped> mapped_;
  std::vector<cuda::DeviceAddress> adopted_;
  bool refuses_sharing_ = false;
  bool orders_writes_ = true;
  bool has_flushes_ = true;
  std::size_t flushes_ = 0;
  std::map<cuda::DeviceAddress, std::size_t> opened_;  ///< Times, by allocation.
  std::map<const std::byte*, std::uint64_t> locked_;   ///< Page-locked ranges of the host.
  std::thread thread_;
};

}  // namespace pegaflow::testing
