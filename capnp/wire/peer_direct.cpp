#include "capnp/wire/peer_direct.h"

#include <algorithm>

namespace pegaflow {

Result<PeerReader> read_reader(wire::Peer::Worker::Reader reader) {
  const auto group = reader.getGroup();
  if (group.size() == 0 || group.size() > kMaxGroupBytes) {
    return fail(Errc::kInvalidArgument,
                "the name of a direct group has {} bytes: 1 to {} are allowed", group.size(),
                kMaxGroupBytes);
  }
  return PeerReader{.group = std::string(group.begin(), group.size()), .shard = reader.getShard()};
}

void write_reader(const PeerReader& reader, wire::Peer::Worker::Builder builder) {
  builder.setGroup(reader.group.c_str());
  builder.setShard(reader.shard);
}

Result<std::vector<PeerReader>> read_readers(::capnp::List<wire::Peer::Worker>::Reader readers) {
  if (readers.size() > kMaxReaders) {
    return fail(Errc::kInvalidArgument, "{} readers: {} are the limit", readers.size(),
                kMaxReaders);
  }
  std::vector<PeerReader> all;
  for (const wire::Peer::Worker::Reader each : readers) {
    PEGA_TRY_LET(PeerReader reader, read_reader(each));
    all.push_back(std::move(reader));
  }
  return all;
}

Result<PeerQuestion> read_question(wire::Peer::OpenNextParams::Reader reader) {
  PeerQuestion question{
      .read = reader.getRead(),
      .patience = std::min(std::chrono::milliseconds(reader.getMilliseconds()), kLongestPeerOpen),
      .pool_only = reader.getPoolOnly()};
  PEGA_TRY_LET(question.reader, read_reader(reader.getReader()));
  PEGA_TRY_LET(question.known, read_numbers<std::uint64_t>(reader.getKnown()));
  return question;
}

void write_question(const PeerQuestion& question, wire::Peer::OpenNextParams::Builder builder) {
  write_reader(question.reader, builder.initReader());
  builder.setRead(question.read);
  builder.setMilliseconds(static_cast<std::uint32_t>(question.patience.count()));
  write_numbers(std::span<const std::uint64_t>(question.known),
                builder.initKnown(static_cast<unsigned>(question.known.size())));
  builder.setPoolOnly(question.pool_only);
}

Result<PeerPiece> read_piece(wire::Peer::OpenNextResults::Reader reader, std::size_t keys) {
  if (reader.hasError()) return tl::unexpected<Error>(read_error(reader.getError()));
  PeerPiece piece;
  PEGA_TRY_LET(piece.blocks, read_numbers<std::uint32_t>(reader.getBlocks()));
  PEGA_TRY_LET(piece.gone, read_numbers<std::uint64_t>(reader.getGone()));
  piece.source = reader.getSource();
  piece.sealed = reader.getSealed();
  std::uint64_t guarded = 0;
  for (const wire::Guard::Reader guard : reader.getGuards()) {
    piece.guards.push_back({guard.getPlace(), guard.getValue(), guard.getBlocks()});
    guarded += guard.getBlocks();
    if (guard.getBlocks() == 0 || guard.getValue() == 0) {
      return fail(Errc::kInternal, "guard {} of worker {} with value {} for {} blocks",
                  guard.getPlace(), piece.source, guard.getValue(), guard.getBlocks());
    }
  }
  if (piece.blocks.size() > keys || guarded != piece.blocks.size() || piece.sealed > keys ||
      (piece.source == 0) != piece.blocks.empty()) {
    return fail(Errc::kInternal, "{} blocks of worker {} under guards of {}, or {} sealed, of {}",
                piece.blocks.size(), piece.source, guarded, piece.sealed, keys);
  }
  if (!reader.hasMemory()) return piece;
  PEGA_TRY_LET(piece.memory, read_memory(reader.getMemory()));
  if (!piece.memory->network) {
    return fail(Errc::kInternal, "the memory of worker {} has no fabric", piece.source);
  }
  return piece;
}

void write_piece(const PeerPiece& piece, wire::Peer::OpenNextResults::Builder builder) {
  write_numbers(std::span<const std::uint32_t>(piece.blocks),
                builder.initBlocks(static_cast<unsigned>(piece.blocks.size())));
  write_numbers(std::span<const std::uint64_t>(piece.gone),
                builder.initGone(static_cast<unsigned>(piece.gone.size())));
  builder.setSource(piece.source);
  builder.setSealed(static_cast<std::uint32_t>(piece.sealed));
  auto guards = builder.initGuards(static_cast<unsigned>(piece.guards.size()));
  for (unsigned i = 0; i < guards.size(); ++i) {
    guards[i].setPlace(piece.guards[i].place);
    guards[i].setValue(piece.guards[i].value);
    guards[i].setBlocks(piece.guards[i].blocks);
  }
  if (piece.memory) write_memory(*piece.memory, builder.initMemory());
}

}  // namespace pegaflow
