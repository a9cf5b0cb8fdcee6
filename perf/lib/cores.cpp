#include "perf/lib/cores.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include <sched.h>

namespace pegaflow::perf {
namespace {

Result<void> move_all_threads(const std::vector<std::size_t>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const std::size_t core : cores) CPU_SET(core, &set);
  std::error_code error;
  for (std::filesystem::directory_iterator task("/proc/self/task", error), end;
       !error && task != end; task.increment(error)) {
    const auto tid = static_cast<pid_t>(std::atoi(task->path().filename().c_str()));
    // ESRCH: the thread has ended.
    if (::sched_setaffinity(tid, sizeof set, &set) != 0 && errno != ESRCH) {
      return fail_errno(errno, "set the cores of a thread");
    }
  }
  if (error) return fail_errno(error.value(), "list the threads of this process");
  return {};
}

}  // namespace

Result<SameCores> SameCores::create() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0)
    return fail_errno(errno, "read the cores of this process");
  std::vector<std::size_t> allowed;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) allowed.push_back(core);
  }
  return SameCores(std::move(allowed));
}

SameCores::~SameCores() {
  if (allowed_.empty()) return;
  if (const Result<void> moved = move_all_threads(allowed_); !moved) {
    fmt::print(stderr, "{}\n", to_string(moved.error()));
  }
}

std::vector<std::size_t> SameCores::chosen(std::size_t round, std::size_t count) const {
  std::vector<std::size_t> cores;
  for (std::size_t i = 0; i < std::min(count, allowed_.size()); ++i) {
    cores.push_back(allowed_[(round * count + i) % allowed_.size()]);
  }
  return cores;
}

Result<void> SameCores::use(std::size_t round, std::size_t count) const {
  return move_all_threads(chosen(round, count));
}

}  // namespace pegaflow::perf
