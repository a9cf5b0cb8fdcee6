#pragma once
/// \file
/// The option --kv-events: addresses of engines' event streams that the operator names.

#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "index/events/kv_event_sources.h"
#include "router/routing/fleet.h"

namespace pegaflow::router {

/// The event streams of engines that do not report where they publish. Immutable.
class EventEndpoints {
 public:
  /// Parses values of the form ENGINE=ENDPOINT[+FIELD=VALUE]...:
  ///
  /// | field | meaning |
  /// |---|---|
  /// | `replay` | the endpoint for former batches; without it there are no replays |
  /// | `topic` | the prefix of the topics to subscribe to; without it all topics |
  /// | `rank` | the first data-parallel rank of the value, 0 by default |
  /// | `ranks` | the number of ranks, 1 by default: each has the next port of both endpoints |
  /// | `format` | the kind of the engine: `vllm` (the default), `sglang` or `trtllm` |
  ///
  /// Several values may name different ranks of one engine. For an engine dns://NAME:PORT the host
  /// of the endpoints is NAME and stands for each of its addresses.
  /// Errors: kInvalidArgument with the option, the value, the reason and the fix.
  static Result<EventEndpoints> parse(std::span<const std::string> values);

  /// The streams of the engine, in the order of their ranks; empty if no value names it.
  [[nodiscard]] std::vector<index::EventAddress> of(const EngineUrl& engine) const;
  /// The named engines that are not in `list`. An address to which a name in `list` with the same
  /// port may resolve is left out.
  [[nodiscard]] std::vector<std::string> unlisted(const EngineList& list) const;
  [[nodiscard]] bool empty() const noexcept { return engines_.empty(); }

 private:
  struct Engine {
    EngineUrl url;
    std::vector<index::EventAddress> streams;
  };

  std::map<std::string, Engine> engines_;  // By URL.
};

}  // namespace pegaflow::router
