#pragma once
/// \file
/// Translates the messages of peer.capnp about blocks in the memory of workers: the only place that
/// knows both. Thread-safe: no state.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "capnp/peer.capnp.h"
#include "capnp/wire/codec.h"

namespace pegaflow {

/// A worker that reads the memory of workers of another node.
struct PeerReader {
  std::string group;  ///< Only memory of this group.
  std::uint32_t shard = 0;
};
/// Errors: kInvalidArgument for a group's name that is empty or longer than kMaxGroupBytes.
Result<PeerReader> read_reader(wire::Peer::Worker::Reader reader);
void write_reader(const PeerReader& reader, wire::Peer::Worker::Builder builder);
/// Errors: those of read_reader(); kInvalidArgument for more than kMaxReaders.
Result<std::vector<PeerReader>> read_readers(::capnp::List<wire::Peer::Worker>::Reader readers);
/// Limit of the ranks of an engine.
inline constexpr unsigned kMaxReaders = 1024;

/// The arguments of openNext, without the namespace and the keys.
struct PeerQuestion {
  PeerReader reader{};
  std::uint64_t read = 0;  ///< The name of the read, which the reader's node chose.
  std::chrono::milliseconds patience{};
  std::vector<std::uint64_t> known{};  ///< Workers whose memory the reader's node knows.
  bool pool_only = false;
};
/// Cuts the patience to kLongestPeerOpen. Errors: those of read_reader() and read_numbers().
Result<PeerQuestion> read_question(wire::Peer::OpenNextParams::Reader reader);
void write_question(const PeerQuestion& question, wire::Peer::OpenNextParams::Builder builder);
/// The longest wait of an openNext.
inline constexpr std::chrono::milliseconds kLongestPeerOpen{10'000};

/// The blocks that a worker of another node may begin to read.
struct PeerPiece {
  struct Guard {
    std::uint32_t place = 0;
    std::uint64_t value = 0;
    std::uint32_t blocks = 0;
  };
  std::vector<std::uint32_t> blocks{};    ///< Those of `source`; empty: none is offered.
  std::vector<Guard> guards{};            ///< They cover the blocks, in this order.
  std::uint64_t source = 0;               ///< The owner's name for the worker that has them.
  std::optional<OfferedMemory> memory{};  ///< Its memory, unless the reader knows it.
  std::size_t sealed = 0;                 ///< Without blocks: leading keys in the owner's pool.
  std::vector<std::uint64_t> gone{};      ///< Workers that the reader knows and that have left.
};
/// Errors: the owner's; those of read_memory() and read_numbers(); kInternal for guards that are
/// closed or empty or do not cover the blocks, for more blocks than the `keys` that were asked for,
/// and for memory without a fabric.
Result<PeerPiece> read_piece(wire::Peer::OpenNextResults::Reader reader, std::size_t keys);
void write_piece(const PeerPiece& piece, wire::Peer::OpenNextResults::Builder builder);

/// A prompt's blocks at another node.
struct PeerOffer {
  std::size_t sealed = 0;   ///< The longest prefix in its pool, and
  std::size_t offered = 0;  ///< the blocks after it that its workers offer.
};

}  // namespace pegaflow
