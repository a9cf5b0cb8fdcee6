#include "tests/support/forked.h"

#include <csignal>
#include <exception>
#include <stdexcept>
#include <string>

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kj/exception.h>

#include "base/os/unique_fd.h"

namespace pegaflow::testing {
namespace {

[[noreturn]] void live_on(int told, const std::function<void()>& body) {
  std::string words = "ok";
  try {
    body();
  } catch (const std::exception& problem) {
    words = problem.what();
  } catch (const kj::Exception& problem) {
    words = problem.getDescription().cStr();
  }
  if (::write(told, words.data(), words.size()) < 0) ::_exit(1);
  ::close(told);
  for (;;) ::pause();
}

}  // namespace

Forked::Forked(const std::function<void()>& body, const Options& options) {
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  UniqueFd hear(pipe[0]);
  UniqueFd told(pipe[1]);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    hear.reset();
    if (!options.new_pid_namespace) live_on(told.get(), body);
    // The namespace begins with the next child; that one is its init, and dies with us.
    if (::unshare(CLONE_NEWPID) != 0) ::_exit(1);
    const pid_t inner = ::fork();
    if (inner == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      live_on(told.get(), body);
    }
    told.reset();
    ::waitpid(inner, nullptr, 0);
    ::_exit(0);
  }
  told.reset();
  std::string words;
  char part[512];
  for (ssize_t count = 0; (count = ::read(hear.get(), part, sizeof part)) > 0;) {
    words.append(part, static_cast<std::size_t>(count));
  }
  if (words == "ok") return;
  kill();
  throw std::runtime_error("the child said: " + (words.empty() ? "nothing" : words));
}

Forked::~Forked() {
  if (pid_ > 0) kill();
}

void Forked::signal(int number) const { ::kill(pid_, number); }

void Forked::kill() {
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

bool may_make_pid_namespaces() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::unshare(CLONE_NEWPID) == 0 ? 0 : 1);
  int status = 0;
  return child > 0 && ::waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

}  // namespace pegaflow::testing
