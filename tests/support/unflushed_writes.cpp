// To be preloaded into a server whose disks are written by threads (--ssd-io threads): records in
// $PEGA_TEST_UNFLUSHED what each write replaced, and what a flush made durable, so that a test can
// cut the power: see perf/support/power_cut.py for the format.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

enum class Kind : std::uint64_t { kWrite = 1, kFlush = 2 };

/// kWrite: `size` former bytes at `offset` follow. kFlush: every write up to `sequence` is durable,
/// but for the `size` bytes of sequence numbers that follow.
struct Record {
  Kind kind{};
  std::uint64_t sequence = 0;
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
};

std::mutex mutex;
std::uint64_t last_sequence = 0;
std::set<std::uint64_t> in_flight;

struct Free {
  void operator()(void* memory) const noexcept { std::free(memory); }
};

template <typename Function>
Function next_of(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

/// Whole or not at all: one write to a file opened with O_APPEND.
void append(const Record& record, const void* bytes) {
  static const int log =
      ::open(std::getenv("PEGA_TEST_UNFLUSHED"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const std::array<iovec, 2> parts = {
      iovec{const_cast<Record*>(&record), sizeof record},
      iovec{const_cast<void*>(bytes), static_cast<std::size_t>(record.size)}};
  if (::writev(log, parts.data(), 2) < 0) std::abort();
}

std::uint64_t begin_write(int fd, const iovec* memory, int count, off_t offset) {
  std::size_t size = 0;
  for (int i = 0; i < count; ++i) size += memory[i].iov_len;
  const std::unique_ptr<void, Free> former(std::aligned_alloc(4096, (size + 4095) / 4096 * 4096));
  if (::pread(fd, former.get(), size, offset) != static_cast<ssize_t>(size)) std::abort();
  const std::lock_guard lock(mutex);
  in_flight.insert(++last_sequence);
  append({Kind::kWrite, last_sequence, static_cast<std::uint64_t>(offset), size}, former.get());
  return last_sequence;
}

}  // namespace

// With offsets of 64 bits their symbols are those of the 64-bit functions, here as in the server.
extern "C" __attribute__((visibility("default"))) ssize_t pwritev2(int fd, const iovec* memory,
                                                                   int count, off_t offset,
                                                                   int flags) {
  using Write = ssize_t (*)(int, const iovec*, int, off_t, int);
  static const auto write_now = next_of<Write>("pwritev64v2");
  if ((flags & RWF_DSYNC) != 0) return write_now(fd, memory, count, offset, flags);
  const std::uint64_t sequence = begin_write(fd, memory, count, offset);
  const ssize_t written = write_now(fd, memory, count, offset, flags);
  const std::lock_guard lock(mutex);
  in_flight.erase(sequence);
  return written;
}

extern "C" __attribute__((visibility("default"))) int fdatasync(int fd) {
  static const auto flush_now = next_of<int (*)(int)>("fdatasync");
  std::vector<std::uint64_t> unfinished;
  std::uint64_t last = 0;
  {
    const std::lock_guard lock(mutex);
    unfinished.assign(in_flight.begin(), in_flight.end());
    last = last_sequence;
  }
  const int flushed = flush_now(fd);
  if (flushed == 0) {
    append({Kind::kFlush, last, 0, unfinished.size() * sizeof last}, unfinished.data());
  }
  return flushed;
}
