#include "base/id128.h"

#include <cerrno>
#include <cstring>

#include <sys/random.h>

#include <fmt/core.h>

#include "base/assert.h"

namespace pegaflow {

Id128 Id128::random() {
  Id128 id;
  while (id.is_none()) {
    const ssize_t got = ::getrandom(&id, sizeof id, 0);
    PEGA_ASSERT(got == sizeof id || errno == EINTR, "getrandom: {}", std::strerror(errno));
  }
  return id;
}

std::string to_string(const Id128& id) { return fmt::format("{:016x}{:016x}", id.high, id.low); }

}  // namespace pegaflow
