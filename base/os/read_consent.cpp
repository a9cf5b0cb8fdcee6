#include "base/os/read_consent.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>

#include <sys/prctl.h>
#include <unistd.h>

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

/// The process in which an object has the consent, of which the kernel has one for each. A child
/// of fork() has none.
std::atomic<pid_t> taken_in{0};

bool take() {
  const pid_t own = ::getpid();
  pid_t former = taken_in;
  while (former != own) {
    if (taken_in.compare_exchange_weak(former, own)) return true;
  }
  return false;
}

class Consent {
 public:
  ~Consent() { end(); }

  Result<void> give(int pidfd) {
    if (pidfd < 0) {
      end();
      return {};
    }
    if (!is_mine() && !take()) {
      return fail(Errc::kBusy, "another engine in this process has permitted a process");
    }
    in_ = ::getpid();
    const Result<pid_t> pid = own_number_of_pidfd(pidfd);
    if (!pid) {
      end();
      return tl::unexpected<Error>(pid.error());
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
  [[nodiscard]] bool is_mine() const { return in_ == ::getpid(); }
  void end() {
    if (!is_mine()) return;
    // Fails only without Yama, where there is nothing to end.
    (void)::prctl(PR_SET_PTRACER, 0UL, 0, 0, 0);
    in_ = 0;
    taken_in = 0;
  }

  pid_t in_ = 0;  ///< The process in which this object has the consent.
};

}  // namespace

ReadConsent kernel_read_consent() {
  auto consent = std::make_shared<Consent>();
  return {.is_needed = ptrace_scope() == 1,
          .reads_without = has_cap_sys_ptrace(),
          .give = [consent](int pidfd) { return consent->give(pidfd); }};
}

}  // namespace pegaflow
