// Runs a program on a machine with other NUMA nodes, as far as it can see.
//   usage: on_machine ROOT MBIND PROGRAM [ARGUMENT...]
// ROOT is the directory that NumaFiles wrote: its files replace the kernel's. MBIND is the result
// of mbind(), an errno or 0 for success without effect; "as-it-is" leaves it alone. Exits with 77
// if this process may not mount.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include "tests/support/refuse.h"

namespace {

constexpr int kSkipped = 77;

bool put(const std::filesystem::path& file, const char* place) {
  if (::mount(file.c_str(), place, nullptr, MS_BIND, nullptr) == 0) return true;
  std::perror(place);
  return false;
}

}  // namespace

int main(int count, char** words) {
  if (count < 4) {
    std::fputs("usage: on_machine ROOT MBIND PROGRAM [ARGUMENT...]\n", stderr);
    return 2;
  }
  const std::filesystem::path root = words[1];
  const std::string mbind = words[2];
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    std::perror("a mount namespace of its own");
    return kSkipped;
  }
  if (!put(root / "sys/devices/system/node", "/sys/devices/system/node") ||
      !put(root / "sys/devices/system/cpu/online", "/sys/devices/system/cpu/online") ||
      !put(root / "status", "/proc/self/status")) {
    return kSkipped;
  }
  if (mbind != "as-it-is" && !pegaflow::testing::answer_mbind_with(std::atoi(mbind.c_str()))) {
    std::perror("a filter of system calls");
    return kSkipped;
  }
  ::execvp(words[3], words + 3);
  std::perror(words[3]);
  return 126;
}
