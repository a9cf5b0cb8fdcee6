#pragma once
/// \file
/// The part of UCX that we call, loaded at run time.

#include <string>

#include <ucp/api/ucp.h>

#include "base/error.h"

namespace pegaflow::ucx {

/// The functions of libucp and libucs, by their own names.
///
/// Loaded with dlopen, so that programs start on machines without UCX, and so that the operator
/// chooses the build (a vendor's, with what its cards need). Contains only calls of 1.13, which
/// every later version has. Immutable.
struct UcpApi {
  decltype(&::ucp_config_read) config_read;
  decltype(&::ucp_config_modify) config_modify;
  decltype(&::ucp_config_release) config_release;
  decltype(&::ucp_init_version) init_version;
  decltype(&::ucp_cleanup) cleanup;
  decltype(&::ucp_context_query) context_query;
  decltype(&::ucp_get_version) get_version;
  decltype(&::ucp_get_version_string) get_version_string;
  decltype(&::ucp_worker_create) worker_create;
  decltype(&::ucp_worker_destroy) worker_destroy;
  decltype(&::ucp_worker_get_address) worker_get_address;
  decltype(&::ucp_worker_release_address) worker_release_address;
  decltype(&::ucp_worker_get_efd) worker_get_efd;
  decltype(&::ucp_worker_arm) worker_arm;
  decltype(&::ucp_worker_progress) worker_progress;
  decltype(&::ucp_worker_set_am_recv_handler) worker_set_am_recv_handler;
  decltype(&::ucp_mem_map) mem_map;
  decltype(&::ucp_mem_unmap) mem_unmap;
  decltype(&::ucp_rkey_pack) rkey_pack;
  decltype(&::ucp_rkey_buffer_release) rkey_buffer_release;
  decltype(&::ucp_ep_rkey_unpack) ep_rkey_unpack;
  decltype(&::ucp_rkey_destroy) rkey_destroy;
  decltype(&::ucp_ep_create) ep_create;
  decltype(&::ucp_ep_close_nbx) ep_close_nbx;
  decltype(&::ucp_get_nbx) get_nbx;
  decltype(&::ucp_am_send_nbx) am_send_nbx;
  decltype(&::ucp_request_check_status) request_check_status;
  decltype(&::ucp_request_free) request_free;
  decltype(&::ucs_status_string) status_string;

  /// The file that was loaded.
  std::string file;

  /// Loads `library`, the file of libucp, with the libraries of UCX beside it; empty: libucp.so.0,
  /// as the system finds it. A process has one UCX: later calls return the loaded one. The first
  /// call sets environment variables that UCX reads while loading, where they are not set: call it
  /// before other threads read the environment. Thread-safe.
  /// Errors: kRefused, with the file, when it is not a regular file, cannot be loaded, is no libucp
  /// or one older than 1.13, or when this process has loaded another.
  static Result<const UcpApi*> load(const std::string& library);

  /// The version of the loaded library: 1022 is 1.22.
  [[nodiscard]] unsigned version() const;
};

}  // namespace pegaflow::ucx
