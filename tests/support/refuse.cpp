#include "tests/support/refuse.h"

#include <array>
#include <cerrno>
#include <cstddef>
#include <span>

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

namespace pegaflow::testing {
namespace {

bool install(std::span<sock_filter> filter) {
  sock_fprog program{.len = static_cast<unsigned short>(filter.size()), .filter = filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

constexpr unsigned answer(int error) {
  return static_cast<unsigned>(SECCOMP_RET_ERRNO) |
         (static_cast<unsigned>(error) & static_cast<unsigned>(SECCOMP_RET_DATA));
}

/// Sets the result of one system call.
bool answer_with(unsigned number, int error) {
  std::array<sock_filter, 4> filter = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, answer(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  return install(filter);
}

}  // namespace

std::optional<int> answer_mbind_with(int error) {
  if (!answer_with(SYS_mbind, error)) return std::nullopt;
  return error;
}

bool forbid_io_uring() { return answer_with(SYS_io_uring_setup, EPERM); }

bool forbid_reads_of_processes() { return answer_with(SYS_process_vm_readv, EPERM); }

bool refuse_direct_open() {
  // glibc's open() is openat(); the flags are its third argument.
  constexpr auto kFlags = static_cast<unsigned>(offsetof(seccomp_data, args) + 2 * sizeof(__u64));
  std::array<sock_filter, 6> filter = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kFlags),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, O_DIRECT, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, answer(EINVAL)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  return install(filter);
}

}  // namespace pegaflow::testing
