#pragma once
/// \file
/// Whether processes of one user may read each other's memory, and the consent to it.

#include <functional>

#include "base/error.h"

namespace pegaflow {

/// The kernel's rule for process_vm_readv() between processes of one user that are not
/// descendants of each other: with Yama's ptrace_scope 1, the consent of the process that is read
/// (PR_SET_PTRACER). A process consents to one other at a time, and to its descendants.
struct ReadConsent {
  bool is_needed = false;      ///< Other processes read this one only with its consent.
  bool reads_without = false;  ///< This process has CAP_SYS_PTRACE, and needs none of others.
  /// Consents to the process of this pidfd, which may also trace this one then, in place of the
  /// former one; a negative number: to none. Errors: kGone when that process has ended, kRefused
  /// when it is not visible here, the kernel's: then there is no consent. kBusy while another
  /// ReadConsent of this process consents to one, and when no descriptor is free.
  std::function<Result<void>(int pidfd)> give;
};

/// That of this process. Its copies stand for one consent, which ends with the last of them.
ReadConsent kernel_read_consent();

}  // namespace pegaflow
