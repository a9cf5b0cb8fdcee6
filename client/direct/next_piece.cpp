#include "client/direct/next_piece.h"

#include <algorithm>
#include <utility>

#include "base/os/unique_fd.h"
#include "capnp/wire/carried_descriptor.h"
#include "capnp/wire/codec.h"
#include "transport/device.h"

namespace pegaflow {
namespace {

/// The memory of an engine that the worker does not have yet.
struct NewSource {
  OfferedMemory memory;
  wire::Guards::Client guards;
  wire::ProcessHandle::Client process;
  wire::Exported::Client exported;  ///< Null without ranges.
};

struct Answer {
  NextPiece piece;
  kj::Maybe<kj::Own<NewSource>> added;
};

using Response = capnp::Response<wire::Session::OpenNextResults>;

Result<Answer> read_answer(Response& response) {
  Answer answer;
  NextPiece& piece = answer.piece;
  if (response.hasError()) {
    Error error = read_error(response.getError());
    piece.is_late = error.code == Errc::kTimeout;
    if (!piece.is_late) return tl::unexpected<Error>(std::move(error));
    return answer;
  }
  PEGA_TRY_LET(piece.slots, read_numbers<std::uint32_t>(response.getSlots()));
  PEGA_TRY_LET(piece.checksums, read_numbers<std::uint64_t>(response.getChecksums()));
  PEGA_TRY_LET(piece.blocks, read_numbers<std::uint32_t>(response.getBlocks()));
  PEGA_TRY_LET(piece.gone, read_numbers<std::uint64_t>(response.getGone()));
  if (piece.blocks.empty()) return answer;
  piece.source = response.getSource();
  const auto guards = response.getGuards();
  if (guards.size() > piece.blocks.size()) {
    return fail(Errc::kInternal, "{} guards for {} blocks", guards.size(), piece.blocks.size());
  }
  for (const wire::Guard::Reader guard : guards) {
    piece.guards.push_back({{guard.getPlace(), guard.getValue()}, guard.getBlocks()});
  }
  if (!response.hasMemory()) return answer;
  PEGA_TRY_LET(OfferedMemory memory, read_memory(response.getMemory()));
  answer.added =
      kj::heap<NewSource>(NewSource{std::move(memory), response.getMemory().getGuards(),
                                    response.getProcess(), response.getMemory().getExported()});
  return answer;
}

PeerMemory peer_memory(const OfferedMemory& offered) {
  PeerMemory memory{.segments = {}, .block_count = offered.blocks};
  for (const OfferedMemory::Segment& segment : offered.segments) {
    // Only the other process has it. NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* const base = reinterpret_cast<std::byte*>(segment.base);
    memory.segments.push_back({base, segment.stride, segment.bytes});
    if (segment.handle) memory.handles.push_back(*segment.handle);
  }
  if (!offered.ranges.empty()) {
    memory.mapped.emplace(MappedMemory{.ranges = offered.ranges});
    for (const OfferedMemory::Segment& segment : offered.segments) {
      memory.mapped->range_of.push_back(segment.range);
    }
  }
  if (!offered.network) return memory;
  memory.network.emplace(NetworkMemory{
      .fabric = offered.network->fabric, .segments = {}, .guards = offered.network->guards});
  for (const OfferedMemory::Segment& segment : offered.segments) {
    memory.network->segments.push_back({.region = segment.region, .offset = segment.offset});
  }
  return memory;
}

/// Takes the descriptors of a new engine and enters it.
kj::Promise<Result<NextPiece>> add_source(Sources& sources, NextPiece&& piece,
                                          kj::Own<NewSource>&& added,
                                          std::function<bool()>&& is_wanted) {
  if (added->memory.network) {
    Result<void> has =
        sources.add_far(piece.source, peer_memory(added->memory), added->memory.guards);
    if (!has) piece.unreadable = std::move(has.error());
    return Result<NextPiece>(std::move(piece));
  }
  auto asked = kj::heapArrayBuilder<kj::Promise<UniqueFd>>(3);
  asked.add(descriptor_of(added->guards));
  asked.add(descriptor_of(added->process));
  asked.add(added->memory.ranges.empty() ? kj::Promise<UniqueFd>(UniqueFd())
                                         : descriptor_of(added->exported));
  return kj::joinPromises(asked.finish())
      .then([&sources, piece = std::move(piece), added = kj::mv(added),
             is_wanted = std::move(is_wanted),
             period = sources.period()](kj::Array<UniqueFd>&& descriptors) mutable {
        if (sources.period() != period) {
          return Result<NextPiece>(fail(Errc::kPeerLost, "open_next: the connection was lost"));
        }
        if (!is_wanted()) {
          piece.unreadable = Error{Errc::kCancelled, "the load was given up"};
          return Result<NextPiece>(std::move(piece));
        }
        PeerMemory memory = peer_memory(added->memory);
        if (memory.mapped && !descriptors[2]) {
          // It may have them at the next attempt.
          piece.unreadable = Error{Errc::kGone, "the server sent no descriptors of the memory"};
          return Result<NextPiece>(std::move(piece));
        }
        if (memory.mapped) {
          memory.mapped->descriptors = std::make_shared<const UniqueFd>(std::move(descriptors[2]));
        }
        Result<void> has =
            sources.add(piece.source, std::move(memory), std::move(descriptors[1]),
                        descriptors[0].get(), added->memory.guards, added->memory.needs_consent);
        if (!has) piece.unreadable = std::move(has.error());
        return Result<NextPiece>(std::move(piece));
      });
}

}  // namespace

kj::Promise<Result<NextPiece>> ask_next(Link& link, Sources& sources, const NextQuestion& question,
                                        Duration deadline, std::function<bool()> is_wanted) {
  const std::vector<std::uint64_t> known = sources.known();
  auto request = link.session().openNextRequest(capnp::MessageSize{
      keys_words(question.keys.size(), BlockKey::kMaxBytes) + known.size() + 32, 0});
  request.setPin(question.pin);
  write_keys(question.keys, BlockKey::kMaxBytes, request.initKeys());
  request.setPatienceMs(static_cast<std::uint32_t>(
      std::chrono::ceil<std::chrono::milliseconds>(question.patience).count()));
  write_numbers(std::span(known), request.initKnown(static_cast<unsigned>(known.size())));
  request.setPoolOnly(question.pool_only);
  if (!question.node.is_none()) write_id(question.node, request.initNode());
  return link
      .call(kj::mv(request), question.patience + deadline, "open_next",
            [](auto& response) { return read_answer(response); })
      .then([&sources, is_wanted = std::move(is_wanted)](
                Result<Answer>&& answer) mutable -> kj::Promise<Result<NextPiece>> {
        if (!answer) return Result<NextPiece>(tl::unexpected<Error>(std::move(answer.error())));
        for (const std::uint64_t source : answer->piece.gone) {
          if (source != answer->piece.source) sources.forget(source);
        }
        KJ_IF_MAYBE (added, answer->added) {
          return add_source(sources, std::move(answer->piece), kj::mv(*added),
                            std::move(is_wanted));
        }
        return Result<NextPiece>(std::move(answer->piece));
      });
}

}  // namespace pegaflow
