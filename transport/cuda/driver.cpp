#include "transport/cuda/driver.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include <dlfcn.h>

namespace pegaflow::cuda {
namespace {

/// As in <cuda.h>: the attributes of a batch of copies.
struct Location {
  int type;
  int id;
};
struct CopyAttributes {
  int source_order;
  Location source;
  Location target;
  unsigned flags;
};
/// The same of mapped memory: who may access it.
struct Access {
  Location location;
  int flags;
};
using AllocationHandle = unsigned long long;
constexpr int kSourceOrderStream = 1;
constexpr int kLocationDevice = 1;
constexpr int kAccessReadWrite = 3;
constexpr int kHandleDescriptor = 1;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostPortable = 1;
constexpr unsigned kHostDeviceMap = 2;
constexpr unsigned kIpcLazyEnablePeerAccess = 1;
constexpr int kFlushOfCurrentContext = 0;
constexpr int kFlushToOwner = 100;

/// The oldest CUDA version whose driver has all the calls that we require.
constexpr int kOldestVersion = 11000;

/// The functions of libcuda, under the names of their current versions.
struct Functions {
  Status (*cuInit)(unsigned);
  Status (*cuDriverGetVersion)(int*);
  Status (*cuDeviceGetCount)(int*);
  Status (*cuDeviceGetName)(char*, int, int);
  Status (*cuDeviceGetAttribute)(int*, int, int);
  Status (*cuDeviceGetPCIBusId)(char*, int, int);
  Status (*cuDevicePrimaryCtxRetain)(Context*, int);
  Status (*cuDevicePrimaryCtxRelease_v2)(int);
  Status (*cuCtxPushCurrent_v2)(Context);
  Status (*cuCtxSetCurrent)(Context);
  Status (*cuCtxPopCurrent_v2)(Context*);
  Status (*cuCtxGetStreamPriorityRange)(int*, int*);
  Status (*cuStreamCreateWithPriority)(Stream*, unsigned, int);
  Status (*cuStreamDestroy_v2)(Stream);
  Status (*cuStreamSynchronize)(Stream);
  Status (*cuStreamWaitEvent)(Stream, EventHandle, unsigned);
  Status (*cuEventCreate)(EventHandle*, unsigned);
  Status (*cuEventDestroy_v2)(EventHandle);
  Status (*cuEventRecord)(EventHandle, Stream);
  Status (*cuEventQuery)(EventHandle);
  Status (*cuEventElapsedTime)(float*, EventHandle, EventHandle);
  Status (*cuMemAlloc_v2)(DeviceAddress*, std::size_t);
  Status (*cuMemFree_v2)(DeviceAddress);
  Status (*cuMemGetAddressRange_v2)(DeviceAddress*, std::size_t*, DeviceAddress);
  Status (*cuIpcGetMemHandle)(IpcHandle*, DeviceAddress);
  Status (*cuIpcOpenMemHandle_v2)(DeviceAddress*, IpcHandle, unsigned);
  Status (*cuIpcCloseMemHandle)(DeviceAddress);
  Status (*cuCtxGetDevice)(int*);
  Status (*cuMemRetainAllocationHandle)(AllocationHandle*, void*);
  Status (*cuMemRelease)(AllocationHandle);
  Status (*cuMemExportToShareableHandle)(void*, AllocationHandle, int, unsigned long long);
  Status (*cuMemImportFromShareableHandle)(AllocationHandle*, void*, int);
  Status (*cuMemAddressReserve)(DeviceAddress*, std::size_t, std::size_t, DeviceAddress,
                                unsigned long long);
  Status (*cuMemAddressFree)(DeviceAddress, std::size_t);
  Status (*cuMemMap)(DeviceAddress, std::size_t, std::size_t, AllocationHandle, unsigned long long);
  Status (*cuMemUnmap)(DeviceAddress, std::size_t);
  Status (*cuMemSetAccess)(DeviceAddress, std::size_t, const Access*, std::size_t);
  Status (*cuMemHostAlloc)(void**, std::size_t, unsigned);
  Status (*cuMemFreeHost)(void*);
  Status (*cuMemHostGetDevicePointer_v2)(DeviceAddress*, void*, unsigned);
  Status (*cuMemHostRegister_v2)(void*, std::size_t, unsigned);
  Status (*cuMemHostUnregister)(void*);
  Status (*cuMemcpyHtoDAsync_v2)(DeviceAddress, const void*, std::size_t, Stream);
  Status (*cuMemcpyDtoHAsync_v2)(void*, DeviceAddress, std::size_t, Stream);
  Status (*cuMemsetD8Async)(DeviceAddress, unsigned char, std::size_t, Stream);
  Status (*cuModuleLoadData)(Module*, const void*);
  Status (*cuModuleUnload)(Module);
  Status (*cuModuleGetFunction)(Function*, Module, const char*);
  Status (*cuLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, Stream, void**, void**);
  Status (*cuGetErrorName)(Status, const char**);
  Status (*cuGetErrorString)(Status, const char**);
  // The batched copy: that of CUDA 13, and that of 12.8 with one more argument. Older drivers have
  // neither.
  Status (*cuMemcpyBatchAsync_v2)(DeviceAddress*, DeviceAddress*, std::size_t*, std::size_t,
                                  CopyAttributes*, std::size_t*, std::size_t, Stream);
  Status (*cuMemcpyBatchAsync)(DeviceAddress*, DeviceAddress*, std::size_t*, std::size_t,
                               CopyAttributes*, std::size_t*, std::size_t, std::size_t*, Stream);
  Status (*cuFlushGPUDirectRDMAWrites)(int, int);  ///< From 11.3 on.
};

class Library final : public Driver {
 public:
  explicit Library(const Functions& functions) : call_(functions) {}

