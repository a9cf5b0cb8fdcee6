#include "transport/cuda/gpu.h"

#include <unistd.h>

#include "transport/cuda/cuda_error.h"

namespace pegaflow::cuda {

Result<std::shared_ptr<Gpu>> Gpu::open(std::shared_ptr<Driver> driver, int ordinal) {
  int count = 0;
  PEGA_TRY(check(*driver, driver->device_count(count), "count the GPUs"));
  if (ordinal < 0 || ordinal >= count) {
    return fail(Errc::kRefused, "there is no GPU {}, this process sees {}", ordinal, count);
  }
  std::shared_ptr<Gpu> gpu(new Gpu(std::move(driver), ordinal));
  PEGA_TRY(check(*gpu->driver_, gpu->driver_->retain_primary_context(ordinal, gpu->context_),
                 fmt::format("use the context of GPU {}", ordinal)));
  return gpu;
}

Gpu::Gpu(std::shared_ptr<Driver> driver, int ordinal)
    : driver_(std::move(driver)), ordinal_(ordinal), process_(::getpid()) {}

Gpu::~Gpu() {
  if (context_ != nullptr && ::getpid() == process_) driver_->release_primary_context(ordinal_);
}

GpuContext Gpu::context_of(std::shared_ptr<Gpu> gpu) {
  const int ordinal = gpu->ordinal_;
  return {.device = ordinal,
          .make_current = [gpu = std::move(gpu)] { return gpu->make_current(); }};
}

Result<void> Gpu::make_current() {
  return check(*driver_, driver_->set_context(context_), "make the GPU's context current");
}

Result<bool> Gpu::needs_flush() {
  int ordering = 0;
  PEGA_TRY(check(*driver_, driver_->attribute(ordinal_, Attribute::kWritesOrdering, ordering),
                 "look up who sees the writes of cards"));
  if (ordering >= kOrderedForOwner) return false;
  int options = 0;
  PEGA_TRY(check(*driver_, driver_->attribute(ordinal_, Attribute::kFlushOptions, options),
                 "look up how writes of cards are flushed"));
  if ((options & 1) != 0) return true;
  return fail(Errc::kRefused, "GPU {} neither orders the writes of cards nor flushes them",
              ordinal_);
}

Result<void> Gpu::show_network_writes() {
  const CurrentContext current(*driver_, context_);
  PEGA_TRY(check(*driver_, current.status(), "use the GPU"));
  return check(*driver_, driver_->flush_network_writes(),
               "flush what a card has written to the GPU");
}

Result<std::string> Gpu::pci_address() {
  std::string address;
  PEGA_TRY(
      check(*driver_, driver_->pci_address(ordinal_, address), "look up the GPU's PCI address"));
  return address;
}

// ---- memory

Result<std::unique_ptr<GpuMemory>> GpuMemory::create(std::shared_ptr<Gpu> gpu, std::size_t bytes) {
  std::unique_ptr<GpuMemory> memory(new GpuMemory(std::move(gpu), bytes));
  PEGA_TRY(memory->allocate());
  return memory;
}

Result<void> GpuMemory::allocate() {
  Driver& driver = gpu_->driver();
  const CurrentContext current(driver, gpu_->context());
  PEGA_TRY(check(driver, current.status(), "use the GPU"));
  PEGA_TRY(check(driver, driver.create_stream(0, stream_), "make a stream"));
  PEGA_TRY(check(driver, driver.allocate(size_bytes_, address_), "allocate GPU memory"));
  return clear();
}

GpuMemory::~GpuMemory() {
  Driver& driver = gpu_->driver();
  const CurrentContext current(driver, gpu_->context());
  if (address_ != 0) driver.release(address_);
  if (stream_ != nullptr) driver.destroy_stream(stream_);
}

Memory GpuMemory::memory() const { return Memory::cuda(address_, size_bytes_, gpu_->ordinal()); }

Result<void> GpuMemory::write(std::span<const std::byte> host, std::uint64_t at) {
  // The driver reads it. NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  auto* const from = const_cast<std::byte*>(host.data());
  return copy(Direction::kToDevice, {from, address_ + at, host.size()});
}

Result<void> GpuMemory::read(std::span<std::byte> host, std::uint64_t at) {
  return copy(Direction::kToHost, {host.data(), address_ + at, host.size()});
}

Result<void> GpuMemory::copy(Direction direction, const Transfer& transfer) {
  Driver& driver = gpu_->driver();
  const CurrentContext current(driver, gpu_->context());
  PEGA_TRY(check(driver, driver.copy(direction, &transfer, 1, stream_), "copy GPU memory"));
  return check(driver, driver.synchronize(stream_), "copy GPU memory");
}

Result<void> GpuMemory::clear() {
  Driver& driver = gpu_->driver();
  const CurrentContext current(driver, gpu_->context());
  PEGA_TRY(check(driver, driver.fill(address_, 0, size_bytes_, stream_), "fill GPU memory"));
  return check(driver, driver.synchronize(stream_), "fill GPU memory");
}

}  // namespace pegaflow::cuda
