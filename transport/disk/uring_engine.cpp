// io_uring. The only file that includes liburing.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include <liburing.h>
#include <poll.h>
#include <sys/resource.h>

#include "base/assert.h"
#include "base/log.h"
#include "transport/disk/io_engine.h"
#include "transport/disk/open_disk.h"

namespace pegaflow {
namespace disk {
namespace {

constexpr Log kLog{"disk"};
constexpr std::uint64_t kWake = ~std::uint64_t{0};
/// The kernel refuses larger ones (EFAULT).
constexpr std::size_t kMostBufferBytes = std::size_t{1} << 30;
/// The kernel's limit on registered buffers is 16,384.
constexpr std::size_t kMostBuffers = 16384;

std::string why_forbidden() {
  std::ifstream file("/proc/sys/kernel/io_uring_disabled");
  int disabled = 0;
  if (file >> disabled && disabled != 0) {
    return fmt::format("the setting kernel.io_uring_disabled is {}", disabled);
  }
  return "a seccomp profile forbids it, as the default ones of Docker and containerd do";
}

/// `error` is positive.
std::string reason_of(int error) {
  std::string reason = fmt::format("io_uring_setup: {}", std::strerror(error));
  if (error == EPERM || error == EACCES) return reason + "; " + why_forbidden();
  if (error == ENOSYS) return reason + "; the kernel has no io_uring, or seccomp hides it";
  if (error == ENOMEM) return reason + "; RLIMIT_MEMLOCK is too low for a ring";
  return reason;
}

/// A ring for the calling thread: its completions are posted only while this thread waits, so that
/// no interrupt runs in the middle of a hash. Kernels before 6.1 lack the flags. 0, or an errno.
int make_ring(unsigned entries, io_uring& ring) {
  constexpr unsigned kModern =
      IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
  int status = 0;
  for (const unsigned flags : {kModern, 0U}) {
    io_uring_params params{};
    params.flags = flags | IORING_SETUP_CQSIZE;
    params.cq_entries = 2 * entries;
    status = ::io_uring_queue_init_params(entries, &ring, &params);
    if (status == 0) {
      if ((params.features & IORING_FEAT_EXT_ARG) != 0) return 0;
      ::io_uring_queue_exit(&ring);
      return ENOSYS;  // Before 5.11: a wait has no timeout of its own.
    }
    if (status != -EINVAL) return -status;
  }
  return -status;
}

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(const Options& options) : options_(options) {}
  ~UringEngine() override {
    if (is_open_) ::io_uring_queue_exit(&ring_);
  }
  UringEngine(const UringEngine&) = delete;
  UringEngine& operator=(const UringEngine&) = delete;

  Result<void> open() {
    unsigned entries = 8;
    while (entries < options_.pieces + 8) entries *= 2;
    if (const int error = make_ring(entries, ring_); error != 0) {
      return fail(error == ENOMEM ? Errc::kOutOfCapacity : Errc::kRefused, "{}", reason_of(error));
    }
    is_open_ = true;
    if (const int status = ::io_uring_register_files(&ring_, &options_.fd, 1); status != 0) {
      return fail_errno(-status, "io_uring: register the file");
    }
    register_memory();
    watch_wake();
    return {};
  }

  void begin(const Piece& piece) override {
    io_uring_sqe* const sqe = next_sqe();
    const auto count = static_cast<unsigned>(piece.memory.size());
    switch (piece.operation) {
      case Disk::Operation::kRead:
      case Disk::Operation::kWrite:
        prepare_transfer(sqe, piece, piece.operation == Disk::Operation::kRead);
        break;
      case Disk::Operation::kDurableWrite:
        ::io_uring_prep_writev2(sqe, 0, piece.memory.data(), count, piece.offset, RWF_DSYNC);
        break;
      case Disk::Operation::kFlush:
        ::io_uring_prep_fsync(sqe, 0, IORING_FSYNC_DATASYNC);
        break;
    }
    sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = piece.id;
  }

  void submit() override {
    while (::io_uring_sq_ready(&ring_) > 0) {
      if (!must_retry(::io_uring_submit(&ring_))) return;
    }
  }