  Status device_count(int& count) override { return call_.cuDeviceGetCount(&count); }
  Status device_name(int ordinal, std::string& name) override {
    char text[256] = {};
    const Status status = call_.cuDeviceGetName(text, sizeof text - 1, ordinal);
    name = text;
    return status;
  }
  Status attribute(int ordinal, Attribute which, int& value) override {
    return call_.cuDeviceGetAttribute(&value, static_cast<int>(which), ordinal);
  }
  Status pci_address(int ordinal, std::string& address) override {
    char text[32] = {};
    const Status status = call_.cuDeviceGetPCIBusId(text, sizeof text - 1, ordinal);
    address = text;
    // CUDA writes capital letters, and the kernel small ones.
    std::ranges::transform(address, address.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return status;
  }

  Status retain_primary_context(int ordinal, Context& context) override {
    return call_.cuDevicePrimaryCtxRetain(&context, ordinal);
  }
  Status release_primary_context(int ordinal) override {
    return call_.cuDevicePrimaryCtxRelease_v2(ordinal);
  }
  Status set_context(Context context) override { return call_.cuCtxSetCurrent(context); }
  Status push_context(Context context) override { return call_.cuCtxPushCurrent_v2(context); }
  Status pop_context() override {
    Context popped = nullptr;
    return call_.cuCtxPopCurrent_v2(&popped);
  }

  Status priority_range(int& least, int& greatest) override {
    return call_.cuCtxGetStreamPriorityRange(&least, &greatest);
  }
  Status create_stream(int priority, Stream& stream) override {
    return call_.cuStreamCreateWithPriority(&stream, kStreamNonBlocking, priority);
  }
  Status destroy_stream(Stream stream) override { return call_.cuStreamDestroy_v2(stream); }
  Status synchronize(Stream stream) override { return call_.cuStreamSynchronize(stream); }

  Status create_event(bool timing, EventHandle& event) override {
    return call_.cuEventCreate(&event, timing ? 0 : kEventDisableTiming);
  }
  Status destroy_event(EventHandle event) override { return call_.cuEventDestroy_v2(event); }
  Status record(EventHandle event, Stream stream) override {
    return call_.cuEventRecord(event, stream);
  }
  Status wait(Stream stream, EventHandle event) override {
    return call_.cuStreamWaitEvent(stream, event, 0);
  }
  Status query(EventHandle event) override { return call_.cuEventQuery(event); }
  Status elapsed_ms(EventHandle begin, EventHandle end, float& milliseconds) override {
    return call_.cuEventElapsedTime(&milliseconds, begin, end);
  }

  Status allocate(std::uint64_t bytes, DeviceAddress& address) override {
    return call_.cuMemAlloc_v2(&address, bytes);
  }
  Status release(DeviceAddress address) override { return call_.cuMemFree_v2(address); }
  Status export_memory(DeviceAddress address, IpcHandle& handle, DeviceAddress& base) override {
    const Status status = call_.cuMemGetAddressRange_v2(&base, nullptr, address);
    return status == kSuccess ? call_.cuIpcGetMemHandle(&handle, base) : status;
  }
  Status open_exported(const IpcHandle& handle, DeviceAddress& base,
                       std::uint64_t& bytes) override {
    Status status = call_.cuIpcOpenMemHandle_v2(&base, handle, kIpcLazyEnablePeerAccess);
    if (status != kSuccess) return status;
    std::size_t size = 0;
    status = call_.cuMemGetAddressRange_v2(nullptr, &size, base);
    bytes = size;
    if (status != kSuccess) call_.cuIpcCloseMemHandle(base);
    return status;
  }
  Status close_exported(DeviceAddress base) override { return call_.cuIpcCloseMemHandle(base); }

  Status export_mapped(DeviceAddress address, UniqueFd& descriptor, DeviceAddress& base,
                       std::uint64_t& bytes) override {
    std::size_t size = 0;
    Status status = call_.cuMemGetAddressRange_v2(&base, &size, address);
    if (status != kSuccess) return status;
    bytes = size;
    AllocationHandle allocation = 0;
    // CUDA takes the address as a pointer. NOLINTNEXTLINE(performance-no-int-to-ptr)
    status = call_.cuMemRetainAllocationHandle(&allocation, reinterpret_cast<void*>(base));
    if (status != kSuccess) return status;
    int number = -1;
    status = call_.cuMemExportToShareableHandle(&number, allocation, kHandleDescriptor, 0);
    if (status == kSuccess) descriptor = UniqueFd(number);
    call_.cuMemRelease(allocation);
    return status;
  }
  Status reserve_addresses(std::uint64_t bytes, DeviceAddress& base) override {
    return call_.cuMemAddressReserve(&base, bytes, 0, 0, 0);
  }
  Status free_addresses(DeviceAddress base, std::uint64_t bytes) override {
    return call_.cuMemAddressFree(base, bytes);
  }
  Status map(DeviceAddress base, std::uint64_t bytes, int descriptor) override {
    AllocationHandle allocation = 0;
    // CUDA takes the number as a pointer. NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* const number = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor));
    Status status = call_.cuMemImportFromShareableHandle(&allocation, number, kHandleDescriptor);
    if (status != kSuccess) return status;
    status = call_.cuMemMap(base, bytes, 0, allocation, 0);
    call_.cuMemRelease(allocation);  // The mapping keeps it.
    return status;
  }
  Status unmap(DeviceAddress base, std::uint64_t bytes) override {
    return call_.cuMemUnmap(base, bytes);
  }
  Status allow_access(DeviceAddress base, std::uint64_t bytes) override {
    int ordinal = 0;
    const Status status = call_.cuCtxGetDevice(&ordinal);
    if (status != kSuccess) return status;
    const Access access{{kLocationDevice, ordinal}, kAccessReadWrite};
    return call_.cuMemSetAccess(base, bytes, &access, 1);
  }

  Status allocate_host(std::uint64_t bytes, std::byte*& memory, DeviceAddress& on_device) override {
    void* raw = nullptr;
    const Status status = call_.cuMemHostAlloc(&raw, bytes, kHostPortable | kHostDeviceMap);
    if (status != kSuccess) return status;
    memory = static_cast<std::byte*>(raw);
    return call_.cuMemHostGetDevicePointer_v2(&on_device, raw, 0);
  }
  Status release_host(std::byte* memory) override { return call_.cuMemFreeHost(memory); }
  Status register_host(std::byte* memory, std::uint64_t bytes) override {
    return call_.cuMemHostRegister_v2(memory, bytes, kHostPortable);
  }
  Status unregister_host(std::byte* memory) override { return call_.cuMemHostUnregister(memory); }

  Status copy(Direction direction, const Transfer* transfers, std::size_t count,
              Stream stream) override {
    if (count > 1 && (call_.cuMemcpyBatchAsync_v2 || call_.cuMemcpyBatchAsync)) {
      return copy_batch(direction, transfers, count, stream);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const Transfer& one = transfers[i];
      const Status status =
          direction == Direction::kToHost
              ? call_.cuMemcpyDtoHAsync_v2(one.host, one.device, one.bytes, stream)
              : call_.cuMemcpyHtoDAsync_v2(one.device, one.host, one.bytes, stream);
      if (status != kSuccess) return status;
    }
    return kSuccess;
  }
  Status fill(DeviceAddress address, unsigned char value, std::uint64_t bytes,
              Stream stream) override {
    return call_.cuMemsetD8Async(address, value, bytes, stream);
  }

  Status flush_network_writes() override {
    if (call_.cuFlushGPUDirectRDMAWrites == nullptr) return kNotSupported;
    return call_.cuFlushGPUDirectRDMAWrites(kFlushOfCurrentContext, kFlushToOwner);
  }

  Status load_module(const void* image, Module& module) override {
    return call_.cuModuleLoadData(&module, image);
  }
  Status unload_module(Module module) override { return call_.cuModuleUnload(module); }
  Status find_function(Module module, const char* name, Function& function) override {
    return call_.cuModuleGetFunction(&function, module, name);
  }
  Status launch(Function function, unsigned blocks, unsigned threads, void* arguments,
                Stream stream) override {
    void* parameters[] = {arguments};
    return call_.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters,
                                nullptr);
  }

