// Everything that a peer may send to the socket lane: the other end of each connection is simulated
// here, byte by byte.
#include <array>
#include <csignal>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "tests/support/seed.h"
#include "tests/unit/transport/tcp_played.h"
#include "transport/tcp/responder.h"

namespace pegaflow::testing {
namespace {

TEST_SUITE("the socket lane, reading") {
  TEST_CASE("accepts no greeting but the right one") {
    struct Case {
      const char* name;
      Welcome welcome;
      Errc expected;
    };
    const Id128 other = Id128::random();
    const Case cases[] = {
        {"garbage", {.magic = 1}, Errc::kCorrupt},
        {"another version", {.version = 99, .verdict = Verdict::kRefused}, Errc::kRefused},
        {"verdict gone", {.verdict = Verdict::kGone}, Errc::kGone},
        {"another incarnation", {.holder_high = other.high, .holder_low = other.low}, Errc::kGone},
        {"an invalid verdict", {.verdict = Verdict{77}}, Errc::kGone},
    };
    for (const Case& one : cases) {
      CAPTURE(one.name);
      ReaderOfPlayed reader;
      reader.request(1, {reader.page(0)});
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

  TEST_CASE("changes no byte outside the open places, whatever the response") {
    struct Case {
      const char* name;
      std::function<void(Response&)> damage;
      Errc expected;
    };
    const Case cases[] = {
        {"no magic", [](Response& a) { a.magic = 0; }, Errc::kCorrupt},
        {"another slot", [](Response& a) { ++a.slot; }, Errc::kCorrupt},
        {"a slot beyond the window", [](Response& a) { a.slot = UINT32_MAX; }, Errc::kCorrupt},
        {"a request that was never sent", [](Response& a) { a.request_id += 5; }, Errc::kCorrupt},
        {"too long", [](Response& a) { a.size_bytes = 4097; }, Errc::kCorrupt},
        {"far too long", [](Response& a) { a.size_bytes = UINT32_MAX; }, Errc::kCorrupt},
        {"too short", [](Response& a) { a.size_bytes = 4095; }, Errc::kCorrupt},
        {"bytes with an error", [](Response& a) { a.verdict = Verdict::kGone; }, Errc::kCorrupt},
        {"an invalid verdict",
         [](Response& a) {
           a.verdict = Verdict{9};
           a.size_bytes = 0;
         },
         Errc::kCorrupt},
    };
    for (const Case& one : cases) {
      CAPTURE(one.name);
      ReaderOfPlayed reader;
      const std::vector<std::byte> before = reader.node.memory;
      reader.request(1, {reader.page(3)});
      const Played connection = reader.holder.greeted();
      const Request request = connection.receive<Request>();
      Response response = reader.holder.response_to(request);
      one.damage(response);

      connection.send(response);
      connection.send_bytes(std::span(reader.holder.memory).first(100000));

      CHECK(reader.node.inbox.take(1).chunks[0] == one.expected);
      CHECK(connection.closed());
      CHECK(reader.node.memory == before);
    }
  }

  TEST_CASE("rejects the same response twice") {
    ReaderOfPlayed reader;
    reader.request(1, {reader.page(0), reader.page(1)});
    const Played connection = reader.holder.greeted();
    const Request first = connection.receive<Request>();
    (void)connection.receive<Request>();
    reader.holder.serve(connection, first);
    reader.holder.serve(connection, first);

    const Fabric::Completion completion = reader.node.inbox.take(1);

    CHECK_FALSE(completion.chunks[0]);
    CHECK(reader.came(0));
    CHECK(completion.chunks[1] == Errc::kCorrupt);
  }

  TEST_CASE("detects a flipped bit, and loses only that chunk") {
    ReaderOfPlayed reader;
    reader.request(1, {reader.page(0), reader.page(1)});
    const Played connection = reader.holder.greeted();
    const Request first = connection.receive<Request>();
    const Request second = connection.receive<Request>();
    std::vector<std::byte> flipped(reader.holder.requested(first).begin(),
                                   reader.holder.requested(first).end());
    flipped[2000] ^= std::byte{4};
    // In two parts, so that the checksum is computed over both.
    connection.send(reader.holder.response_to(first));
    connection.send_bytes(std::span(flipped).first(1000));
    connection.send_bytes(std::span(flipped).subspan(1000));
    reader.holder.serve(connection, second);

    const Fabric::Completion completion = reader.node.inbox.take(1);

    CHECK(completion.chunks[0] == Errc::kCorrupt);
    CHECK_FALSE(completion.chunks[1]);
    CHECK(reader.came(1));
  }

  TEST_CASE("accepts responses in any order, and errors between them") {
    ReaderOfPlayed reader;
    reader.request(1, {reader.page(0), reader.page(1), reader.page(2), reader.page(3)});
    const Played connection = reader.holder.greeted();
    std::vector<Request> requests;
    for (int i = 0; i < 4; ++i) requests.push_back(connection.receive<Request>());
    reader.holder.serve(connection, requests[3]);
    connection.send(Response{.request_id = requests[1].request_id,
                             .slot = requests[1].slot,
                             .verdict = Verdict::kInvalid});
    connection.send(Response{
        .request_id = requests[0].request_id, .slot = requests[0].slot, .verdict = Verdict::kGone});
    reader.holder.serve(connection, requests[2]);

    const Fabric::Completion completion = reader.node.inbox.take(1);

    CHECK(completion.chunks[0] == Errc::kGone);
    CHECK(completion.chunks[1] == Errc::kInvalidArgument);
    CHECK_FALSE(completion.chunks[2]);
    CHECK_FALSE(completion.chunks[3]);
    CHECK(reader.came(2));
    CHECK(reader.came(3));
  }

  TEST_CASE("a cancelled batch closes its connection, its siblings are requested again") {
    ReaderOfPlayed reader;
    reader.request(1, {reader.page(0)});
    reader.request(2, {reader.page(1)});
    const Played connection = reader.holder.greeted();
    const Request first = connection.receive<Request>();
    (void)connection.receive<Request>();
    connection.send(reader.holder.response_to(first));
    connection.send_bytes(reader.holder.requested(first).first(2000));

    REQUIRE(reader.node.fabric->cancel(1));

    CHECK(reader.node.inbox.take(1).chunks[0] == Errc::kCancelled);
    // The place is reused now, and the rest of the bytes arrives too late.
    const auto place = std::span(reader.node.memory).first(4096);
    std::fill(place.begin(), place.end(), std::byte{0x5E});
    connection.send_bytes(reader.holder.requested(first).subspan(2000));
    CHECK(connection.closed());
    const Played redialed = reader.holder.greeted();
    const Request second = redialed.receive<Request>();
    CHECK(second.offset == 4096);
    reader.holder.serve(redialed, second);
    CHECK_FALSE(reader.node.inbox.take(2).chunks[0]);
    CHECK(reader.came(1));
    CHECK(
        std::all_of(place.begin(), place.end(), [](std::byte b) { return b == std::byte{0x5E}; }));
  }

  TEST_CASE("a deadline ends a batch without a response, and no other") {
    ReaderOfPlayed reader;
    const Played connection = reader.holder.greeted();
    reader.request(1, {reader.page(0)}, Fabric::Priority::kForeground, kClock.now() + kHang / 2);
    const Request first = connection.receive<Request>();
    reader.request(2, {reader.page(1)});

    reader.pass(kHang / 2);

    CHECK(reader.node.inbox.take(1).chunks[0] == Errc::kTimeout);

    reader.holder.serve(connection, first);  // Too late.
    const Played redialed = reader.holder.greeted();
    reader.holder.serve(redialed, redialed.receive<Request>());
    CHECK_FALSE(reader.node.inbox.take(2).chunks[0]);
    CHECK(reader.node.memory[0] == pattern_at(kSeed + 1, 0));
  }

  TEST_CASE("the foreground is requested first, and the background leaves room") {
    ReaderOfPlayed reader({.window_bytes = 8 * 4096});
    reader.request(1, {reader.page(0, 16)}, Fabric::Priority::kBackground);
    const Played connection = reader.holder.greeted();
    // A quarter of the window, and no more until a response arrives.
    const Request first = connection.receive<Request>();
    const Request second = connection.receive<Request>();
    reader.request(2, {reader.page(100, 6)});
    for (std::uint64_t i = 0; i < 6; ++i)
      CHECK(connection.receive<Request>().offset == (100 + i) * 4096);
    CHECK(first.offset == 0);
    CHECK(second.offset == 4096);
    reader.request(3, {reader.page(200)});

    reader.holder.serve(connection, first);

    CHECK(connection.receive<Request>().offset == 200 * 4096);
  }

  TEST_CASE("a holder that stops responding is lost") {
    ReaderOfPlayed reader;
    const Played connection = reader.holder.greeted();
    reader.request(1, {reader.page(0)});
    (void)connection.receive<Request>();

    reader.pass(kHang);

    CHECK(reader.node.inbox.take(1).chunks[0] == Errc::kPeerLost);
    CHECK(reader.node.read(reader.peer, {reader.page(0)}).chunks[0] == Errc::kPeerLost);
  }

  TEST_CASE("a holder that accepts the connection and never greets is lost") {
    ReaderOfPlayed reader;
    reader.request(1, {reader.page(0)});
    const Played connection = reader.holder.accept();
    (void)connection.receive<Hello>();

    reader.pass(kHang);

    CHECK(reader.node.inbox.take(1).chunks[0] == Errc::kPeerLost);
  }

  TEST_CASE("no process listens at the peer's address") {
    ReaderOfPlayed reader;
    FabricDescriptor nowhere = PlayedHolder().describe();  // Destroyed by now.
    const auto peer = reader.node.fabric->connect(nowhere);
    REQUIRE(peer);

    const Fabric::Completion completion = reader.node.read(*peer, {reader.page(0)});

    CHECK(completion.chunks[0] == Errc::kPeerLost);
    CHECK(completion.detail.find("refused") != std::string::npos);
  }
}

TEST_SUITE("the socket lane, holding") {
  /// A real holder of one lent region, and a simulated reader.
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

  TEST_CASE("welcomes only readers of its incarnation, and does not disclose it to others") {
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

  TEST_CASE("serves only bytes of a region, within the size limit") {
    const HolderOfPlayed holder;
    const Played connection = holder.greeted();
    const std::uint64_t end = holder.node.memory.size();
    const Request bad[] = {
        {.request_id = 1, .slot = 9, .region = 0, .offset = end, .size_bytes = 1},
        {.request_id = 2, .slot = 9, .region = 0, .offset = UINT64_MAX, .size_bytes = 2},
        {.request_id = 3, .slot = 9, .region = 0, .offset = 0, .size_bytes = 0},
        {.request_id = 4, .slot = 9, .region = 0, .offset = 0, .size_bytes = UINT32_MAX},
        {.request_id = 5, .slot = 9, .region = 1, .offset = 0, .size_bytes = 1},
        {.request_id = 6, .slot = 9, .region = UINT32_MAX, .offset = 0, .size_bytes = 1},
    };
    for (const Request& request : bad) {
      connection.send(request);
      const Response response = connection.receive<Response>();
      CHECK(response.request_id == request.request_id);
      CHECK(response.slot == 9);
      CHECK(response.size_bytes == 0);
      // A region that does not exist counts as one that is not lent.
      CHECK(response.verdict == (request.region == 0 ? Verdict::kInvalid : Verdict::kGone));
    }
    connection.send(Request{.request_id = 7, .offset = end - 1, .size_bytes = 1});
    CHECK(connection.receive<Response>().verdict == Verdict::kGood);
    CHECK(connection.receive<std::byte>() == holder.node.memory.back());
  }

  TEST_CASE("answers each of many requests, whether the responses are read or not") {
    const HolderOfPlayed holder;
    const Played connection = holder.greeted();
    constexpr std::uint64_t kMany = 10 * tcp::Responder::kMaxRequests;
    std::vector<Request> requests(kMany);
    for (std::uint64_t i = 0; i < kMany; ++i)
      requests[i] = {.request_id = i, .offset = i, .size_bytes = 7};

    connection.send_bytes(std::as_bytes(std::span(requests)));

    for (std::uint64_t i = 0; i < kMany; ++i) {
      const Response response = connection.receive<Response>();
      REQUIRE(response.request_id == i);
      const auto bytes = connection.receive<std::array<std::byte, 7>>();
      REQUIRE(std::equal(bytes.begin(), bytes.end(),
                         holder.node.memory.begin() + static_cast<std::ptrdiff_t>(i)));
      REQUIRE(response.checksum == PageChecksum::of(bytes));
    }
  }

  TEST_CASE("holds a bounded number of requests, and reads no more") {
    const HolderOfPlayed holder;
    const Played connection = holder.greeted();
    // Small buffers: few requests fit into them, and a full socket means that the holder stopped
    // reading.
    connection.shrink_send_buffer();
    const std::vector<Request> requests(tcp::Responder::kMaxRequests,
                                        Request{.size_bytes = 1 << 20});

    // The responses are not read, so sending blocks long before this bound.
    const std::size_t sent =
        connection.send_until_full(std::as_bytes(std::span(requests)), 32 << 20);

    CHECK(sent < 32 << 20);
  }

  TEST_CASE("a lease that ends while its bytes are being sent ends the transfer too") {
    const HolderOfPlayed holder;
    const Played connection = holder.greeted();
    // More than the buffers of both sockets hold.
    std::vector<Request> requests(200);
    for (Request& request : requests) request = {.size_bytes = 1 << 20};
    connection.send_bytes(std::as_bytes(std::span(requests)));
    (void)connection.receive<Response>();

    REQUIRE(holder.node.fabric->lend(holder.node.region, TimePoint::min()));

    // Buffered bytes still arrive; then the connection ends in the middle of a response, or the
    // next one is an error.
    std::vector<std::byte> page(1 << 20);
    std::size_t pages = 0;
    while (connection.receive_into(page) && ++pages < requests.size()) {
      Response response;
      if (!connection.receive_into(std::as_writable_bytes(std::span(&response, 1)))) break;
      if (response.verdict == Verdict::kGone) break;
    }
    CHECK(pages < requests.size());
  }

  TEST_CASE(
      "once lend() has ended a lease, the bytes may change and no reader receives the new ones") {
    std::mt19937_64 random(seed());
    // Few large pieces: one is nearly always being read or sent.
    const TcpFabric::Options options{.connections = 1, .piece_bytes = 512 << 10};
    FabricNode holder(tcp_maker(options), 1 << 20, kSeed);
    FabricNode reader(tcp_maker(options), 1 << 20, kSeed);
    const auto peer = reader.fabric->connect(holder.fabric->describe()).value();
    constexpr std::uint64_t kPage = 512 << 10;
    for (std::uint64_t round = 1; round <= 200; ++round) {
      const auto lent = static_cast<std::byte>(round);
      std::fill(holder.memory.begin(), holder.memory.end(), lent);
      REQUIRE(holder.fabric->lend(holder.region, late()));
      std::vector<Fabric::Chunk> chunks;
      for (std::uint64_t at = 0; at < holder.memory.size(); at += kPage) {
        chunks.push_back({.remote_region = holder.region,
                          .remote_offset = at,
                          .local_region = reader.region,
                          .local_offset = at,
                          .size_bytes = kPage});
      }
      REQUIRE(reader.fabric->read(
          {.ticket = round, .peer = peer, .deadline = late(), .chunks = chunks}));
      for (std::uint64_t i = random() % 2000; i > 0; --i) std::this_thread::yield();

      REQUIRE(holder.fabric->lend(holder.region, TimePoint::min()));
      std::fill(holder.memory.rbegin(), holder.memory.rend(), ~lent);

      const Fabric::Completion completion = reader.inbox.take(round);
      for (std::size_t i = 0; i < chunks.size(); ++i) {
        const auto page = std::span(reader.memory).subspan(i * kPage, kPage);
        if (completion.chunks[i]) {
          CHECK(*completion.chunks[i] == Errc::kGone);  // Not kCorrupt: no chunk has mixed bytes.
        } else {
          CHECK(std::all_of(page.begin(), page.end(), [&](std::byte b) { return b == lent; }));
        }
      }
    }
  }

  TEST_CASE("a reader that does not greet in time, and one beyond the limit, is rejected") {
    const HolderOfPlayed slow({.connect_timeout = std::chrono::milliseconds(30)});
    CHECK(Played::connect(slow.address).closed());

    const HolderOfPlayed full({.readers = 1});
    const Played first = full.greeted();
    CHECK(Played::connect(full.address).closed());
    first.send(Request{.size_bytes = 1});
    CHECK(first.receive<Response>().verdict == Verdict::kGood);
  }

  TEST_CASE("connections that do not greet cannot keep readers out") {
    const HolderOfPlayed holder({.connect_timeout = kHang, .readers = 3});
    const Played reader = holder.greeted();
    const Played oldest = Played::connect(holder.address);
    const Played other = Played::connect(holder.address);

    const Played late_reader = holder.greeted();
    CHECK(oldest.closed());
    const Played last_reader = holder.greeted();
    CHECK(other.closed());

    CHECK(Played::connect(holder.address).closed());  // All three places are readers' now.
    for (const Played* const one : {&reader, &late_reader, &last_reader}) {
      one->send(Request{.size_bytes = 1});
      CHECK(one->receive<Response>().verdict == Verdict::kGood);
    }
  }
}

TEST_SUITE("the socket lane") {
  TEST_CASE("calls beyond its limits return errors") {
    ReaderOfPlayed reader({.batches = 2, .chunks = 3, .peers = 2});
    reader.request(1, {reader.page(0)});
    reader.request(2, {reader.page(0)});
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
    reader.request(3, {reader.page(0)});
    REQUIRE(reader.node.fabric->disconnect(*second));
    // Queued behind it, so it has been executed when this returns.
    reader.node.fabric->unregister_region(RegionId{99});
    CHECK(reader.node.fabric->connect(reader.holder.describe()));
  }

  TEST_CASE("a peer with too many regions is rejected") {
    FabricNode node(tcp_maker({}), 4096, kSeed);
    FabricDescriptor peer = PlayedHolder().describe();
    peer.regions.resize(tcp::RegionTable::kMaximum);
    CHECK(node.fabric->connect(peer));
    peer.regions.emplace_back();
    CHECK(node.fabric->connect(peer).error().code == Errc::kInvalidArgument);
  }

  TEST_CASE("numbers of regions are not reused, and are limited") {
    FabricNode node(tcp_maker({}), 4096, kSeed);
    for (std::size_t i = 1; i < tcp::RegionTable::kMaximum; ++i) {
      const auto region = node.fabric->register_region(node.memory);
      REQUIRE(region);
      node.fabric->unregister_region(*region);
    }
    CHECK(node.fabric->register_region(node.memory).error().code == Errc::kOutOfCapacity);
  }

  TEST_CASE("invalid options and addresses are rejected") {
    const auto refused = [](const TcpFabric::Options& options) {
      return TcpFabric::create(options, kClock, [](Fabric::Completion&&) {}).error().code;
    };
    CHECK(refused({.listen = "localhost:0"}) == Errc::kInvalidArgument);
    CHECK(refused({.listen = "127.0.0.1"}) == Errc::kInvalidArgument);
    CHECK(refused({.listen = "::1:80"}) == Errc::kInvalidArgument);
    for (const char* const everywhere : {"0.0.0.0:0", "[::]:0", "[::ffff:0.0.0.0]:0"}) {
      CHECK(refused({.listen = everywhere}) == Errc::kInvalidArgument);
    }
    CHECK(refused({.connections = 0}) == Errc::kInvalidArgument);
    CHECK(refused({.piece_bytes = 5 << 20}) == Errc::kInvalidArgument);
    CHECK(refused({.stall_timeout = Duration::zero()}) == Errc::kInvalidArgument);
    FabricNode node(tcp_maker({}), 1, kSeed);
    const std::string taken = static_cast<TcpFabric&>(*node.fabric).address();
    CHECK(TcpFabric::create({.listen = taken}, kClock, [](Fabric::Completion&&) {})
              .error()
              .detail.find(taken) != std::string::npos);
  }

  TEST_CASE("an address is formatted as it is parsed") {
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
