#include "harness/child.h"

#include <array>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

namespace pegaflow::harness {
namespace {

/// Only async-signal-safe calls: between fork and exec nothing else is allowed.
[[noreturn]] void become(const char* program, char* const* arguments, char* const* environment,
                         pid_t parent, int log_fd, int inherited_fd) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have died before the prctl() took effect.
  if (::getppid() != parent) ::_exit(127);
  if (log_fd >= 0) {
    ::dup2(log_fd, STDOUT_FILENO);
    ::dup2(log_fd, STDERR_FILENO);
  }
  if (inherited_fd >= 0) ::fcntl(inherited_fd, F_SETFD, 0);
  ::execve(program, arguments, environment);
  ::_exit(127);
}

bool wait_readable(int fd, Duration patience) {
  pollfd entry{.fd = fd, .events = POLLIN, .revents = 0};
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(patience);
  return ::poll(&entry, 1, static_cast<int>(milliseconds.count())) == 1;
}

/// The path of a program: `name` itself if it has a slash, else the first in $PATH.
Result<std::string> find_program(const std::string& name) {
  const bool is_path = name.find('/') != std::string::npos;
  const char* const path = std::getenv("PATH");
  std::string_view rest = is_path ? "" : path != nullptr ? path : "/usr/bin:/bin";
  std::string program = name;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find(':'), rest.size());
    program = std::string(rest.substr(0, end)) + "/" + name;
    if (::access(program.c_str(), X_OK) == 0) return program;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  if (::access(program.c_str(), X_OK) != 0) return fail_errno(errno, "run " + name);
  return program;
}

/// Pointers to `words`, as exec() expects them.
std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

/// The environment of this process after `own`: of two equal names the first counts.
std::vector<std::string> with_environment(std::vector<std::string> own) {
  for (char** variable = environ; *variable != nullptr; ++variable) own.emplace_back(*variable);
  return own;
}

}  // namespace

Result<Child> Child::start(const Options& options) {
  std::vector<std::string> words = options.command;
  std::vector<std::string> variables = with_environment(options.environment);
  const std::vector<char*> arguments = pointers_to(words);
  const std::vector<char*> environment = pointers_to(variables);
  PEGA_TRY_LET(const std::string program, find_program(words.at(0)));

  UniqueFd log;
  if (!options.log_file.empty()) {
    log = UniqueFd(::open(options.log_file.c_str(),
                          O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600));
    if (!log) return fail_errno(errno, "open " + options.log_file);
  }
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return fail_errno(errno, "start " + words.at(0));
  if (pid == 0) {
    become(program.c_str(), arguments.data(), environment.data(), parent, log.get(),
           options.inherited_fd);
  }
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  Child child(pid, std::move(pidfd));  // Its destructor kills the process if the next line returns.
  if (!child.pidfd_) return fail_errno(errno, "open a pidfd for the process of " + words.at(0));
  return child;
}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), pidfd_(std::move(other.pidfd_)) {}

Child& Child::operator=(Child&& other) noexcept {
  if (this != &other) {
    kill();
    pid_ = std::exchange(other.pid_, -1);
    pidfd_ = std::move(other.pidfd_);
  }
  return *this;
}

Child::~Child() { kill(); }

bool Child::running() const { return pid_ > 0 && !wait_readable(pidfd_.get(), Duration::zero()); }

void Child::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(std::exchange(pid_, -1), nullptr, 0);
}

Result<void> Child::signal(int number) const {
  if (pid_ <= 0) return fail(Errc::kGone, "signal {}: the process has ended", number);
  if (::kill(pid_, number) != 0) return fail_errno(errno, "signal a process");
  return {};
}

