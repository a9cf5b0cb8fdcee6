// Connections of the socket lane that break or fall silent, and their effect on the peer.
#include <future>

#include "tests/unit/transport/tcp_played.h"

namespace pegaflow::testing {
namespace {

TEST_SUITE("the socket lane, with a connection that breaks") {
  TEST_CASE("requests again on a new one, and loses only the bytes that are gone") {
    for (const bool answered_before : {true, false}) {
      CAPTURE(answered_before);
      ReaderOfPlayed reader;
      reader.request(1, {reader.page(0)});
      reader.request(2, {reader.page(1)});
      reader.request(3, {reader.page(2)});
      {
        const Played connection = reader.holder.greeted();
        const Request first = connection.receive<Request>();
        const Request second = connection.receive<Request>();
        if (answered_before) reader.holder.serve(connection, first);
        // As a holder does when a region ends while its bytes are being sent.
        connection.send(reader.holder.response_to(second));
        connection.send_bytes(reader.holder.requested(second).first(1000));
        (void)connection.receive<Request>();
      }

      const Played redialed = reader.holder.greeted();
      if (!answered_before) reader.holder.serve(redialed, redialed.receive<Request>());
      const Request second = redialed.receive<Request>();
      CHECK(second.offset == 4096);
      redialed.send(Response{
          .request_id = second.request_id, .slot = second.slot, .verdict = Verdict::kGone});
      reader.holder.serve(redialed, redialed.receive<Request>());

      CHECK_FALSE(reader.node.inbox.take(1).chunks[0]);
      CHECK(reader.node.inbox.take(2).chunks[0] == Errc::kGone);
      CHECK_FALSE(reader.node.inbox.take(3).chunks[0]);
      CHECK(reader.came(0));
      CHECK(reader.came(2));
    }
  }

  TEST_CASE("loses the peer when it breaks repeatedly without delivering anything") {
    ReaderOfPlayed reader;
    reader.request(1, {reader.page(0)});
    for (int i = 0; i < 4; ++i) (void)reader.holder.greeted().receive<Request>();

    CHECK(reader.node.inbox.take(1).chunks[0] == Errc::kPeerLost);
  }

  TEST_CASE("is dialed again later when a dial fails while another one is up") {
    ReaderOfPlayed reader({}, 2);
    const Played stands = reader.holder.greeted();
    {
      const Played breaks = reader.holder.greeted();
      wait_for_iterations(*reader.node.fabric);
    }
    (void)reader.holder.accept();  // And closed before the welcome.
    wait_for_iterations(*reader.node.fabric);

    reader.pass(kHang / 8);

    const Played redialed = reader.holder.greeted();
    wait_for_iterations(*reader.node.fabric);
    reader.request(1, {reader.page(0)});
    reader.request(2, {reader.page(1)});
    reader.holder.serve(stands, stands.receive<Request>());
    reader.holder.serve(redialed, redialed.receive<Request>());
    CHECK_FALSE(reader.node.inbox.take(1).chunks[0]);
    CHECK_FALSE(reader.node.inbox.take(2).chunks[0]);
  }

  TEST_CASE("is dialed again when it is silent while another one delivers bytes") {
    // A window of one piece, so that each connection takes one.
    ReaderOfPlayed reader({.window_bytes = 4096}, 2);
    const Played silent = reader.holder.greeted();
    const Played other = reader.holder.greeted();
    reader.request(1, {reader.page(0)});
    reader.request(2, {reader.page(1)});
    const std::uint64_t silent_ticket = 1 + silent.receive<Request>().offset / 4096;
    const Request request = other.receive<Request>();
    reader.pass(kHang / 2);
    reader.holder.serve(other, request);
    CHECK_FALSE(reader.node.inbox.take(3 - silent_ticket).chunks[0]);

    reader.pass(kHang / 2 + std::chrono::seconds(1));

    CHECK(silent.closed());
    const Played redialed = reader.holder.greeted();
    // The other connection may have taken the piece.
    reader.request(3, {reader.page(3)});
    reader.holder.serve(other, other.receive<Request>());
    reader.holder.serve(redialed, redialed.receive<Request>());
    CHECK_FALSE(reader.node.inbox.take(silent_ticket).chunks[0]);
    CHECK_FALSE(reader.node.inbox.take(3).chunks[0]);
  }

  TEST_CASE("is not taken for silent when this process was stopped") {
    ShiftedClock clock;
    PlayedHolder holder;
    FabricInbox inbox;
    std::promise<void> stopped;
    std::promise<void> go_on;
    // The lane's thread is blocked in its first completion, as a stopped process would be.
    bool first = true;
    const auto made = TcpFabric::create(
        {.connections = 1, .piece_bytes = 4096, .connect_timeout = kHang, .stall_timeout = kHang},
        clock, [&](Fabric::Completion&& completion) {
          inbox.put(std::move(completion));
          if (!std::exchange(first, false)) return;
          stopped.set_value();
          go_on.get_future().wait_for(kHang);
        });
    REQUIRE(made);
    Fabric& fabric = **made;
    std::vector<std::byte> memory(8192);
    const RegionId region = fabric.register_region(memory).value();
    const auto peer = fabric.connect(holder.describe()).value();
    for (std::uint64_t i = 0; i < 2; ++i) {
      REQUIRE(fabric.read({.ticket = i,
                           .peer = peer,
                           .deadline = late(),
                           .chunks = {{.remote_region = RegionId{0},
                                       .remote_offset = i * 4096,
                                       .local_region = region,
                                       .local_offset = i * 4096,
                                       .size_bytes = 4096}}}));
    }
    const Played connection = holder.greeted();
    const Request requests[] = {connection.receive<Request>(), connection.receive<Request>()};
    holder.serve(connection, requests[0]);
    stopped.get_future().wait();
    holder.serve(connection, requests[1]);
    clock.advance(kHang + std::chrono::seconds(1));
    go_on.set_value();

    CHECK_FALSE(inbox.take(0).chunks[0]);
    CHECK_FALSE(inbox.take(1).chunks[0]);
    CHECK(std::equal(memory.begin(), memory.end(), holder.memory.begin()));
  }
}

}  // namespace
}  // namespace pegaflow::testing
