// What a peer may say and do to the socket lane: the other end of each connection is played here,
// byte by byte.
#include <array>
#include <csignal>
#include <cstring>
#include <string>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "base/unique_fd.h"
#include "tests/support/fabric_node.h"
#include "transport/checksum.h"
#include "transport/tcp/serving.h"
#include "transport/tcp/socket_address.h"
#include "transport/tcp/tcp_fabric.h"
#include "transport/tcp/wire.h"

namespace pegaflow::testing {
namespace {

using tcp::Answer;
using tcp::Ask;
using tcp::Hello;
using tcp::Verdict;
using tcp::Welcome;

constexpr std::uint64_t kSeed = 7;
const SteadyClock kClock;

/// A socket that waits, but not for ever.
class Played {
 public:
  explicit Played(UniqueFd socket) : socket_(std::move(socket)) {
    const timeval patience{.tv_sec = kHang.count(), .tv_usec = 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  }
  static Played connect(const std::string& address) {
    const auto to = tcp::SocketAddress::parse(address).value();
    UniqueFd socket(::socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(socket.get(), to.data(), to.size()) == 0);
    return Played(std::move(socket));
  }
  template <typename Message>
  void send(const Message& message) const {
    (void)::send(socket_.get(), &message, sizeof message, MSG_NOSIGNAL);
  }
  /// Whatever the other side makes of it: it may have closed.
  void send_bytes(std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }
  template <typename Message>
  Message receive() const {
    Message message;
    REQUIRE(::recv(socket_.get(), &message, sizeof message, MSG_WAITALL) ==
            static_cast<ssize_t>(sizeof message));
    return message;
  }
  /// Whether the other side closes before it says anything more.
  [[nodiscard]] bool closed() const {
    char byte = 0;
    const ssize_t got = ::recv(socket_.get(), &byte, 1, 0);
    return got == 0 || (got < 0 && errno == ECONNRESET);
  }
  /// Reads so many bytes; false when the other side closes before.
  [[nodiscard]] bool receive_into(std::span<std::byte> bytes) const {
    return ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_WAITALL) ==
           static_cast<ssize_t>(bytes.size());
  }

 private:
  UniqueFd socket_;
};

/// The holder's part, played.
class PlayedHolder {
 public:
  PlayedHolder() {
    const auto at = tcp::SocketAddress::parse("127.0.0.1:0").value();
    listener_ = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::bind(listener_.get(), at.data(), at.size()) == 0);
    REQUIRE(::listen(listener_.get(), 16) == 0);
    fill_pattern(memory, kSeed);
  }
  [[nodiscard]] FabricDescriptor describe() const {
    const std::string text = to_string(tcp::SocketAddress::near_end(listener_.get()).value());
    const auto* const begin = reinterpret_cast<const std::byte*>(text.data());
    return {.backend = "tcp",
            .incarnation = self,
            .address = {begin, begin + text.size()},
            .regions = {{.region = RegionId{0}, .size_bytes = memory.size()}}};
  }
  [[nodiscard]] Played accept() const {
    return Played(UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  }
  [[nodiscard]] Welcome welcome() const {
    return {.holder_high = self.high, .holder_low = self.low};
  }
  /// Accepts and does what a good holder does first.
  [[nodiscard]] Played greeted() const {
    Played connection = accept();
    (void)connection.receive<Hello>();
    connection.send(welcome());
    return connection;
  }
  [[nodiscard]] std::span<const std::byte> asked(const Ask& ask) const {
    return std::span(memory).subspan(ask.offset, ask.size_bytes);
  }
  [[nodiscard]] Answer answer(const Ask& ask) const {
    return {.question = ask.question,
            .slot = ask.slot,
            .size_bytes = ask.size_bytes,
            .checksum = PageChecksum::of(asked(ask))};
  }
  void serve(const Played& connection, const Ask& ask) const {
    connection.send(answer(ask));
    connection.send_bytes(asked(ask));
  }

  Id128 self = Id128::random();
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 20);

