// A user of a disk in a process of its own, for tests that kill it or take system calls from it.
//   disk_holder no-uring PATH    opens it where io_uring_setup() is forbidden
//   disk_holder no-direct PATH   opens it where O_DIRECT is refused
// Both write, flush and read a page of the file, and print "BACKEND DIRECT REASON".
//   disk_holder flood BACKEND PATH FD BYTES
// reads the file into the shared memory FD, BYTES in flight, prints its pid and waits to be killed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "tests/support/disk_inbox.h"
#include "tests/support/refuse.h"
#include "transport/disk/open_disk.h"

namespace pegaflow::testing {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

int print_error(const Error& error) {
  std::printf("%s\n", to_string(error).c_str());
  return 1;
}

int use_restricted(const std::string& kind, const std::string& path) {
  const bool is_no_uring = kind == "no-uring";
  if (!(is_no_uring ? forbid_io_uring() : refuse_direct_open())) return 77;
  DiskInbox inbox;
  DiskOptions options{.path = path, .size_bytes = kMiB};
  if (is_no_uring) {
    options.backend = DiskBackend::kUring;
    const auto refused = open_disk(options, inbox.sink());
    if (refused || refused.error().code != Errc::kRefused) return 2;
    options.backend = DiskBackend::kAuto;
  }
  const auto disk = open_disk(options, inbox.sink());
  if (!disk) return print_error(disk.error());
  const AlignedMemory memory(2 * Disk::kAlignment);
  const auto source = memory.part(0, Disk::kAlignment);
  const auto target = memory.part(Disk::kAlignment, Disk::kAlignment);
  std::fill(source.begin(), source.end(), std::byte{42});
  const Disk::Request requests[] = {
      {.ticket = 1, .operation = Disk::Operation::kWrite, .offset = 8192, .memory = {source}},
      {.ticket = 2, .operation = Disk::Operation::kFlush},
      {.ticket = 3, .operation = Disk::Operation::kRead, .offset = 8192, .memory = {target}}};
  for (const Disk::Request& request : requests) {
    if (const auto taken = (*disk)->submit(request); !taken) return print_error(taken.error());
    if (const auto done = inbox.take(request.ticket); done.error) return print_error(*done.error);
  }
  if (!std::equal(source.begin(), source.end(), target.begin())) return 3;
  const Disk::Attributes& attributes = (*disk)->attributes();
  std::printf("%s %s %s\n", attributes.backend.c_str(), attributes.direct ? "direct" : "buffered",
              attributes.reason.c_str());
  return 0;
}

int flood(const std::string& backend, const std::string& path, int fd, std::uint64_t bytes) {
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return 2;
  DiskInbox inbox;
  const auto disk = open_disk({.path = path,
                               .size_bytes = bytes,
                               .backend = parse_disk_backend(backend).value(),
                               .limits = {.read_bytes = bytes}},
                              inbox.sink());
  if (!disk) return print_error(disk.error());
  std::vector<Disk::Request> requests;
  for (std::uint64_t at = 0; at < bytes; at += kMiB) {
    requests.push_back(
        {.ticket = at, .offset = at, .memory = {{static_cast<std::byte*>(mapped) + at, kMiB}}});
  }
  if (const auto taken = (*disk)->submit(std::move(requests)); !taken) {
    return print_error(taken.error());
  }
  inbox.take(0);  // One is there; most of the others are in flight.
  std::printf("%d\n", ::getpid());
  std::fflush(stdout);
  for (;;) ::pause();
}

}  // namespace
}  // namespace pegaflow::testing

int main(int count, char** words) {
  using namespace pegaflow::testing;  // NOLINT(google-build-using-namespace): this is main.
  if (count == 3) return use_restricted(words[1], words[2]);
  if (count == 6)
    return flood(words[2], words[3], std::atoi(words[4]), std::strtoull(words[5], nullptr, 10));
  return 2;
}
