#include "base/os/text_file.h"

#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/os/unique_fd.h"

namespace pegaflow {
namespace {

tl::unexpected<Error> fail_reading(int error_number) {
  return fail(Errc::kInvalidArgument, "cannot be read: {}",
              std::generic_category().message(error_number));
}

}  // namespace

Result<std::string> read_text_file(const std::string& path) {
  // Otherwise, opening a pipe for reading waits for a writer.
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat about {};
  if (!file || ::fstat(file.get(), &about) != 0) return fail_reading(errno);
  if (S_ISDIR(about.st_mode)) return fail_reading(EISDIR);
  if (!S_ISREG(about.st_mode)) {
    return fail(Errc::kInvalidArgument, "cannot be read: it is not a regular file");
  }
  std::string text;
  // One byte above the limit shows that the file is too long. The size in `about` may change
  // meanwhile.
  std::size_t size = 0;
  while (size <= kMaxTextFileBytes) {
    constexpr std::size_t kStep = std::size_t{64} << 10U;
    text.resize(size + kStep);
    const ssize_t got = ::read(file.get(), text.data() + size, kStep);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_reading(errno);
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  if (size > kMaxTextFileBytes) {
    return fail(Errc::kInvalidArgument, "has more than {} bytes", kMaxTextFileBytes);
  }
  text.resize(size);
  return text;
}

}  // namespace pegaflow