 private:
  UniqueFd listener_;
};

FabricNode::Make tcp_maker(const TcpFabric::Options& options) {
  return [options](Fabric::CompletionSink sink) -> std::unique_ptr<Fabric> {
    auto made = TcpFabric::create(options, kClock, std::move(sink));
    REQUIRE_MESSAGE(made, to_string(made.error()));
    return std::move(*made);
  };
}

/// A real reader with one connection and pieces of 4 KiB, in front of a played holder.
struct ReaderOfPlayed {
  explicit ReaderOfPlayed(TcpFabric::Options options = {})
      : node(tcp_maker([&options] {
               options.connections = 1;
               options.piece_bytes = 4096;
               // Nothing here waits for the clock, unless a test wants it.
               if (options.stall_timeout == std::chrono::seconds(2)) options.stall_timeout = kHang;
               if (options.connect_timeout == std::chrono::seconds(1))
                 options.connect_timeout = kHang;
               return options;
             }()),
             1 << 20, kSeed + 1) {
    peer = node.fabric->connect(holder.describe()).value();
  }
  void ask(std::uint64_t ticket, std::vector<Fabric::Chunk> chunks,
           Fabric::Priority priority = Fabric::Priority::kForeground, TimePoint deadline = late()) {
    REQUIRE(node.fabric->read({.ticket = ticket,
                               .peer = peer,
                               .priority = priority,
                               .deadline = deadline,
                               .chunks = std::move(chunks)}));
  }
  [[nodiscard]] Fabric::Chunk page(std::uint64_t number, std::uint64_t pages = 1) const {
    return {.remote_region = RegionId{0},
            .remote_offset = number * 4096,
            .local_region = node.region,
            .local_offset = number * 4096,
            .size_bytes = pages * 4096};
  }
  [[nodiscard]] bool came(std::uint64_t number) const {
    const auto got = std::span(node.memory).subspan(number * 4096, 4096);
    const auto held = std::span(holder.memory).subspan(number * 4096, 4096);
    return std::equal(got.begin(), got.end(), held.begin());
  }

