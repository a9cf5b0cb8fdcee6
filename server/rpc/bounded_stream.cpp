#include "server/rpc/bounded_stream.h"

#include <algorithm>
#include <utility>

#include <capnp/rpc.capnp.h>

#include "capnp/wire/rpc_error.h"

namespace pegaflow::server {

BoundedStream::BoundedStream(kj::AsyncCapabilityStream& stream, const Limits& limits,
                             kj::Function<void(const Error*)> on_end)
    : inner_(stream), limits_(limits), on_end_(kj::mv(on_end)) {}

kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> BoundedStream::tryReadMessage(
    kj::ArrayPtr<kj::AutoCloseFd> fd_space, capnp::ReaderOptions options,
    kj::ArrayPtr<capnp::word> scratch_space) {
  using MaybeMessage = kj::Maybe<capnp::MessageReaderAndFds>;
  // A message that announces more than this is refused by its first bytes, before memory is
  // allocated for it.
  options.traversalLimitInWords = is_greeted_ ? limits_.message_words : limits_.hello_words;
  return inner_.tryReadMessage(fd_space, options, scratch_space)
      .then(
          [this](MaybeMessage&& message) -> MaybeMessage {
            KJ_IF_MAYBE (arrived, message) {
              count(*arrived->reader);
            } else {
              ended(nullptr);
            }
            return kj::mv(message);
          },
          [this](kj::Exception&& problem) -> MaybeMessage {
            const Error error = error_from(problem);
            ended(error.code == Errc::kPeerLost ? nullptr : &error);
            kj::throwFatalException(kj::mv(problem));
          });
}

void BoundedStream::count(capnp::MessageReader& message) {
  const auto stop = [this](const Error& why) {
    ended(&why);
    kj::throwFatalException(to_exception(why));
  };
  switch (message.getRoot<capnp::rpc::Message>().which()) {
    case capnp::rpc::Message::CALL:
    case capnp::rpc::Message::BOOTSTRAP:
      ++questions_;
      break;
    case capnp::rpc::Message::FINISH:
      --questions_;
      break;
    default:
      break;
  }
  if (questions_ > limits_.questions) {
    stop(
        {.code = Errc::kBusy,
         .detail = fmt::format("more than {} calls at once on one connection", limits_.questions)});
  }
  if (queue_is_full()) stop(queue_error());
}

bool BoundedStream::queue_is_full() {
  KJ_IF_MAYBE (network, network_) {
    return network->getCurrentQueueSize() > limits_.queued_bytes;
  }
  return false;
}

Error BoundedStream::queue_error() const {
  return {
      .code = Errc::kBusy,
      .detail = fmt::format("more than {} bytes of answers wait to be read", limits_.queued_bytes)};
}

void BoundedStream::ended(const Error* why) {
  if (!std::exchange(has_ended_, true)) on_end_(why);
}

kj::Promise<void> BoundedStream::writeMessage(
    kj::ArrayPtr<const int> fds, kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments) {
  return inner_.writeMessage(fds, segments);
}

kj::Promise<void> BoundedStream::writeMessages(
    kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) {
  return inner_.writeMessages(messages);
}

}  // namespace pegaflow::server
