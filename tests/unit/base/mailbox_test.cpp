#include "base/os/mailbox.h"

#include <array>
#include <string>
#include <thread>
#include <vector>

#include <poll.h>

#include <doctest/doctest.h>

namespace pegaflow {
namespace {

bool readable(int fd) {
  pollfd wanted{fd, POLLIN, 0};
  return ::poll(&wanted, 1, 0) == 1;
}

TEST_SUITE("Mailbox") {
  TEST_CASE("a drain of at most two values leaves the others, and the descriptor readable") {
    Mailbox<int> mailbox(8);
    for (int i = 0; i < 5; ++i) REQUIRE(mailbox.try_send(int{i}));
    std::vector<int> got;
    const auto take = [&](int value) { got.push_back(value); };

    CHECK(mailbox.drain(take, 2) == 2);
    CHECK(readable(mailbox.fd()));
    CHECK(mailbox.drain(take, 2) == 2);
    CHECK(mailbox.drain(take, 2) == 1);

    CHECK(got == std::vector<int>{0, 1, 2, 3, 4});
    CHECK_FALSE(readable(mailbox.fd()));
  }

  TEST_CASE("values arrive in order and wake the owner once") {
    Mailbox<std::string> box(8);
    CHECK_FALSE(readable(box.fd()));

    CHECK(box.try_send("a"));
    CHECK(box.try_send("b"));

    CHECK(readable(box.fd()));
    std::vector<std::string> got;
    CHECK(box.drain([&](std::string&& value) { got.push_back(std::move(value)); }) == 2);
    CHECK(got == std::vector<std::string>{"a", "b"});
    CHECK_FALSE(readable(box.fd()));
  }

  TEST_CASE("a full mailbox rejects a value and leaves it unchanged") {
    Mailbox<std::string> box(2);
    CHECK(box.try_send("a"));
    CHECK(box.try_send("b"));

    std::string third = "c";
    CHECK_FALSE(box.try_send(std::move(third)));
    CHECK(third == "c");

    box.drain([](std::string&&) {});
    CHECK(box.try_send(std::move(third)));
  }

  TEST_CASE("a value sent while draining wakes the owner again or comes in the same drain") {
    Mailbox<int> box(2);
    CHECK(box.try_send(1));
    int sum = 0;
    int sends_left = 5;
    while (readable(box.fd())) {
      box.drain([&](int value) {
        sum += value;
        if (sends_left-- > 0) CHECK(box.try_send(1));
      });
    }
    CHECK(sum == 6);
  }

  TEST_CASE("nothing is lost, doubled or reordered between four senders and a sleeping owner") {
    constexpr int kSenders = 4;
    constexpr int kEach = 20'000;
    struct Item {
      int sender = 0;
      int number = 0;
    };
    Mailbox<Item> box(64);
    std::vector<std::thread> senders;
    for (int sender = 0; sender < kSenders; ++sender) {
      senders.emplace_back([&box, sender] {
        for (int number = 0; number < kEach; ++number) {
          while (!box.try_send(Item{sender, number})) std::this_thread::yield();
        }
      });
    }

    std::array<int, kSenders> next{};
    int wrong = 0;
    for (int received = 0; received < kSenders * kEach;) {
      pollfd wanted{box.fd(), POLLIN, 0};
      REQUIRE(::poll(&wanted, 1, 10'000) == 1);  // A lost wake-up would show here.
      received += static_cast<int>(box.drain([&](Item item) {
        wrong += item.number != next[static_cast<std::size_t>(item.sender)]++;
      }));
    }

    for (std::thread& sender : senders) sender.join();
    CHECK(wrong == 0);
  }
}

}  // namespace
}  // namespace pegaflow
