#pragma once
/// \file
/// The client of harness/wire_client.h for tests: it throws when the connection fails.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/page_layout.h"
#include "harness/engine_memory.h"
#include "harness/wire_client.h"

namespace pegaflow::testing {

/// The pool as a client has it.
struct MappedPool {
  UniqueFd fd;
  harness::Mapping mapping;
  std::uint64_t page_bytes = 0;
  std::string namespace_hash;

  [[nodiscard]] std::span<std::byte> slot(std::uint32_t index) const {
    return mapping.bytes().subspan(index * kSlotAlignment, page_bytes);
  }
};

/// One connection. The error of a Result is the server's, or kInternal when its pool has no
/// descriptor. A call without a response throws kj::Exception; connecting, mapping the pool and
/// calls that return no Result throw std::runtime_error.
class WireClient : public harness::WireClient {
 public:
  /// Connects, and sends nothing.
  WireClient(kj::AsyncIoContext& io, const std::string& socket);

  Greeting hello(HelloOptions options = {});
  /// The default factors and one rank.
  Result<MappedPool> register_rank(const std::string& instance, std::uint64_t page_bytes);
  Result<MappedPool> register_rank(const Registration& registration);
  /// `scheduler` names its jobs; none: the process does.
  Result<void> attach(const std::string& instance, const Id128& scheduler = {});
  Found lookup(std::span<const BlockKey> keys, std::uint32_t local_units = 0);
  kj::Promise<Result<void>> await_job(const Id128& server, const JobId& job,
                                      std::uint32_t patience_ms);
  kj::Promise<JobsReached> jobs_reached(const Id128& server, const JobId& job,
                                        std::uint32_t patience_ms, bool begun = false);
  /// reserve, fill each slot with its key's first byte, publish. Returns the number of slots.
  Result<std::size_t> save(const MappedPool& pool, const JobId& job,
                           std::span<const BlockKey> keys);
};

/// 32-byte keys of a chain: equal `chain` and number give equal keys.
std::vector<BlockKey> make_keys(std::uint64_t chain, std::size_t count, std::size_t first = 0);

}  // namespace pegaflow::testing
