// To be preloaded into a server whose disks are read by threads (--ssd-io threads): reads hang
// while another process has the lock of the file that $PEGA_TEST_READS_HANG names; with
// $PEGA_TEST_READS_HANG_OF only those of files whose path ends with it.
#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

bool hangs(int fd) {
  const char* const of = std::getenv("PEGA_TEST_READS_HANG_OF");
  if (of == nullptr || *of == 0) return true;
  std::array<char, 4096> path{};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = ::readlink(link.c_str(), path.data(), path.size());
  return length > 0 &&
         std::string_view(path.data(), static_cast<std::size_t>(length)).ends_with(of);
}

void wait_for_the_lock() {
  const char* const name = std::getenv("PEGA_TEST_READS_HANG");
  const int file = name == nullptr ? -1 : ::open(name, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  ::flock(file, LOCK_SH);
  ::close(file);
}

}  // namespace

// With offsets of 64 bits its symbol is preadv64v2, here as in the server.
extern "C" __attribute__((visibility("default"))) ssize_t preadv2(int fd, const iovec* memory,
                                                                  int count, off_t offset,
                                                                  int flags) {
  using Read = ssize_t (*)(int, const iovec*, int, off_t, int);
  static const auto read_now = reinterpret_cast<Read>(::dlsym(RTLD_NEXT, "preadv64v2"));
  if (hangs(fd)) wait_for_the_lock();
  return read_now(fd, memory, count, offset, flags);
}
