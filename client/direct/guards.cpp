#include "client/direct/guards.h"

#include <atomic>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/assert.h"
#include "base/id128.h"

namespace pegaflow {
namespace {

using Word = std::atomic_ref<std::uint64_t>;
static_assert(Word::is_always_lock_free);

constexpr std::uint64_t kClosed = 0;

}  // namespace

Result<std::unique_ptr<Guards>> Guards::create(std::uint32_t count) {
  const std::size_t bytes = count * sizeof(std::uint64_t);
  UniqueFd fd(::memfd_create("pegaflow-guards", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fail_errno(errno, "create the memory of guards");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return fail_errno(errno, "size the memory of guards");
  }
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return fail_errno(errno, "map the memory of guards");
    // Before Linux 5.1 readers could write to it; none does. A child of fork() needs no guards.
#ifdef F_SEAL_FUTURE_WRITE
  static_cast<void>(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE));
#endif
  static_cast<void>(::madvise(memory, bytes, MADV_DONTFORK));
  return std::unique_ptr<Guards>(
      new Guards(std::move(fd), {static_cast<std::uint64_t*>(memory), count}));
}

Guards::Guards(UniqueFd fd, std::span<std::uint64_t> words)
    : fd_(std::move(fd)), words_(words), last_value_(Id128::random().low) {
  free_.reserve(count());
  for (std::uint32_t place = count(); place > 0; --place) free_.push_back(place - 1);
}

Guards::~Guards() {
  close_all();
  ::munmap(words_.data(), words_.size_bytes());
}

std::optional<Guard> Guards::open() {
  if (free_.empty()) return std::nullopt;
  if (++last_value_ == kClosed) ++last_value_;
  const Guard guard{free_.back(), last_value_};
  free_.pop_back();
  Word(words_[guard.place]).store(guard.value, std::memory_order_seq_cst);
  return guard;
}

void Guards::close(const Guard& guard) {
  Word word(words_[guard.place]);
  PEGA_ASSERT(word.load(std::memory_order_relaxed) == guard.value, "guard {} is closed twice",
              guard.place);
  // Pairs with the fence in PeerGuards::is_open(): a reader that has read what the engine writes
  // after this call sees the guard closed.
  word.store(kClosed, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  free_.push_back(guard.place);
}

void Guards::close_all() {
  free_.clear();
  for (std::uint64_t& word : words_) Word(word).store(kClosed, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

Result<PeerGuards> PeerGuards::map(int fd, std::uint32_t count) {
  const std::size_t bytes = count * sizeof(std::uint64_t);
  struct stat info {};
  if (::fstat(fd, &info) != 0) return fail_errno(errno, "fstat the memory of an engine's guards");
  if (bytes == 0 || static_cast<std::size_t>(info.st_size) < bytes) {
    return fail(Errc::kRefused, "{} guards of an engine in {} bytes", count, info.st_size);
  }
  // Without this seal the other process could truncate the memory, and a look would cause SIGBUS.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return fail(Errc::kRefused, "the memory of an engine's guards may shrink (seals {:#x})", seals);
  }
  void* const memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return fail_errno(errno, "map the memory of an engine's guards");
  return PeerGuards({static_cast<std::uint64_t*>(memory), count});
}

PeerGuards::PeerGuards(PeerGuards&& other) noexcept : words_(std::exchange(other.words_, {})) {}

PeerGuards& PeerGuards::operator=(PeerGuards&& other) noexcept {
  std::swap(words_, other.words_);
  return *this;
}

PeerGuards::~PeerGuards() {
  if (!words_.empty()) ::munmap(words_.data(), words_.size_bytes());
}

bool PeerGuards::is_open(const Guard& guard) const {
  if (guard.place >= words_.size() || guard.value == kClosed) return false;
  // The reads that came before are not moved behind the look at the guard.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return Word(words_[guard.place]).load(std::memory_order_seq_cst) == guard.value;
}

}  // namespace pegaflow