  void wait(Duration timeout, std::vector<Outcome>& outcomes) override {
    if (is_awake_) watch_wake();
    __kernel_timespec time{.tv_sec = timeout.count() / 1'000'000'000,
                           .tv_nsec = timeout.count() % 1'000'000'000};
    io_uring_cqe* first = nullptr;
    must_retry(::io_uring_submit_and_wait_timeout(
        &ring_, &first, 1, timeout == Duration::max() ? nullptr : &time, nullptr));
    reap(outcomes);
  }

  void poll(std::vector<Outcome>& outcomes) override {
    io_uring_cqe* first = nullptr;
    ::io_uring_peek_cqe(&ring_, &first);  // Has the kernel post what has ended.
    reap(outcomes);
  }

  [[nodiscard]] std::uint64_t registered_bytes() const override { return registered_bytes_; }

 private:
  struct Buffer {
    std::byte* begin;
    std::byte* end;
  };

  /// Whether the call is to be repeated: an error of it concerns no piece, because those have
  /// results of their own.
  static bool must_retry(int status) {
    // EAGAIN and ENOMEM: the kernel has no memory for requests now; EBUSY: completions wait to be
    // reaped; ETIME: the wait is over.
    PEGA_ASSERT(status >= 0 || status == -EINTR || status == -EAGAIN || status == -EBUSY ||
                    status == -ETIME || status == -ENOMEM,
                "io_uring_enter: {}", std::strerror(-status));
    return status >= 0 || status == -EINTR;
  }

  io_uring_sqe* next_sqe() {
    io_uring_sqe* const sqe = ::io_uring_get_sqe(&ring_);
    // The ring has an entry for every piece that may be in flight, and for the wake-up.
    PEGA_ASSERT(sqe != nullptr, "io_uring: the ring is full");
    return sqe;
  }

  void prepare_transfer(io_uring_sqe* sqe, const Piece& piece, bool is_read) {
    if (piece.memory.size() > 1) {
      const auto count = static_cast<unsigned>(piece.memory.size());
      if (is_read) {
        ::io_uring_prep_readv(sqe, 0, piece.memory.data(), count, piece.offset);
      } else {
        ::io_uring_prep_writev(sqe, 0, piece.memory.data(), count, piece.offset);
      }
      return;
    }
    const iovec& only = piece.memory.front();
    const auto size = static_cast<unsigned>(only.iov_len);
    if (const int buffer = find_buffer(only); buffer >= 0) {
      if (is_read) {
        ::io_uring_prep_read_fixed(sqe, 0, only.iov_base, size, piece.offset, buffer);
      } else {
        ::io_uring_prep_write_fixed(sqe, 0, only.iov_base, size, piece.offset, buffer);
      }
    } else if (is_read) {
      ::io_uring_prep_read(sqe, 0, only.iov_base, size, piece.offset);
    } else {
      ::io_uring_prep_write(sqe, 0, only.iov_base, size, piece.offset);
    }
  }

  /// The registered buffer that contains all of the memory, or -1. Memory across the border of two
  /// is used like memory that is not registered.
  [[nodiscard]] int find_buffer(const iovec& memory) const {
    const auto* const begin = static_cast<const std::byte*>(memory.iov_base);
    const auto after = std::upper_bound(
        buffers_.begin(), buffers_.end(), begin,
        [](const std::byte* address, const Buffer& buffer) { return address < buffer.begin; });
    if (after == buffers_.begin()) return -1;
    const Buffer& buffer = *std::prev(after);
    if (begin + memory.iov_len > buffer.end) return -1;
    return static_cast<int>(std::prev(after) - buffers_.begin());
  }

  void register_memory() {
    for (const std::span<std::byte> part : options_.huge_memory) {
      for (std::size_t at = 0; at < part.size(); at += kMostBufferBytes) {
        const std::span<std::byte> cut =
            part.subspan(at, std::min(kMostBufferBytes, part.size() - at));
        buffers_.push_back({.begin = cut.data(), .end = cut.data() + cut.size()});
      }
    }
    if (buffers_.empty()) return;
    std::sort(buffers_.begin(), buffers_.end(),
              [](const Buffer& one, const Buffer& other) { return one.begin < other.begin; });
    std::vector<iovec> vectors;
    for (const Buffer& buffer : buffers_) {
      vectors.push_back({.iov_base = buffer.begin,
                         .iov_len = static_cast<std::size_t>(buffer.end - buffer.begin)});
      registered_bytes_ += vectors.back().iov_len;
    }
    const int status = vectors.size() > kMostBuffers
                           ? -EMFILE
                           : ::io_uring_register_buffers(&ring_, vectors.data(),
                                                         static_cast<unsigned>(vectors.size()));
    if (status == 0) return;
    // The capability CAP_IPC_LOCK or a higher RLIMIT_MEMLOCK would allow it.
    kLog.info("the pool is not registered with io_uring, which costs some CPU time error=\"{}\"",
              std::strerror(-status));
    buffers_.clear();
    registered_bytes_ = 0;
  }

  void watch_wake() {
    is_awake_ = false;
    io_uring_sqe* const sqe = next_sqe();
    ::io_uring_prep_poll_add(sqe, options_.wake_fd, POLLIN);
    sqe->user_data = kWake;
  }

  void reap(std::vector<Outcome>& outcomes) {
    unsigned head = 0;
    unsigned count = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++count;
      if (cqe->user_data == kWake) {
        is_awake_ = true;
      } else {
        outcomes.push_back(
            {.piece = static_cast<std::uint32_t>(cqe->user_data), .result = cqe->res});
      }
    }
    ::io_uring_cq_advance(&ring_, count);
  }

  const Options options_;
  io_uring ring_{};
  bool is_open_ = false;
  bool is_awake_ = false;
  std::vector<Buffer> buffers_;  // By address.
  std::uint64_t registered_bytes_ = 0;
};

}  // namespace

Result<std::unique_ptr<IoEngine>> make_uring_engine(const IoEngine::Options& options) {
  auto engine = std::make_unique<UringEngine>(options);
  PEGA_TRY(engine->open());
  return engine;
}

}  // namespace disk

UringSupport probe_uring() {
  io_uring ring{};
  if (const int error = disk::make_ring(2, ring); error != 0) {
    return {.allowed = false, .reason = disk::reason_of(error)};
  }
  io_uring_probe* const probe = ::io_uring_get_probe_ring(&ring);
  const bool complete = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0;
  if (probe != nullptr) ::io_uring_free_probe(probe);
  ::io_uring_queue_exit(&ring);
  if (!complete) return {.allowed = false, .reason = "the kernel's io_uring has no plain reads"};
  return {.allowed = true, .reason = "io_uring is allowed"};
}

}  // namespace pegaflow
