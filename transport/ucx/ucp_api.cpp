#include "transport/ucx/ucp_api.h"

#include <array>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include <dlfcn.h>

namespace pegaflow::ucx {
namespace {

constexpr unsigned kOldestVersion = 1013;

/// Settings for UCX's loading, whose defaults are meant for programs of UCX's own: this process
/// keeps its signal handlers and its standard output. The user's own values win. UCX's hooks of
/// mmap stay: up to 1.15 it finds our registrations through its cache, which needs them. Its cache
/// of kinds of memory takes GPU memory for the host's that was allocated before UCX was loaded, as
/// that of engines is; without it UCX asks CUDA.
constexpr std::array<std::pair<const char*, const char*>, 4> kManners{{
    {"UCX_HANDLE_ERRORS", "none"},
    {"UCX_LOG_FILE", "stderr"},
    {"UCX_MEMTYPE_CACHE", "n"},
    {"UCX_WARN_UNUSED_ENV_VARS", "n"},
}};

template <typename Function>
void find(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr && missing.empty()) missing = name;
}

constexpr const char* kWanted =
    "name the file libucp.so.0 of UCX 1.13 or newer with --ucx-library or PEGA_UCX_LIBRARY";

/// The loader's last error without the name of `file`, which it often begins with.
std::string loader_error(const std::string& file) {
  const char* const text = ::dlerror();
  std::string_view error = text == nullptr ? "unknown error" : text;
  if (error.starts_with(file + ": ")) error.remove_prefix(file.size() + 2);
  return std::string(error);
}

/// The libraries that libucp is linked with, in the order in which they are loaded.
constexpr std::array<const char*, 3> kParts = {"libucm.so.0", "libucs.so.0", "libuct.so.0"};

/// Opens a library that the operator names, with UCX's other libraries beside it, even if the files
/// were moved and their search path is another: the loader takes a library that is loaded already
/// by its name.
Result<void*> open_named(const std::string& library) {
  std::error_code error;
  // Without links, because UCX searches its modules beside the file.
  const std::filesystem::path file = std::filesystem::canonical(library, error);
  if (error) return fail(Errc::kRefused, "UCX: {}: {}; {}", library, error.message(), kWanted);
  // The loader opens whatever has the name, and a FIFO is opened only when it has a writer.
  if (!std::filesystem::is_regular_file(file, error)) {
    return fail(Errc::kRefused, "UCX: {} is not a regular file; {}", library, kWanted);
  }
  const std::filesystem::path folder = file.parent_path();
  const auto is_beside = [&](const char* part) {
    return std::filesystem::is_regular_file(folder / part, error);
  };
  // Lazily, because libucm uses a function of libucs, which comes after it.
  for (const char* const part : kParts) {
    if (is_beside(part)) (void)::dlopen((folder / part).c_str(), RTLD_LAZY);
  }
  void* const opened = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    return fail(Errc::kRefused, "UCX: {} cannot be loaded: {}; {}", library,
                loader_error(file.string()), kWanted);
  }
  for (const char* const part : kParts) {
    if (is_beside(part) && ::dlopen((folder / part).c_str(), RTLD_LAZY | RTLD_NOLOAD) == nullptr) {
      return fail(Errc::kRefused,
                  "UCX: {} was loaded with another {} than the one beside it; start this program "
                  "with LD_LIBRARY_PATH={}",
                  library, part, folder.string());
    }
  }
  return opened;
}

Result<void*> open_installed() {
  constexpr const char* kLibrary = "libucp.so.0";
  if (void* const opened = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL)) return opened;
  return fail(Errc::kRefused, "UCX is not installed (package libucx0): {}; install it, or {}",
              loader_error(kLibrary), kWanted);
}

/// Without links; empty if the loader does not know it.
std::string file_of(const void* function) {
  Dl_info info{};
  if (::dladdr(function, &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code error;
  const std::filesystem::path file = std::filesystem::canonical(info.dli_fname, error);
  return error ? info.dli_fname : file.string();
}

Result<UcpApi> open_library(const std::string& name) {
  for (const auto& [variable, value] : kManners) ::setenv(variable, value, 0);
  // Its modules find libucs and libuct by name, so nothing has to be global. It is never unloaded:
  // its threads may run until the end.
  PEGA_TRY_LET(void* const library, name.empty() ? open_installed() : open_named(name));
  UcpApi api{};
  std::string missing;
#define PEGA_FIND(name) find(library, "ucp_" #name, api.name, missing)
  PEGA_FIND(config_read);
  PEGA_FIND(config_modify);
  PEGA_FIND(config_release);
  PEGA_FIND(init_version);
  PEGA_FIND(cleanup);
  PEGA_FIND(context_query);
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
  if (api.get_version == nullptr || api.get_version_string == nullptr) {
    return fail(Errc::kRefused, "UCX: {} is no libucp, it has no {}; {}", name, missing, kWanted);
  }
  api.file = file_of(reinterpret_cast<const void*>(api.get_version));
  if (api.version() < kOldestVersion) {
    return fail(Errc::kRefused, "UCX: {} is {}, which is too old; {}", api.file,
                api.get_version_string(), kWanted);
  }
  if (!missing.empty()) {
    return fail(Errc::kRefused, "UCX: {} is {} and has no function {}; {}", api.file,
                api.get_version_string(), missing, kWanted);
  }
  return api;
}

/// The library of this process.
struct Loaded {
  std::mutex mutex;
  std::optional<UcpApi> api;
  std::string name;  ///< As it was requested.
};

}  // namespace

Result<const UcpApi*> UcpApi::load(const std::string& library) {
  static Loaded loaded;
  const std::lock_guard lock(loaded.mutex);
  if (!loaded.api) {
    PEGA_TRY_LET(loaded.api, open_library(library));
    loaded.name = library;
  } else if (std::error_code error;
             library != loaded.name &&
             std::filesystem::canonical(library, error) != loaded.api->file) {
    return fail(Errc::kRefused, "UCX: this process has loaded {}, and cannot load {} too",
                loaded.api->file, library.empty() ? "the installed one" : library);
  }
  return &*loaded.api;
}

unsigned UcpApi::version() const {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  get_version(&major, &minor, &release);
  return major * 1000 + minor;
}

}  // namespace pegaflow::ucx
