#include "transport/host/peer_reader.h"

#include <bit>
#include <cerrno>
#include <climits>
#include <utility>

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/os/pidfd.h"
#include "base/os/unique_fd.h"
#include "transport/device_checks.h"

namespace pegaflow {
namespace {

std::uint64_t address_of(const void* place) { return std::bit_cast<std::uintptr_t>(place); }

Error ended(pid_t pid) {
  return {Errc::kGone, fmt::format("process {}, whose memory was read, has ended", pid)};
}

Error read_error(pid_t pid, int error_number) {
  if (error_number == ESRCH) return ended(pid);
  Error error =
      fail_errno(error_number, fmt::format("process_vm_readv from process {}", pid)).value();
  if (error_number == EPERM || error_number == ENOSYS) {
    error.code = Errc::kRefused;
    error.detail +=
        "; it needs the same user, kernel.yama.ptrace_scope=0 or 1, or CAP_SYS_PTRACE, and a "
        "seccomp "
        "profile that permits the call";
  }
  return error;
}

/// Collects the pieces of several pages for calls of process_vm_readv(). Pieces that adjoin each
/// other become one, on each side by itself: the kernel cuts both sides as it likes.
class Calls {
 public:
  explicit Calls(pid_t pid) : pid_(pid) {}

  /// Reads what was added before when a call is full.
  Result<void> add(std::byte* to, std::uint64_t from, std::uint64_t bytes) {
    if (local_.size() == IOV_MAX || remote_.size() == IOV_MAX) PEGA_TRY(read());
    append(local_, to, bytes);
    append(remote_, std::bit_cast<void*>(static_cast<std::uintptr_t>(from)), bytes);
    pending_bytes_ += bytes;
    return {};
  }
  Result<void> read() {
    if (pending_bytes_ == 0) return {};
    const ssize_t count =
        ::process_vm_readv(pid_, local_.data(), local_.size(), remote_.data(), remote_.size(), 0);
    if (count < 0) return tl::unexpected<Error>(read_error(pid_, errno));
    const auto bytes = static_cast<std::uint64_t>(count);
    read_bytes_ += bytes;
    if (bytes < pending_bytes_) {
      return fail(Errc::kIo, "process_vm_readv from process {}: {} of {} bytes are readable", pid_,
                  bytes, pending_bytes_);
    }
    local_.clear();
    remote_.clear();
    pending_bytes_ = 0;
    return {};
  }
  /// In the order in which they were added.
  [[nodiscard]] std::uint64_t read_bytes() const noexcept { return read_bytes_; }

 private:
  static void append(std::vector<iovec>& pieces, void* at, std::uint64_t bytes) {
    if (!pieces.empty()) {
      iovec& last = pieces.back();
      if (address_of(last.iov_base) + last.iov_len == address_of(at)) {
        last.iov_len += bytes;
        return;
      }
    }
    pieces.push_back({at, bytes});
  }

  const pid_t pid_;
  std::vector<iovec> local_;
  std::vector<iovec> remote_;
  std::uint64_t pending_bytes_ = 0;
  std::uint64_t read_bytes_ = 0;
};

/// The process's number in this process's PID namespace.
Result<pid_t> number_of(int pidfd) {
  Result<pid_t> own = own_number_of_pidfd(pidfd);
  if (!own) own.error().detail.insert(0, "add peer: ");
  return own;
}

}  // namespace

PeerReader::PeerReader(const PeerMemory& memory, pid_t pid)
    : block_count_(memory.block_count), process_(memory.process), pid_(pid) {
  segments_.reserve(memory.segments.size());
  for (const Segment& segment : memory.segments) {
    segments_.push_back({address_of(segment.base), segment.block_stride_bytes});
  }
}

Result<PeerReader> PeerReader::open(const PeerMemory& memory, const PageLayout& layout) {
  if (memory.is_on_gpu()) {
    return fail(Errc::kRefused, "add peer: its memory is on a GPU, and that of this engine is not");
  }
  PEGA_TRY(device::check_peer(memory, layout));
  PEGA_TRY_LET(const pid_t pid, number_of(memory.process));
  PeerReader reader(memory, pid);
  Calls calls(pid);
  std::byte first{};
  PEGA_TRY(calls.add(&first, reader.segments_.front().base, 1));
  const Result<void> permitted = calls.read();
  if (has_process_ended(memory.process)) return tl::unexpected<Error>(ended(pid));
  PEGA_TRY(permitted);
  return reader;
}

PeerReader::Outcome PeerReader::read(const PageLayout& layout,
                                     std::span<const Device::Copy> copies) const {
  Calls calls(pid_);
  const auto read_all = [&]() -> Result<void> {
    for (const Device::Copy& copy : copies) {
      for (std::size_t i = 0; i < segments_.size(); ++i) {
        const Segment& local = layout.segments()[i];
        PEGA_TRY(calls.add(local.base + copy.block * local.block_stride_bytes,
                           segments_[i].base + copy.pool_offset * segments_[i].block_stride_bytes,
                           local.size_bytes));
      }
    }
    return calls.read();
  };
  Result<void> done = read_all();
  if (has_process_ended(process_)) return {0, ended(pid_)};
  if (done) return {copies.size(), std::nullopt};
  return {static_cast<std::size_t>(calls.read_bytes() / layout.page_bytes()),
          std::move(done.error())};
}

}  // namespace pegaflow
