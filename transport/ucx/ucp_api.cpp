#include "transport/ucx/ucp_api.h"

#include <array>
#include <cstdlib>
#include <utility>

#include <dlfcn.h>

namespace pegaflow::ucx {
namespace {

constexpr unsigned kOldestVersion = 1013;

/// Settings for UCX's loading, whose defaults are meant for programs of UCX's own: this process
/// keeps its signal handlers and its standard output. The user's own values win. UCX's hooks of
/// mmap stay: up to 1.15 it finds our registrations through its cache, which needs them.
constexpr std::array<std::pair<const char*, const char*>, 3> kManners{{
    {"UCX_HANDLE_ERRORS", "none"},
    {"UCX_LOG_FILE", "stderr"},
    {"UCX_WARN_UNUSED_ENV_VARS", "n"},
}};

template <typename Function>
void find(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr && missing.empty()) missing = name;
}

Result<UcpApi> open_library() {
  for (const auto& [name, value] : kManners) ::setenv(name, value, 0);
  // Its modules find libucs and libuct by name, so nothing has to be global. It is never unloaded:
  // its threads may run until the end.
  void* const library = ::dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return fail(Errc::kRefused, "UCX is not installed (package libucx0): {}", ::dlerror());
  }
  UcpApi api{};
  std::string missing;
#define PEGA_FIND(name) find(library, "ucp_" #name, api.name, missing)
  PEGA_FIND(config_read);
  PEGA_FIND(config_modify);
  PEGA_FIND(config_release);
  PEGA_FIND(init_version);
  PEGA_FIND(cleanup);
  PEGA_FIND(get_version);
  PEGA_FIND(get_version_string);
  PEGA_FIND(worker_create);
  PEGA_FIND(worker_destroy);
  PEGA_FIND(worker_get_address);
  PEGA_FIND(worker_release_address);
  PEGA_FIND(worker_get_efd);
  PEGA_FIND(worker_arm);
  PEGA_FIND(worker_progress);
  PEGA_FIND(worker_set_am_recv_handler);
  PEGA_FIND(mem_map);
  PEGA_FIND(mem_unmap);
  PEGA_FIND(rkey_pack);
  PEGA_FIND(rkey_buffer_release);
  PEGA_FIND(ep_rkey_unpack);
  PEGA_FIND(rkey_destroy);
  PEGA_FIND(ep_create);
  PEGA_FIND(ep_close_nbx);
  PEGA_FIND(get_nbx);
  PEGA_FIND(am_send_nbx);
  PEGA_FIND(request_check_status);
  PEGA_FIND(request_free);
#undef PEGA_FIND
  // From libucs, which libucp needs and dlsym() searches.
  find(library, "ucs_status_string", api.status_string, missing);
  if (!missing.empty() || api.version() < kOldestVersion) {
    return fail(Errc::kRefused, "libucp is {}, and 1.13 is the oldest that works{}{}",
                api.get_version_string == nullptr ? "unknown" : api.get_version_string(),
                missing.empty() ? "" : "; it has no ", missing);
  }
  return api;
}

}  // namespace

Result<const UcpApi*> UcpApi::load() {
  static const Result<UcpApi> opened = open_library();
  if (!opened) return tl::unexpected<Error>(opened.error());
  return &*opened;
}

unsigned UcpApi::version() const {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  get_version(&major, &minor, &release);
  return major * 1000 + minor;
}

}  // namespace pegaflow::ucx