  std::string describe(Status status) override {
    const char* name = nullptr;
    const char* words = nullptr;
    call_.cuGetErrorName(status, &name);
    call_.cuGetErrorString(status, &words);
    if (name == nullptr || words == nullptr) return fmt::format("CUDA error {}", status);
    return fmt::format("{} ({})", name, words);
  }

 private:
  Status copy_batch(Direction direction, const Transfer* transfers, std::size_t count,
                    Stream stream) const {
    std::vector<DeviceAddress> from(count);
    std::vector<DeviceAddress> to(count);
    std::vector<std::size_t> sizes(count);
    for (std::size_t i = 0; i < count; ++i) {
      // A unified address space: a page-locked byte has its host address.
      const auto host = reinterpret_cast<DeviceAddress>(transfers[i].host);
      from[i] = direction == Direction::kToHost ? transfers[i].device : host;
      to[i] = direction == Direction::kToHost ? host : transfers[i].device;
      sizes[i] = transfers[i].bytes;
    }
    CopyAttributes attributes{kSourceOrderStream, {}, {}, 0};
    std::size_t first = 0;
    if (call_.cuMemcpyBatchAsync_v2 != nullptr) {
      return call_.cuMemcpyBatchAsync_v2(to.data(), from.data(), sizes.data(), count, &attributes,
                                         &first, 1, stream);
    }
    std::size_t failed = 0;
    return call_.cuMemcpyBatchAsync(to.data(), from.data(), sizes.data(), count, &attributes,
                                    &first, 1, &failed, stream);
  }

