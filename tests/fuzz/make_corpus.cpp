// Writes the first inputs of the fuzz targets: usage make_corpus DIRECTORY (tests/fuzz/corpus).
//
// Real messages, so that the fuzzers begin behind the first checks. Run it again after a change of
// the schema.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <capnp/capability.h>
#include <capnp/message.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <kj/async.h>

#include "capnp/wire/codec.h"
#include "capnp/wire/peer_codec.h"
#include "tests/fuzz/peer_names.h"

namespace pegaflow {
namespace {

namespace fs = std::filesystem;

std::string to_bytes(capnp::MessageBuilder& message) {
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  return {reinterpret_cast<const char*>(bytes.begin()), bytes.size()};
}

void write(const fs::path& path, unsigned char first, const std::string& rest) {
  std::ofstream file(path, std::ios::binary);
  file.put(static_cast<char>(first));
  file << rest;
}

std::vector<BlockKey> keys(std::size_t count) {
  std::vector<BlockKey> made(count);
  for (std::size_t i = 0; i < count; ++i) made[i].bytes.fill(static_cast<std::byte>(i + 1));
  return made;
}

Registration registration() {
  return {.instance = "engine",
          .rank = 0,
          .ranks = 1,
          .factors = {{"dtype", "float16"}, {"weights", "a"}},
          .page_bytes = 4096,
          .block_count = 100};
}

void write_messages(const fs::path& to) {
  fs::create_directories(to);
  capnp::MallocMessageBuilder keys_message;
  write_keys(keys(5), 32, keys_message.initRoot<wire::Keys>());
  write(to / "keys", 0, to_bytes(keys_message));
  capnp::MallocMessageBuilder registration_message;
  write_registration(registration(), registration_message.initRoot<wire::Registration>());
  write(to / "registration", 1, to_bytes(registration_message));
  capnp::MallocMessageBuilder job_message;
  write_job({.scheduler = {1, 2}, .number = 3}, job_message.initRoot<wire::JobId>());
  write(to / "job", 2, to_bytes(job_message));
  capnp::MallocMessageBuilder error_message;
  write_error({.code = Errc::kGone, .detail = "why"}, error_message.initRoot<wire::Error>());
  write(to / "error", 3, to_bytes(error_message));
  capnp::MallocMessageBuilder done_message;
  write_done(fail(Errc::kBusy, "later"), done_message.initRoot<wire::Done>());
  write(to / "done", 4, to_bytes(done_message));
  capnp::MallocMessageBuilder hello_message;
  auto hello = hello_message.initRoot<wire::Hello>();
  hello.setMinimum(1);
  hello.setMaximum(2);
  write_id({1, 2}, hello.initProcess());
  hello.setBuild("corpus");
  write(to / "hello", 5, to_bytes(hello_message));
  capnp::MallocMessageBuilder fabric_message;
  write_fabric({.backend = "tcp",
                .incarnation = {1, 2},
                .address = std::vector<std::byte>(14, std::byte{'1'}),
                .regions = {{.region = RegionId{0}, .size_bytes = 4096, .key = {}}}},
               fabric_message.initRoot<wire::Fabric>());
  write(to / "fabric", 6, to_bytes(fabric_message));
  capnp::MallocMessageBuilder grant_message;
  write_grant({.lease = 3,
               .granted = std::chrono::milliseconds(10000),
               .pages = {1, 2, 3, 4},
               .checksums = {5, 6, 7, 8}},
              grant_message.initRoot<wire::Peer::LeaseResults>());
  write(to / "grant", 7, to_bytes(grant_message));
}

class Handle final : public wire::ProcessHandle::Server {};

/// The messages of a client behind its bootstrap, all of them pipelined: they need no response. The
/// bootstrap itself comes from the fuzzer, because a descriptor comes with the first byte of the
/// message that it belongs to.
class Conversation {
 public:
  /// hello with a pidfd: a capability that the sender hosts, and its descriptor.
  void say_hello() {
    capnp::MallocMessageBuilder message;
    auto call = begin(message, capnp::typeId<wire::Gate>(), 0);
    call.initTarget().initPromisedAnswer().setQuestionId(0);
    auto payload = call.initParams();
    auto table = payload.initCapTable(1);
    table[0].setSenderHosted(0);
    table[0].setAttachedFd(0);
    // Writes the pointer that means the first entry of that table.
    capnp::BuilderCapabilityTable capabilities;
    auto hello = capabilities.imbue(payload.getContent()).initAs<wire::Hello>();
    hello.setHandle(kj::heap<Handle>());
    hello.setMinimum(kWireMinimum);
    hello.setMaximum(kWireMaximum);
    write_id({5, 6}, hello.initProcess());
    hello.setBuild("corpus");
    hello_question_ = question_ - 1;
    bytes_ += to_bytes(message);
  }

