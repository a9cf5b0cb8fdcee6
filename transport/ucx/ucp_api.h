#pragma once
/// \file
/// The part of UCX that we call, loaded at run time.

#include <string>

#include <ucp/api/ucp.h>

#include "base/error.h"

namespace pegaflow::ucx {

/// The functions of libucp and libucs, by their own names.
///
/// Loaded with dlopen, so that programs start on machines without UCX, and so that the host's own
/// UCX (a vendor's, with what its cards need) is used when LD_LIBRARY_PATH names it. Contains only
/// calls of 1.13, which every later version has. Immutable.
struct UcpApi {
  decltype(&::ucp_config_read) config_read;
  decltype(&::ucp_config_modify) config_modify;
  decltype(&::ucp_config_release) config_release;
  decltype(&::ucp_init_version) init_version;
  decltype(&::ucp_cleanup) cleanup;
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

  /// Loads the library once; later calls return the same result. The first call sets environment
  /// variables that UCX reads while loading, where they are not set: call it before other threads
  /// read the environment.
  /// Errors: kRefused when there is no libucp, or one older than 1.13.
  static Result<const UcpApi*> load();

  /// The version of the loaded library: 1022 is 1.22.
  [[nodiscard]] unsigned version() const;
};

}  // namespace pegaflow::ucx
