#include "base/session_name.h"

#include <xxhash.h>

namespace pegaflow {

std::uint64_t session_name(std::string_view id) noexcept {
  return XXH3_64bits(id.data(), id.size());
}

}  // namespace pegaflow
