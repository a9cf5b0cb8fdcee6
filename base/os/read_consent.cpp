#include "base/os/read_consent.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>

#include <sys/prctl.h>

#include "base/os/pidfd.h"

namespace pegaflow {
namespace {

/// kernel.yama.ptrace_scope; 0 without Yama.
int ptrace_scope() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope ? scope : 0;
}

bool has_cap_sys_ptrace() {
  constexpr unsigned kCapSysPtrace = 19;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "CapEff:") continue;
    std::uint64_t effective = 0;
    status >> std::hex >> effective;
    return (effective >> kCapSysPtrace & 1U) != 0;
  }
  return false;
}

/// Whether an object of this process has the consent, of which the kernel has one.
std::atomic<bool> is_taken{false};

class Consent {
 public:
  ~Consent() { end(); }

  Result<void> give(int pidfd) {
    if (pidfd < 0) {
      end();
      return {};
    }
    if (!is_mine_ && is_taken.exchange(true)) {
      return fail(Errc::kBusy, "another engine in this process has permitted a process");
    }
    is_mine_ = true;
    const std::optional<pid_t> pid = own_number_of_pidfd(pidfd);
    if (!pid) {
      end();
      if (has_process_ended(pidfd)) return fail(Errc::kGone, "the process has ended");
      return fail(Errc::kRefused,
                  "the process is in a PID namespace that is not visible here; run both engines in "
                  "one PID namespace");
    }
    if (::prctl(PR_SET_PTRACER, static_cast<unsigned long>(*pid), 0, 0, 0) != 0) {
      auto error = fail_errno(errno, "prctl(PR_SET_PTRACER)");
      end();
      return error;
    }
    // Its number may have gone to another process between the two looks.
    if (!has_process_ended(pidfd)) return {};
    end();
    return fail(Errc::kGone, "the process has ended");
  }

 private:
  void end() {
    if (!is_mine_) return;
    // Fails only without Yama, where there is nothing to end.
    (void)::prctl(PR_SET_PTRACER, 0UL, 0, 0, 0);
    is_mine_ = false;
    is_taken = false;
  }

  bool is_mine_ = false;
};

}  // namespace

ReadConsent kernel_read_consent() {
  auto consent = std::make_shared<Consent>();
  return {.is_needed = ptrace_scope() == 1,
          .reads_without = has_cap_sys_ptrace(),
          .give = [consent](int pidfd) { return consent->give(pidfd); }};
}

}  // namespace pegaflow