  PlayedHolder holder;
  FabricNode node;
  Fabric::PeerId peer{};
};

TEST_SUITE("the socket lane, reading") {
  TEST_CASE("believes no greeting but the right one") {
    struct Case {
      const char* name;
      Welcome welcome;
      Errc expected;
    };
    const Id128 other = Id128::random();
    const Case cases[] = {
        {"garbage", {.magic = 1}, Errc::kCorrupt},
        {"another version", {.version = 99, .verdict = Verdict::kRefused}, Errc::kRefused},
        {"says gone", {.verdict = Verdict::kGone}, Errc::kGone},
        {"another incarnation", {.holder_high = other.high, .holder_low = other.low}, Errc::kGone},
        {"a verdict that is none", {.verdict = Verdict{77}}, Errc::kGone},
    };
    for (const Case& one : cases) {
      CAPTURE(one.name);
      ReaderOfPlayed reader;
      reader.ask(1, {reader.page(0)});
      const Played connection = reader.holder.accept();
      const Hello hello = connection.receive<Hello>();
      CHECK(Id128{hello.wanted_high, hello.wanted_low} == reader.holder.self);

      connection.send(one.welcome);

      const Fabric::Completion completion = reader.node.inbox.take(1);
      CHECK(completion.chunks[0] == one.expected);
      CHECK_FALSE(completion.detail.empty());
      CHECK(connection.closed());
    }
  }

  TEST_CASE("changes no byte outside the places that are open, whatever is answered") {
    struct Case {
      const char* name;
      std::function<void(Answer&)> damage;
      Errc expected;
    };
    const Case cases[] = {
        {"no magic", [](Answer& a) { a.magic = 0; }, Errc::kCorrupt},
        {"another slot", [](Answer& a) { ++a.slot; }, Errc::kCorrupt},
        {"a slot beyond the window", [](Answer& a) { a.slot = UINT32_MAX; }, Errc::kCorrupt},
        {"a question that was never asked", [](Answer& a) { a.question += 5; }, Errc::kCorrupt},
        {"too long", [](Answer& a) { a.size_bytes = 4097; }, Errc::kCorrupt},
        {"far too long", [](Answer& a) { a.size_bytes = UINT32_MAX; }, Errc::kCorrupt},
        {"too short", [](Answer& a) { a.size_bytes = 4095; }, Errc::kCorrupt},
        {"bytes with a refusal", [](Answer& a) { a.verdict = Verdict::kGone; }, Errc::kCorrupt},
        {"a verdict that is none",
         [](Answer& a) {
           a.verdict = Verdict{9};
           a.size_bytes = 0;
         },
         Errc::kCorrupt},
    };
    for (const Case& one : cases) {
      CAPTURE(one.name);
      ReaderOfPlayed reader;
      const std::vector<std::byte> before = reader.node.memory;
      reader.ask(1, {reader.page(3)});
      const Played connection = reader.holder.greeted();
      const Ask ask = connection.receive<Ask>();
      Answer answer = reader.holder.answer(ask);
      one.damage(answer);

      connection.send(answer);
      connection.send_bytes(std::span(reader.holder.memory).first(100000));

      CHECK(reader.node.inbox.take(1).chunks[0] == one.expected);
      CHECK(connection.closed());
      CHECK(reader.node.memory == before);
    }
  }

  TEST_CASE("does not take the same answer twice") {
    ReaderOfPlayed reader;
    reader.ask(1, {reader.page(0), reader.page(1)});
    const Played connection = reader.holder.greeted();
    const Ask first = connection.receive<Ask>();
    (void)connection.receive<Ask>();
    reader.holder.serve(connection, first);
    reader.holder.serve(connection, first);

    const Fabric::Completion completion = reader.node.inbox.take(1);

    CHECK_FALSE(completion.chunks[0]);
    CHECK(reader.came(0));
    CHECK(completion.chunks[1] == Errc::kCorrupt);
  }

  TEST_CASE("finds a flipped bit, and loses only that chunk") {
    ReaderOfPlayed reader;
    reader.ask(1, {reader.page(0), reader.page(1)});
    const Played connection = reader.holder.greeted();
    const Ask first = connection.receive<Ask>();
    const Ask second = connection.receive<Ask>();
    std::vector<std::byte> flipped(reader.holder.asked(first).begin(),
                                   reader.holder.asked(first).end());
    flipped[2000] ^= std::byte{4};
    // In two parts, so that the checksum is taken over both.
    connection.send(reader.holder.answer(first));
    connection.send_bytes(std::span(flipped).first(1000));
    connection.send_bytes(std::span(flipped).subspan(1000));
    reader.holder.serve(connection, second);

    const Fabric::Completion completion = reader.node.inbox.take(1);

    CHECK(completion.chunks[0] == Errc::kCorrupt);
    CHECK_FALSE(completion.chunks[1]);
    CHECK(reader.came(1));
  }

  TEST_CASE("takes answers in any order, and refusals between them") {
    ReaderOfPlayed reader;
    reader.ask(1, {reader.page(0), reader.page(1), reader.page(2), reader.page(3)});
    const Played connection = reader.holder.greeted();
    std::vector<Ask> asks;
    for (int i = 0; i < 4; ++i) asks.push_back(connection.receive<Ask>());
    reader.holder.serve(connection, asks[3]);
    connection.send(
        Answer{.question = asks[1].question, .slot = asks[1].slot, .verdict = Verdict::kInvalid});
    connection.send(
        Answer{.question = asks[0].question, .slot = asks[0].slot, .verdict = Verdict::kGone});
    reader.holder.serve(connection, asks[2]);

    const Fabric::Completion completion = reader.node.inbox.take(1);

    CHECK(completion.chunks[0] == Errc::kGone);
    CHECK(completion.chunks[1] == Errc::kInvalidArgument);
    CHECK_FALSE(completion.chunks[2]);
    CHECK_FALSE(completion.chunks[3]);
    CHECK(reader.came(2));
    CHECK(reader.came(3));
  }

  TEST_CASE("a cancelled batch is closed on, its siblings are asked for again") {
    ReaderOfPlayed reader;
    reader.ask(1, {reader.page(0)});
    reader.ask(2, {reader.page(1)});
    const Played connection = reader.holder.greeted();
    const Ask first = connection.receive<Ask>();
    (void)connection.receive<Ask>();
    connection.send(reader.holder.answer(first));
    connection.send_bytes(reader.holder.asked(first).first(2000));

    REQUIRE(reader.node.fabric->cancel(1));

    CHECK(reader.node.inbox.take(1).chunks[0] == Errc::kCancelled);
    // The place is somebody else's now, and the rest of the bytes comes too late.
    const auto place = std::span(reader.node.memory).first(4096);
    std::fill(place.begin(), place.end(), std::byte{0x5E});
    connection.send_bytes(reader.holder.asked(first).subspan(2000));
    CHECK(connection.closed());
    const Played again = reader.holder.greeted();
    const Ask second = again.receive<Ask>();
    CHECK(second.offset == 4096);
    reader.holder.serve(again, second);
    CHECK_FALSE(reader.node.inbox.take(2).chunks[0]);
    CHECK(reader.came(1));
    CHECK(
        std::all_of(place.begin(), place.end(), [](std::byte b) { return b == std::byte{0x5E}; }));
  }

  TEST_CASE("a deadline ends a batch that nobody answers, and no other") {
    ReaderOfPlayed reader;
    const Played connection = reader.holder.greeted();
    reader.ask(1, {reader.page(0)}, Fabric::Priority::kForeground,
               kClock.now() + std::chrono::milliseconds(20));
    const Ask first = connection.receive<Ask>();
    reader.ask(2, {reader.page(1)});

    CHECK(reader.node.inbox.take(1).chunks[0] == Errc::kTimeout);

    reader.holder.serve(connection, first);  // Too late.
    const Played again = reader.holder.greeted();
    reader.holder.serve(again, again.receive<Ask>());
    CHECK_FALSE(reader.node.inbox.take(2).chunks[0]);
    CHECK(reader.node.memory[0] == pattern_at(kSeed + 1, 0));
  }

  TEST_CASE("the foreground is asked for first, and the background leaves room") {
    ReaderOfPlayed reader({.window_bytes = 8 * 4096});
    reader.ask(1, {reader.page(0, 16)}, Fabric::Priority::kBackground);
    const Played connection = reader.holder.greeted();
    // A quarter of the window, and no more until something is answered.
    const Ask first = connection.receive<Ask>();
    const Ask second = connection.receive<Ask>();
    reader.ask(2, {reader.page(100, 6)});
    for (std::uint64_t i = 0; i < 6; ++i)
      CHECK(connection.receive<Ask>().offset == (100 + i) * 4096);
    CHECK(first.offset == 0);
    CHECK(second.offset == 4096);
    reader.ask(3, {reader.page(200)});

    reader.holder.serve(connection, first);

    CHECK(connection.receive<Ask>().offset == 200 * 4096);
  }

  TEST_CASE("a holder that says nothing any more is lost") {
    ReaderOfPlayed reader({.stall_timeout = std::chrono::milliseconds(50)});
    const Played connection = reader.holder.greeted();
    reader.ask(1, {reader.page(0)});

    CHECK(reader.node.inbox.take(1).chunks[0] == Errc::kPeerLost);
    CHECK(reader.node.read(reader.peer, {reader.page(0)}).chunks[0] == Errc::kPeerLost);
  }

  TEST_CASE("a holder that takes the connection and never greets is lost") {
    ReaderOfPlayed reader({.connect_timeout = std::chrono::milliseconds(50)});
    reader.ask(1, {reader.page(0)});

    CHECK(reader.node.inbox.take(1).chunks[0] == Errc::kPeerLost);
  }

  TEST_CASE("nobody listens where the peer should be") {
    ReaderOfPlayed reader;
    FabricDescriptor nowhere = PlayedHolder().describe();  // Gone by now.
    const auto peer = reader.node.fabric->connect(nowhere);
    REQUIRE(peer);

    const Fabric::Completion completion = reader.node.read(*peer, {reader.page(0)});

    CHECK(completion.chunks[0] == Errc::kPeerLost);
    CHECK(completion.detail.find("refused") != std::string::npos);
  }
}

TEST_SUITE("the socket lane, holding") {
  /// A real holder of one region that is lent, and a reader that is played.
  struct HolderOfPlayed {
    explicit HolderOfPlayed(const TcpFabric::Options& options = {})
        : node(tcp_maker(options), 1 << 20, kSeed) {
      REQUIRE(node.fabric->lend(node.region, late()));
      address = static_cast<TcpFabric&>(*node.fabric).address();
      self = node.fabric->describe().incarnation;
    }
    [[nodiscard]] Hello hello() const { return {.wanted_high = self.high, .wanted_low = self.low}; }
    [[nodiscard]] Played greeted() const {
      Played connection = Played::connect(address);
      connection.send(hello());
      const Welcome welcome = connection.receive<Welcome>();
      CHECK(welcome.verdict == Verdict::kGood);
      CHECK(Id128{welcome.holder_high, welcome.holder_low} == self);
      return connection;
    }
    FabricNode node;
    std::string address;
    Id128 self;
  };

  TEST_CASE("greets nobody who is not meant, and tells him no name") {
    const HolderOfPlayed holder;
    struct Case {
      const char* name;
      std::function<void(Hello&)> damage;
      std::optional<Verdict> expected;
    };
    const Case cases[] = {
        {"garbage", [](Hello& h) { h.magic = 0; }, std::nullopt},
        {"another version", [](Hello& h) { h.version = 2; }, Verdict::kRefused},
        {"another incarnation", [](Hello& h) { ++h.wanted_low; }, Verdict::kGone},
    };
    for (const Case& one : cases) {
      CAPTURE(one.name);
      const Played connection = Played::connect(holder.address);
      Hello hello = holder.hello();
      one.damage(hello);

      connection.send(hello);

      if (one.expected) CHECK(connection.receive<Welcome>().verdict == *one.expected);
      CHECK(connection.closed());
    }
  }

  TEST_CASE("gives only what lies in a region, of a size that it can hold") {
    const HolderOfPlayed holder;
    const Played connection = holder.greeted();
    const std::uint64_t end = holder.node.memory.size();
    const Ask bad[] = {
        {.question = 1, .slot = 9, .region = 0, .offset = end, .size_bytes = 1},
        {.question = 2, .slot = 9, .region = 0, .offset = UINT64_MAX, .size_bytes = 2},
        {.question = 3, .slot = 9, .region = 0, .offset = 0, .size_bytes = 0},
        {.question = 4, .slot = 9, .region = 0, .offset = 0, .size_bytes = UINT32_MAX},
        {.question = 5, .slot = 9, .region = 1, .offset = 0, .size_bytes = 1},
        {.question = 6, .slot = 9, .region = UINT32_MAX, .offset = 0, .size_bytes = 1},
    };
    for (const Ask& ask : bad) {
      connection.send(ask);
      const Answer answer = connection.receive<Answer>();
      CHECK(answer.question == ask.question);
      CHECK(answer.slot == 9);
      CHECK(answer.size_bytes == 0);
      // A region that there is not is one that is not lent.
      CHECK(answer.verdict == (ask.region == 0 ? Verdict::kInvalid : Verdict::kGone));
    }
    connection.send(Ask{.question = 7, .offset = end - 1, .size_bytes = 1});
    CHECK(connection.receive<Answer>().verdict == Verdict::kGood);
    CHECK(connection.receive<std::byte>() == holder.node.memory.back());
  }

  TEST_CASE("answers each of many questions, read or not, and holds a bounded number") {
    const HolderOfPlayed holder;
    const Played connection = holder.greeted();
    constexpr std::uint64_t kMany = 10 * tcp::Serving::kQuestions;
    std::vector<Ask> asks(kMany);
    for (std::uint64_t i = 0; i < kMany; ++i)
      asks[i] = {.question = i, .offset = i, .size_bytes = 7};

    connection.send_bytes(std::as_bytes(std::span(asks)));

    for (std::uint64_t i = 0; i < kMany; ++i) {
      const Answer answer = connection.receive<Answer>();
      REQUIRE(answer.question == i);
      const auto bytes = connection.receive<std::array<std::byte, 7>>();
      REQUIRE(std::equal(bytes.begin(), bytes.end(),
                         holder.node.memory.begin() + static_cast<std::ptrdiff_t>(i)));
      REQUIRE(answer.checksum == PageChecksum::of(bytes));
    }
  }

  TEST_CASE("a lease that ends while its bytes are on the way ends them too") {
    const HolderOfPlayed holder;
    const Played connection = holder.greeted();
    // More than the buffers of both sockets take at once.
    std::vector<Ask> asks(200);
    for (Ask& ask : asks) ask = {.size_bytes = 1 << 20};
    connection.send_bytes(std::as_bytes(std::span(asks)));
    (void)connection.receive<Answer>();

    REQUIRE(holder.node.fabric->lend(holder.node.region, TimePoint::min()));

    // What the buffers hold still comes; then the connection ends in the middle of an answer, or
    // the next one is a refusal.
    std::vector<std::byte> page(1 << 20);
    std::size_t pages = 0;
    while (connection.receive_into(page) && ++pages < asks.size()) {
      Answer answer;
      if (!connection.receive_into(std::as_writable_bytes(std::span(&answer, 1)))) break;
      if (answer.verdict == Verdict::kGone) break;
    }
    CHECK(pages < asks.size());
  }

  TEST_CASE("who does not greet in time, and who is one too many, is turned away") {
    const HolderOfPlayed slow({.connect_timeout = std::chrono::milliseconds(30)});
    CHECK(Played::connect(slow.address).closed());

    const HolderOfPlayed full({.readers = 1});
    const Played first = full.greeted();
    CHECK(Played::connect(full.address).closed());
    first.send(Ask{.size_bytes = 1});
    CHECK(first.receive<Answer>().verdict == Verdict::kGood);
  }
}

TEST_SUITE("the socket lane") {
  TEST_CASE("its limits are answers") {
    ReaderOfPlayed reader({.batches = 2, .chunks = 3, .peers = 2});
    reader.ask(1, {reader.page(0)});
    reader.ask(2, {reader.page(0)});
    const auto read = [&](std::size_t chunks) {
      return reader.node.fabric
          ->read({.ticket = 3,
                  .peer = reader.peer,
                  .deadline = late(),
                  .chunks = std::vector<Fabric::Chunk>(chunks, reader.page(0))})
          .error()
          .code;
    };
    CHECK(read(1) == Errc::kBusy);
    CHECK(read(4) == Errc::kInvalidArgument);
    const auto second = reader.node.fabric->connect(reader.holder.describe());
    REQUIRE(second);
    CHECK(reader.node.fabric->connect(reader.holder.describe()).error().code == Errc::kBusy);

    REQUIRE(reader.node.fabric->cancel(1));
    REQUIRE(reader.node.fabric->cancel(2));
    (void)reader.node.inbox.take(1);
    (void)reader.node.inbox.take(2);
    reader.ask(3, {reader.page(0)});
    REQUIRE(reader.node.fabric->disconnect(*second));
    // Behind it in the queue, so it has been carried out when this returns.
    reader.node.fabric->unregister_region(RegionId{99});
    CHECK(reader.node.fabric->connect(reader.holder.describe()));
  }

  TEST_CASE("regions are numbered once, and the numbers end") {
    FabricNode node(tcp_maker({}), 4096, kSeed);
    for (std::size_t i = 1; i < tcp::RegionTable::kMaximum; ++i) {
      const auto region = node.fabric->register_region(node.memory);
      REQUIRE(region);
      node.fabric->unregister_region(*region);
    }
    CHECK(node.fabric->register_region(node.memory).error().code == Errc::kOutOfCapacity);
  }

  TEST_CASE("options and addresses that cannot be are refused") {
    const auto refused = [](const TcpFabric::Options& options) {
      return TcpFabric::create(options, kClock, [](Fabric::Completion&&) {}).error().code;
    };
    CHECK(refused({.listen = "localhost:0"}) == Errc::kInvalidArgument);
    CHECK(refused({.listen = "127.0.0.1"}) == Errc::kInvalidArgument);
    CHECK(refused({.listen = "::1:80"}) == Errc::kInvalidArgument);
    CHECK(refused({.connections = 0}) == Errc::kInvalidArgument);
    CHECK(refused({.piece_bytes = 5 << 20}) == Errc::kInvalidArgument);
    CHECK(refused({.stall_timeout = Duration::zero()}) == Errc::kInvalidArgument);
    FabricNode node(tcp_maker({}), 1, kSeed);
    const std::string taken = static_cast<TcpFabric&>(*node.fabric).address();
    CHECK(TcpFabric::create({.listen = taken}, kClock, [](Fabric::Completion&&) {})
              .error()
              .detail.find(taken) != std::string::npos);
  }

  TEST_CASE("an address is written as it is read") {
    for (const char* const text : {"127.0.0.1:7000", "[::1]:0", "[2001:db8::7]:65535"}) {
      CHECK(to_string(tcp::SocketAddress::parse(text).value()) == text);
    }
    CHECK(tcp::SocketAddress::parse("localhost:80", false));
    CHECK_FALSE(tcp::SocketAddress::parse("127.0.0.1:"));
    CHECK_FALSE(tcp::SocketAddress::parse("127.0.0.1:99999999"));
  }
}

}  // namespace
}  // namespace pegaflow::testing