std::optional<int> Child::wait_for_exit(Duration limit) {
  if (pid_ <= 0 || !wait_readable(pidfd_.get(), limit)) return std::nullopt;
  int status = 0;
  ::waitpid(std::exchange(pid_, -1), &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

Result<void> Child::stop(Duration patience) {
  if (pid_ <= 0) return {};
  ::kill(pid_, SIGTERM);
  if (!wait_readable(pidfd_.get(), patience)) {
    kill();
    return fail(Errc::kTimeout, "the process did not end within {} s of SIGTERM",
                std::chrono::duration<double>(patience).count());
  }
  int status = 0;
  ::waitpid(std::exchange(pid_, -1), &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    return fail(Errc::kInternal, "the process ended with wait status {}", status);
  }
  return {};
}

Result<Duration> Child::cpu_time() const {
  clockid_t clock{};
  if (const int error = ::clock_getcpuclockid(pid_, &clock); error != 0) {
    return fail_errno(error, "find the CPU clock of a child");
  }
  timespec time{};
  if (::clock_gettime(clock, &time) != 0) return fail_errno(errno, "read the CPU clock of a child");
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

Result<std::uint64_t> voluntary_switches(pid_t pid, pid_t except) {
  const std::string tasks = fmt::format("/proc/{}/task", pid);
  const std::string skipped = std::to_string(except);
  std::error_code error;
  std::uint64_t sum = 0;
  std::size_t threads = 0;
  for (std::filesystem::directory_iterator task(tasks, error), end; !error && task != end;
       task.increment(error)) {
    ++threads;
    if (task->path().filename() == skipped) continue;
    const Result<std::string> status = read_file(task->path() / "status");
    if (!status) continue;  // The thread has ended.
    constexpr std::string_view kField = "\nvoluntary_ctxt_switches:\t";
    const std::size_t at = status->find(kField);
    std::uint64_t count = 0;
    if (at == std::string::npos ||
        std::from_chars(status->data() + at + kField.size(), status->data() + status->size(), count)
                .ec != std::errc()) {
      return fail(Errc::kIo, "{}/status counts no switches", task->path().string());
    }
    sum += count;
  }
  if (error || threads == 0) return fail_errno(error ? error.value() : ESRCH, "list " + tasks);
  return sum;
}

Result<Resident> sum_smaps(std::string_view smaps, std::string_view pool_name) {
  Resident resident;
  bool in_pool = false;
  bool wants_rss = false;
  while (!smaps.empty()) {
    const std::size_t end = std::min(smaps.find('\n'), smaps.size());
    const std::string_view line = smaps.substr(0, end);
    smaps.remove_prefix(std::min(end + 1, smaps.size()));
    const std::size_t colon = line.find(':');
    const std::size_t space = line.find(' ');
    // The line of a mapping begins with addresses and a space, that of a field with "Name:".
    if (space < colon) {
      if (wants_rss)
        return fail(Errc::kCorrupt, "smaps: a mapping without Rss before \"{}\"", line);
      in_pool = line.find(pool_name) != std::string_view::npos;
      wants_rss = true;
    } else if (line.starts_with("Rss:")) {
      const std::size_t digit = line.find_first_of("0123456789");
      std::uint64_t kilobytes = 0;
      if (digit == std::string_view::npos ||
          std::from_chars(line.data() + digit, line.data() + line.size(), kilobytes).ec !=
              std::errc()) {
        return fail(Errc::kCorrupt, "smaps: no number in \"{}\"", line);
      }
      (in_pool ? resident.pool_bytes : resident.beside_bytes) += kilobytes * 1024;
      wants_rss = false;
    }
  }
  if (wants_rss) return fail(Errc::kCorrupt, "smaps: the last mapping has no Rss");
  return resident;
}

Result<Resident> resident_of(pid_t pid, std::string_view pool_name) {
  PEGA_TRY_LET(const std::string smaps, read_file(fmt::format("/proc/{}/smaps", pid)));
  return sum_smaps(smaps, pool_name);
}

Result<std::string> read_file(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return fail_errno(errno, "open " + path);
  std::string text;
  std::array<char, 16384> piece{};
  while (true) {
    const ssize_t got = ::read(file.get(), piece.data(), piece.size());
    if (got < 0) return fail_errno(errno, "read " + path);
    if (got == 0) return text;
    text.append(piece.data(), static_cast<std::size_t>(got));
  }
}

Result<TemporaryDirectory> TemporaryDirectory::create() {
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
  if (error) return fail_errno(error.value(), "find a directory for temporary files");
  // Short, because the path of a Unix socket in it has at most 107 bytes.
  std::string path = parent / "pega-XXXXXX";
  if (::mkdtemp(path.data()) == nullptr) return fail_errno(errno, "make the directory " + path);
  return TemporaryDirectory(std::move(path));
}

TemporaryDirectory::~TemporaryDirectory() {
  if (path_.empty()) return;
  std::error_code error;
  std::filesystem::remove_all(path_, error);
  if (error) fmt::print(stderr, "could not remove {}: {}\n", path_, error.message());
}

Result<std::string> own_path() {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return fail_errno(error.value(), "read /proc/self/exe");
  return path.string();
}

}  // namespace pegaflow::harness
