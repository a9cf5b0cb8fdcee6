#include "base/os/thread.h"

#include <system_error>

#include <pthread.h>
#include <signal.h>

namespace pegaflow {

Result<std::thread> start_thread(const char* name, std::function<void()> body) {
  // A thread inherits its parent's signal mask, so the mask is set before the thread starts.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Result<std::thread> thread;
  try {
    thread = std::thread(std::move(body));
    pthread_setname_np(thread->native_handle(), name);
  } catch (const std::system_error& error) {
    thread = fail(Errc::kInternal, "start thread {}: {}", name, error.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace pegaflow
