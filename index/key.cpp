#include "index/key.h"

#include <xxhash.h>

namespace pegaflow::index {

std::uint64_t domain_salt(std::string_view domain) {
  return XXH3_64bits(domain.data(), domain.size());
}

}  // namespace pegaflow::index
