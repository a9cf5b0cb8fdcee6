#include "tests/support/refuse.h"

#include <array>
#include <cstddef>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

namespace pegaflow::testing {

std::optional<int> answer_mbind_with(int error) {
  const auto answer = static_cast<unsigned>(SECCOMP_RET_ERRNO) |
                      (static_cast<unsigned>(error) & static_cast<unsigned>(SECCOMP_RET_DATA));
  std::array<sock_filter, 4> filter = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mbind, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, answer),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  sock_fprog program{.len = filter.size(), .filter = filter.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return std::nullopt;
  if (::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) return std::nullopt;
  return error;
}

}  // namespace pegaflow::testing
