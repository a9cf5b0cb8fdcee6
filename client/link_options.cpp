#include "client/link_options.h"

#include <sys/un.h>

namespace pegaflow {

Result<void> validate(const LinkOptions& options) {
  constexpr std::size_t kLongestPath = sizeof(sockaddr_un::sun_path) - 1;
  if (options.socket_path.empty() || options.socket_path.size() > kLongestPath) {
    return fail(Errc::kInvalidArgument,
                "socket_path \"{}\" has {} bytes; the kernel takes 1 to {} for a Unix socket",
                options.socket_path, options.socket_path.size(), kLongestPath);
  }
  if (options.instance.empty()) return fail(Errc::kInvalidArgument, "instance is empty");
  const struct {
    const char* name;
    Duration value;
  } times[] = {{"connect_deadline", options.connect_deadline},
               {"lookup_deadline", options.lookup_deadline},
               {"open_deadline", options.open_deadline},
               {"reserve_deadline", options.reserve_deadline},
               {"reconnect_interval", options.reconnect_interval},
               {"refused_interval", options.refused_interval},
               {"breaker_window", options.breaker_window},
               {"breaker_probe_interval", options.breaker_probe_interval}};
  for (const auto& time : times) {
    if (time.value <= Duration::zero()) {
      return fail(Errc::kInvalidArgument, "{} is {} ns; it must be positive", time.name,
                  time.value.count());
    }
  }
  if (options.breaker_failures < 1) {
    return fail(Errc::kInvalidArgument, "breaker_failures is {}; it must be 1 or more",
                options.breaker_failures);
  }
  if (options.minimum_version > options.maximum_version) {
    return fail(Errc::kInvalidArgument, "minimum_version {} is above maximum_version {}",
                options.minimum_version, options.maximum_version);
  }
  return {};
}

std::string_view to_string(LinkState state) noexcept {
  switch (state) {
    case LinkState::kConnecting:
      return "connecting";
    case LinkState::kRefused:
      return "refused";
    case LinkState::kReady:
      return "ready";
    case LinkState::kBroken:
      return "broken";
    case LinkState::kRetired:
      return "retired";
  }
  return "unknown";
}

}  // namespace pegaflow
