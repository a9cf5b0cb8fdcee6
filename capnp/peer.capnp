@0xb6f04d1c92e7a358;
# The messages between the servers of two nodes over TCP. Control only: which blocks, where in the
# pool, how long; the bytes go over the fabric. docs/nodes.md explains the protocol.
#
# The rules are those of cache.capnp, and the versions are its own. A connection has a direction:
# the dialer sends requests, the answerer lends. Two servers that read from each other have two
# connections.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("pegaflow::wire");

using Cache = import "cache.capnp";

interface PeerGate {
  # The bootstrap of every connection between servers.

  greet @0 (
    minimum :UInt16,              # Versions of this schema that the dialer speaks.
    maximum :UInt16,
    node :Cache.Id128,            # Its incarnation.
    build :Text,                  # Program and version, for logs.
    challenge :Data,              # 32 random bytes, of this connection only.
    listen :Text,                 # HOST:PORT of the dialer's --peer-listen; empty: it has none. With
    dialed :Text,                 # the address that it dialed, this names the link. A link that
                                  # greets again replaces its older connection. Empty from nodes of
                                  # peer version 2 and older, whose connections end by themselves.
    features :UInt64) -> (        # Bits of the list below that the dialer implements; version 3.
    version :UInt16,              # The one that both now speak; 0 when refused.
    minimum :UInt16,
    maximum :UInt16,
    node :Cache.Id128,
    build :Text,
    challenge :Data,
    proof :Data,                  # That the answerer knows the secret; docs/nodes.md says of what.
    refused :Cache.Error,         # Set when version is 0.
    features :UInt64);            # Bits that the answerer implements; version 3.

  enter @1 (proof :Data) -> (     # That the dialer knows it. Once, after greet.
    peer :Peer,                   # Null when refused.
    fabric :Fabric,
    refused :Cache.Error,
    others :List(Fabric));        # Further lanes to the same pool, "ucx" beside "tcp": the dialer
                                  # uses the best one that it has, too.
}

# Features, by the bit in `greet`, for what a version alone does not decide; the rules are those of the
# list in cache.capnp. Versions 1 and 2 send 0.
#
#   0        watch
#   1 to 63  free; the next addition takes the lowest and is entered here and in docs/nodes.md

struct Epoch {
  # Which reset of a namespace came last in the cluster; docs/nodes.md. The greater counter is the
  # newer one, and of equal counters the greater id. Both 0: never reset.
  counter @0 :UInt64;             # Below 2^63.
  id @1 :UInt64;                  # Random.
}

struct Epochs {
  # All epochs that a node knows.
  of @0 :List(Entry);             # At most 1,024.
  floor @1 :Epoch;                # Of every namespace that is not listed.

  struct Entry {
    space @0 :Data;
    epoch @1 :Epoch;
  }
}

struct Fabric {
  # FabricDescriptor: how to reach the bytes of the answerer, in its present life.
  backend @0 :Text;
  incarnation @1 :Cache.Id128;
  address @2 :Data;               # In the format of the backend.
  regions @3 :List(Region);       # The first is the pool.

  struct Region {
    number @0 :UInt32;
    sizeBytes @1 :UInt64;
    key @2 :Data;                 # In the format of the backend.
  }
}

interface Peer {
  # The calls of a server that has proved itself. A namespace is named by the keyless BLAKE2b-256 of
  # its canonical factors and its page sizes, so that only equal ones meet; each node counts its
  # generations for itself.
  #
  # From version 3 on a question about a namespace names the epoch that the reader knows, and its
  # answer the one that the owner knows then. Each side retires its own blocks of the namespace when
  # it learns of a newer epoch. Blocks are found and lent only while both epochs are equal. Where the
  # other side speaks version 2 or older, only namespaces that were never reset are shared.

  locate @0 (space :Data, keys :Cache.Keys, epoch :Epoch) -> (sealed :UInt32, epoch :Epoch);
  # The length of the longest prefix that is here. Holds nothing. 0: the namespace is unknown here,
  # or has another epoch.

  lease @1 (space :Data, keys :Cache.Keys, milliseconds :UInt32, epoch :Epoch) -> (
    lease :UInt64,                # 0: nothing was lent.
    granted :UInt32,              # Milliseconds, from the arrival of the call; at most what was asked.
    pages :List(UInt32),          # Shard by shard of the first block, then of the second, and so on:
                                  # where the page begins in the pool, in units of 4 KiB.
    checksums :List(UInt64),      # XXH3-64, a page each, 0: none was taken; empty: of none of them.
    error :Cache.Error,           # kBusy: too much is lent. Set: nothing was lent.
    epoch :Epoch);
  # Lends the longest prefix that is here. The reader counts the time from before its call, and
  # discards bytes whose last read ended later than that, by CLOCK_BOOTTIME. From version 3 on it also
  # discards them unless `confirm`, sent after that read, is answered with true.

  release @2 (lease :UInt64) -> Cache.Done;
  # The reader no longer accesses these pages. Leases that are not released end by themselves, also
  # when the connection is lost: reads may still be in flight.

  awaitJob @3 (job :Cache.JobId, milliseconds :UInt32) -> Cache.Done;
  # From version 2 on. Answers when that job and all of its scheduler before it are over, as awaitJob
  # of cache.capnp does, and with the same errors: at the latest after that time, at most 10,000.

  confirm @4 (lease :UInt64) -> (held :Bool);
  # From version 3 on. Whether the pages of that lease have been kept in place until now, by the
  # owner's own clock: what was read before the question was sent is what was lent.

  exchange @5 Epochs -> Epochs;
  # From version 3 on. The dialer's first question: both nodes take the newer epoch of each
  # namespace. Before its answer the dialer sends no other request.

  reset @6 (space :Data, epoch :Epoch) -> (epoch :Epoch);
  # From version 3 on. Blocks of an older epoch are never found or lent again here once this is
  # answered. Answers the epoch that the node has then: this one, or a newer one.

  watch @7 (seen :UInt64, epochs :Epochs, milliseconds :UInt32) -> (changes :UInt64, epochs :Epochs);
  # With feature 0. How a node that cannot be dialed learns of a reset. The owner counts the changes of
  # its epochs in this life. `seen` is the count of which the dialer has all epochs, 0 at first. Answers
  # when the count is another one, or after that time, at most 10,000: the count, and if it is another
  # one all epochs. Null epochs are no news; those of the dialer are as in `exchange`.
}
