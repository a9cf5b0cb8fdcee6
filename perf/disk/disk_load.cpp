#include "perf/disk/disk_load.h"

#include <algorithm>
#include <utility>

#include <sys/mman.h>
#include <sys/resource.h>

#include "transport/disk/hooks.h"

namespace pegaflow::perf {
namespace {

/// MADV_COLLAPSE of Linux 6.1, which older C libraries do not name.
constexpr int kCollapse = 25;

constexpr std::uint64_t kWriteBlock = std::uint64_t{1} << 20;
constexpr std::uint64_t kWriteSlots = 16;
/// Tickets of the writes beside reads; those of the others are the numbers of slots.
constexpr std::uint64_t kFirstWrite = std::uint64_t{1} << 32;
constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

Result<std::unique_ptr<LoadedDisk>> LoadedDisk::open(const DiskOptions& options,
                                                     std::uint64_t seed) {
  const std::uint64_t bytes = 2 * std::max(options.limits.read_bytes, options.limits.write_bytes) +
                              kWriteSlots * kWriteBlock;
  PEGA_TRY_LET(harness::Mapping memory, harness::Mapping::anonymous(bytes));
  // On huge pages as a pool and fio's memory are; a kernel without them measures both on small
  // ones.
  (void)::madvise(memory.bytes().data(), bytes, kCollapse);
  std::mt19937_64 random(seed);
  for (std::byte& byte : memory.bytes()) byte = static_cast<std::byte>(random());
  std::unique_ptr<LoadedDisk> made(new LoadedDisk(std::move(memory), seed));
  LoadedDisk& loaded = *made;
  PEGA_TRY_LET(loaded.disk_, open_disk(options, [&loaded](Disk::Completion&& completion) {
                 const std::lock_guard lock(loaded.mutex_);
                 loaded.completions_.push_back(std::move(completion));
                 loaded.changed_.notify_one();
               }));
  return made;
}

std::vector<Disk::Completion> LoadedDisk::take() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !completions_.empty(); });
  return std::exchange(completions_, {});
}

Result<void> LoadedDisk::submit(const DiskLoad& load, std::uint64_t slot) {
  const std::uint64_t blocks = disk_->size_bytes() / load.block_bytes;
  const std::uint64_t block = load.sequential ? next_block_++ % blocks : random_() % blocks;
  Disk::Request request{
      .ticket = slot,
      .operation = load.operation,
      .offset = block * load.block_bytes,
      .memory = {memory_.bytes().subspan(slot * load.block_bytes, load.block_bytes)}};
  if (load.hashed) request.hook = disk::take_checksums(request.memory, {load.block_bytes});
  return disk_->submit(std::move(request));
}

Result<void> LoadedDisk::submit_write(std::uint64_t slot) {
  const std::uint64_t block = random_() % (disk_->size_bytes() / kWriteBlock);
  const std::uint64_t from = memory_.bytes().size() - (slot + 1) * kWriteBlock;
  return disk_->submit({.ticket = kFirstWrite + slot,
                        .operation = Disk::Operation::kWrite,
                        .offset = block * kWriteBlock,
                        .memory = {memory_.bytes().subspan(from, kWriteBlock)}});
}

/// Takes that many completions more.
Result<void> LoadedDisk::drain(std::uint64_t open) {
  while (open > 0) {
    for (const Disk::Completion& completion : take()) {
      if (completion.error) return tl::unexpected<Error>(*completion.error);
      --open;
    }
  }
  return {};
}

Result<DiskRate> LoadedDisk::run(const DiskLoad& load) {
  const std::uint64_t room = memory_.bytes().size() - kWriteSlots * kWriteBlock;
  const std::uint64_t count = std::max<std::uint64_t>(1, load.total_bytes / load.block_bytes);
  const std::uint64_t slots = std::min(count, room / load.block_bytes);
  std::uint64_t begun = 0;
  std::uint64_t ended = 0;
  if (load.beside_writes) {
    for (std::uint64_t slot = 0; slot < kWriteSlots; ++slot) PEGA_TRY(submit_write(slot));
  }
  const double cpu_before = cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  for (; begun < slots; ++begun) PEGA_TRY(submit(load, begun));
  while (ended < count) {
    for (const Disk::Completion& completion : take()) {
      if (completion.error) return tl::unexpected<Error>(*completion.error);
      if (completion.ticket >= kFirstWrite) {
        PEGA_TRY(submit_write(completion.ticket - kFirstWrite));
        continue;
      }
      ++ended;
      if (begun == count) continue;
      ++begun;
      PEGA_TRY(submit(load, completion.ticket));
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  const double cpu = cpu_seconds() - cpu_before;
  if (load.beside_writes) PEGA_TRY(drain(kWriteSlots));
  const auto bytes = static_cast<double>(count * load.block_bytes);
  return DiskRate{.gigabytes_per_second = bytes / took.count() / 1e9,
                  .cpu_ms_per_gib = cpu * 1e3 / (bytes / kGiB)};
}

Result<void> LoadedDisk::fill() {
  next_block_ = 0;
  PEGA_TRY(run({.operation = Disk::Operation::kWrite,
                .block_bytes = kWriteBlock,
                .total_bytes = disk_->size_bytes(),
                .sequential = true}));
  PEGA_TRY(disk_->submit({.ticket = 0, .operation = Disk::Operation::kFlush}));
  return drain(1);
}

}  // namespace pegaflow::perf