  const Functions call_;
};

template <typename F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(::dlsym(library, name));
  return function != nullptr;
}

#define PEGA_FIND(name) \
  if (!find(library, #name, f.name)) missing = #name

/// Fills the functions of virtual memory management, as find_all().
const char* find_mapping(void* library, Functions& f) {
  const char* missing = nullptr;
  PEGA_FIND(cuMemRetainAllocationHandle);
  PEGA_FIND(cuMemRelease);
  PEGA_FIND(cuMemExportToShareableHandle);
  PEGA_FIND(cuMemImportFromShareableHandle);
  PEGA_FIND(cuMemAddressReserve);
  PEGA_FIND(cuMemAddressFree);
  PEGA_FIND(cuMemMap);
  PEGA_FIND(cuMemUnmap);
  PEGA_FIND(cuMemSetAccess);
  return missing;
}

/// Fills `f`. Returns the name of a function that is missing, or null.
const char* find_all(void* library, Functions& f) {
  const char* missing = find_mapping(library, f);
  PEGA_FIND(cuInit);
  PEGA_FIND(cuDriverGetVersion);
  PEGA_FIND(cuDeviceGetCount);
  PEGA_FIND(cuDeviceGetName);
  PEGA_FIND(cuDeviceGetAttribute);
  PEGA_FIND(cuDeviceGetPCIBusId);
  PEGA_FIND(cuDevicePrimaryCtxRetain);
  PEGA_FIND(cuDevicePrimaryCtxRelease_v2);
  PEGA_FIND(cuCtxPushCurrent_v2);
  PEGA_FIND(cuCtxSetCurrent);
  PEGA_FIND(cuCtxPopCurrent_v2);
  PEGA_FIND(cuCtxGetStreamPriorityRange);
  PEGA_FIND(cuStreamCreateWithPriority);
  PEGA_FIND(cuStreamDestroy_v2);
  PEGA_FIND(cuStreamSynchronize);
  PEGA_FIND(cuStreamWaitEvent);
  PEGA_FIND(cuEventCreate);
  PEGA_FIND(cuEventDestroy_v2);
  PEGA_FIND(cuEventRecord);
  PEGA_FIND(cuEventQuery);
  PEGA_FIND(cuEventElapsedTime);
  PEGA_FIND(cuMemAlloc_v2);
  PEGA_FIND(cuMemFree_v2);
  PEGA_FIND(cuMemGetAddressRange_v2);
  PEGA_FIND(cuIpcGetMemHandle);
  PEGA_FIND(cuIpcOpenMemHandle_v2);
  PEGA_FIND(cuIpcCloseMemHandle);
  PEGA_FIND(cuCtxGetDevice);
  PEGA_FIND(cuMemHostAlloc);
  PEGA_FIND(cuMemFreeHost);
  PEGA_FIND(cuMemHostGetDevicePointer_v2);
  PEGA_FIND(cuMemHostRegister_v2);
  PEGA_FIND(cuMemHostUnregister);
  PEGA_FIND(cuMemcpyHtoDAsync_v2);
  PEGA_FIND(cuMemcpyDtoHAsync_v2);
  PEGA_FIND(cuMemsetD8Async);
  PEGA_FIND(cuModuleLoadData);
  PEGA_FIND(cuModuleUnload);
  PEGA_FIND(cuModuleGetFunction);
  PEGA_FIND(cuLaunchKernel);
  PEGA_FIND(cuGetErrorName);
  PEGA_FIND(cuGetErrorString);
  find(library, "cuMemcpyBatchAsync_v2", f.cuMemcpyBatchAsync_v2);
  find(library, "cuMemcpyBatchAsync", f.cuMemcpyBatchAsync);
  find(library, "cuFlushGPUDirectRDMAWrites", f.cuFlushGPUDirectRDMAWrites);
  return missing;
}

#undef PEGA_FIND

}  // namespace

Result<std::shared_ptr<Driver>> Driver::load() {
  // Never closed: the engine in this process uses it, too, and CUDA has threads of its own.
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = ::dlerror();
    return fail(Errc::kRefused, "this machine has no CUDA driver: {}", why ? why : "no libcuda");
  }
  Functions f{};
  const char* const missing = find_all(library, f);
  if (missing != nullptr) {
    return fail(Errc::kRefused, "this machine's CUDA driver is too old: it has no {}", missing);
  }
  int version = 0;
  if (f.cuDriverGetVersion(&version) != kSuccess || version < kOldestVersion) {
    return fail(Errc::kRefused, "this machine's CUDA driver is too old: it is for CUDA {}.{}",
                version / 1000, version % 1000 / 10);
  }
  auto driver = std::make_shared<Library>(f);
  if (const Status status = f.cuInit(0); status != kSuccess) {
    return fail(Errc::kRefused, "cannot initialize the CUDA driver: {}", driver->describe(status));
  }
  return driver;
}

}  // namespace pegaflow::cuda
