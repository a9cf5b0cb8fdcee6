// Many descriptors that cross to other processes as one.
#include "base/os/descriptor_box.h"

#include <cstdint>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "tests/support/open_descriptors.h"

namespace pegaflow {
namespace {

using testing::open_descriptors;

UniqueFd numbered(std::uint64_t number) {
  UniqueFd file(::memfd_create("numbered", MFD_CLOEXEC));
  REQUIRE(::write(file.get(), &number, sizeof number) == sizeof number);
  return file;
}

UniqueFd box_of(std::size_t count) {
  DescriptorBox box;
  for (std::size_t i = 0; i < count; ++i) REQUIRE(box.add(numbered(i)));
  return box.close().value();
}

/// Whether they are those of box_of(), in order.
bool holds(int box, std::size_t count) {
  std::uint64_t next = 0;
  const auto looked = DescriptorBox::look(box, count, [&](UniqueFd file) -> Result<void> {
    std::uint64_t number = ~std::uint64_t{0};
    const bool same = ::pread(file.get(), &number, sizeof number, 0) == sizeof number &&
                      number == next++ && (::fcntl(file.get(), F_GETFD) & FD_CLOEXEC) != 0;
    if (!same) return fail(Errc::kInternal, "descriptor {} has the number {}", next - 1, number);
    return {};
  });
  if (!looked) MESSAGE(looked.error().detail);
  return looked.has_value() && next == count;
}

/// The limit of open files of this process, while it lives.
class FileLimit {
 public:
  explicit FileLimit(rlim_t limit) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit now{limit, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &now) == 0);
  }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;
  ~FileLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST_SUITE("a box of descriptors") {
  TEST_CASE("holds any number of them in their order, for every look") {
    const std::size_t before = open_descriptors();
    for (const std::size_t count : {0U, 1U, 252U, 253U, 254U, 506U, 2'000U}) {
      CAPTURE(count);
      const UniqueFd box = box_of(count);
      CHECK(open_descriptors() == before + 1);
      for (int look = 0; look < 3; ++look) CHECK(holds(box.get(), count));
      CHECK(open_descriptors() == before + 1);
    }
    CHECK(open_descriptors() == before);
  }

  TEST_CASE("opens no more than two messages of them at once") {
    const FileLimit limit(open_descriptors() + 2 * DescriptorBox::kPerMessage + 10);
    const UniqueFd box = box_of(3'000);
    CHECK(holds(box.get(), 3'000));
  }

  TEST_CASE("is whole in a process that receives it, when the one that filled it has ended") {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    const UniqueFd here(ends[0]);
    const UniqueFd there(ends[1]);
    const pid_t child = ::fork();
    if (child == 0) {
      DescriptorBox box;
      bool good = true;
      for (std::uint64_t i = 0; i < 1'000; ++i) {
        UniqueFd file(::memfd_create("numbered", MFD_CLOEXEC));
        good = good && ::write(file.get(), &i, sizeof i) == sizeof i && box.add(std::move(file));
      }
      Result<UniqueFd> closed = box.close();
      if (good && closed) {
        char byte = 0;
        iovec part{&byte, 1};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* const rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        const int number = closed->get();
        __builtin_memcpy(CMSG_DATA(rights), &number, sizeof number);
        good = ::sendmsg(there.get(), &message, 0) == 1;
      }
      ::_exit(good ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(status == 0);
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    REQUIRE(::recvmsg(here.get(), &message, MSG_CMSG_CLOEXEC) == 1);
    int number = -1;
    __builtin_memcpy(&number, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof number);
    const UniqueFd box(number);
    CHECK(holds(box.get(), 1'000));
  }

  TEST_CASE("with another number of them than expected is refused, and leaves none open") {
    const UniqueFd box = box_of(300);
    const std::size_t before = open_descriptors();
    const auto ignore = [](UniqueFd) { return Result<void>(); };
    CHECK(DescriptorBox::look(box.get(), 299, ignore).error().detail ==
          "a box with more than 299 descriptors, not 299");
    CHECK(DescriptorBox::look(box.get(), 301, ignore).error().detail ==
          "a box with 300 descriptors, not 301");
    CHECK(DescriptorBox::look(box.get(), 300,
                              [](UniqueFd) -> Result<void> { return fail(Errc::kGone, "enough"); })
              .error()
              .detail == "enough");
    CHECK(open_descriptors() == before);
  }

  TEST_CASE("differs from other descriptors") {
    const auto ignore = [](UniqueFd) { return Result<void>(); };
    const UniqueFd file = numbered(1);
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const UniqueFd empty(ends[0]);
    const UniqueFd other(ends[1]);
    for (const int wrong : {-1, file.get(), empty.get()}) {
      CHECK(DescriptorBox::look(wrong, 1, ignore).error().code == Errc::kInvalidArgument);
    }
    REQUIRE(::write(other.get(), "x", 1) == 1);  // A message without descriptors.
    CHECK(DescriptorBox::look(empty.get(), 1, ignore).error().detail ==
          "a box with 0 descriptors, not 1");
  }

  TEST_CASE("names the limit of open files where there are too many") {
    const UniqueFd box = box_of(600);
    const std::size_t before = open_descriptors();
    {
      const FileLimit limit(before + 100);
      const auto looked =
          DescriptorBox::look(box.get(), 600, [](UniqueFd) { return Result<void>(); });
      CHECK(looked.error().code == Errc::kRefused);
      CHECK(looked.error().detail.find("ulimit -n") != std::string::npos);
    }
    CHECK(open_descriptors() == before);
  }
}

}  // namespace
}  // namespace pegaflow