  /// A call to the session that hello returns. `fill` writes its parameters.
  template <typename Params, typename Fill>
  void call(std::uint16_t method, Fill fill) {
    capnp::MallocMessageBuilder message;
    auto call = begin(message, capnp::typeId<wire::Session>(), method);
    auto target = call.initTarget().initPromisedAnswer();
    target.setQuestionId(hello_question_);
    target.initTransform(1)[0].setGetPointerField(kSessionPointer);
    fill(call.initParams().getContent().initAs<Params>());
    bytes_ += to_bytes(message);
  }

  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  /// The pointer in hello's results: server, connection and build precede it.
  static constexpr std::uint16_t kSessionPointer = 3;

  capnp::rpc::Call::Builder begin(capnp::MallocMessageBuilder& message, std::uint64_t interface,
                                  std::uint16_t method) {
    auto call = message.initRoot<capnp::rpc::Message>().initCall();
    call.setQuestionId(question_++);
    call.setInterfaceId(interface);
    call.setMethodId(method);
    call.getSendResultsTo().setCaller();
    return call;
  }

  std::string bytes_;
  std::uint32_t question_ = 1;
  std::uint32_t hello_question_ = 0;
};

void write_connections(const fs::path& to) {
  fs::create_directories(to);
  constexpr unsigned char kWithPidfd = 2;
  capnp::MallocMessageBuilder bootstrap;
  bootstrap.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
  write(to / "bootstrap", 0, to_bytes(bootstrap));
  Conversation greeting;
  greeting.say_hello();
  write(to / "hello", kWithPidfd, greeting.bytes());
  write(to / "hello_in_two_parts", kWithPidfd | 1, greeting.bytes());

  Conversation life;
  const JobId job{.scheduler = {5, 6}, .number = 1};
  const Id128 token{7, 8};
  life.say_hello();
  life.call<wire::Registration>(0,
                                [](auto to_fill) { write_registration(registration(), to_fill); });
  life.call<wire::Session::AttachParams>(1, [](auto to_fill) { to_fill.setInstance("engine"); });
  life.call<wire::Session::ReserveParams>(7, [&](auto to_fill) {
    write_job(job, to_fill.initJob());
    write_keys(keys(5), 32, to_fill.initKeys());
  });
  life.call<wire::Session::PublishParams>(8,
                                          [&](auto to_fill) { write_job(job, to_fill.initJob()); });
  life.call<wire::Keys>(2, [](auto to_fill) { write_keys(keys(5), 32, to_fill); });
  life.call<wire::Session::ClaimParams>(3, [&](auto to_fill) {
    write_id(token, to_fill.initToken());
    write_keys(keys(5), 32, to_fill.initKeys());
  });
  life.call<wire::Session::OpenParams>(5, [&](auto to_fill) {
    write_id(token, to_fill.initToken());
    to_fill.setCount(5);
    to_fill.setPin(1);
  });
  life.call<wire::Session::ReleaseParams>(6, [](auto to_fill) { to_fill.setPin(1); });
  life.call<wire::Session::UnclaimParams>(
      4, [&](auto to_fill) { write_id(token, to_fill.initToken()); });
  write(to / "life", kWithPidfd, life.bytes());
  life.call<wire::Session::ResetCacheParams>(10, [](auto) {});
  life.call<wire::Session::AbandonParams>(9,
                                          [&](auto to_fill) { write_job(job, to_fill.initJob()); });
  life.call<wire::Session::GoodbyeParams>(11, [](auto) {});
  write(to / "whole_life", kWithPidfd | 4, life.bytes());
}

/// The requests of a node after it was admitted; see peer.cpp for the questions before.
class PeerQuestions {
 public:
  template <typename Params, typename Fill>
  void ask(std::uint16_t method, Fill fill) {
    capnp::MallocMessageBuilder message;
    fill(fuzz::call<Params>(message, number_++, capnp::typeId<wire::Peer>(), method, 2, true));
    bytes_ += to_bytes(message);
  }
  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
  std::uint32_t number_ = 3;
};

void write_peers(const fs::path& to) {
  fs::create_directories(to);
  constexpr unsigned char kGreeted = 2;
  const Bytes32 space = fuzz::space();
  const auto name = kj::arrayPtr(reinterpret_cast<const kj::byte*>(space.data()), space.size());
  capnp::MallocMessageBuilder bootstrap;
  bootstrap.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
  capnp::MallocMessageBuilder greet;
  auto greeting =
      fuzz::call<wire::PeerGate::GreetParams>(greet, 1, capnp::typeId<wire::PeerGate>(), 0, 0);
  greeting.setMinimum(kPeerWireMinimum);
  greeting.setMaximum(kPeerWireMaximum);
  greeting.setChallenge(name);
  capnp::MallocMessageBuilder enter;
  fuzz::call<wire::PeerGate::EnterParams>(enter, 2, capnp::typeId<wire::PeerGate>(), 1, 0)
      .setProof(name);
  write(to / "stranger", 0, to_bytes(bootstrap) + to_bytes(greet) + to_bytes(enter));

  PeerQuestions questions;
  questions.ask<wire::Peer::LocateParams>(0, [&](auto params) {
    params.setSpace(name);
    write_keys(fuzz::keys(8), BlockKey::kMaxBytes, params.initKeys());
  });
  write(to / "locate", kGreeted, questions.bytes());
  questions.ask<wire::Peer::LeaseParams>(1, [&](auto params) {
    params.setSpace(name);
    write_keys(fuzz::keys(8), BlockKey::kMaxBytes, params.initKeys());
    params.setMilliseconds(10000);
  });
  write(to / "lease", kGreeted, questions.bytes());
  questions.ask<wire::Peer::ReleaseParams>(2, [](auto params) { params.setLease(1); });
  write(to / "released", kGreeted, questions.bytes());
  questions.ask<wire::Peer::AwaitJobParams>(3, [](auto params) {
    write_job({.scheduler = {1, 1}, .number = 1}, params.initJob());
    params.setMilliseconds(100);
  });
  questions.ask<wire::Peer::AwaitJobParams>(3, [](auto params) {
    write_job({.scheduler = {5, 6}, .number = 9}, params.initJob());
    params.setMilliseconds(10000);
  });
  write(to / "whole_life", kGreeted | 4, questions.bytes());
}

}  // namespace
}  // namespace pegaflow

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_corpus DIRECTORY\n");
    return 1;
  }
  kj::EventLoop loop;  // Capabilities need an event loop, even if they are only written.
  kj::WaitScope scope(loop);
  pegaflow::write_messages(std::filesystem::path(argv[1]) / "message");
  pegaflow::write_connections(std::filesystem::path(argv[1]) / "connection");
  pegaflow::write_peers(std::filesystem::path(argv[1]) / "peer");
  return 0;
}
