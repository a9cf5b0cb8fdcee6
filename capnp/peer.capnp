@0xb6f04d1c92e7a358;
# What the servers of two nodes say to each other over TCP. Control only: which blocks, where in the
# pool, how long; the bytes go over the fabric. docs/nodes.md tells the story.
#
# The rules are those of cache.capnp, and the versions are its own. A connection has a direction: who
# dials asks, who answers lends. Two servers that read from each other have two connections.

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
    challenge :Data) -> (         # 32 random bytes, of this connection only.
    version :UInt16,              # The one that both now speak; 0 when refused.
    minimum :UInt16,
    maximum :UInt16,
    node :Cache.Id128,
    build :Text,
    challenge :Data,
    proof :Data,                  # That the answerer knows the secret; docs/nodes.md says of what.
    refused :Cache.Error);        # Set when version is 0.

  enter @1 (proof :Data) -> (     # That the dialer knows it. Once, after greet.
    peer :Peer,                   # Null when refused.
    fabric :Fabric,
    refused :Cache.Error,
    others :List(Fabric));        # Further lanes to the same pool, "ucx" beside "tcp": the dialer
                                  # takes the one that it likes best of those that it has.
}

struct Fabric {
  # FabricDescriptor: how to reach the bytes of the one who answers, in its present life.
  backend @0 :Text;
  incarnation @1 :Cache.Id128;
  address @2 :Data;               # In the words of the backend.
  regions @3 :List(Region);       # The first is the pool.

  struct Region {
    number @0 :UInt32;
    sizeBytes @1 :UInt64;
    key @2 :Data;                 # In the words of the backend.
  }
}

interface Peer {
  # What a server that has proved itself may ask. A namespace is named by the keyless BLAKE2b-256 of
  # its canonical factors and its page sizes, so that only equal ones meet; each node counts its
  # generations for itself.

  locate @0 (space :Data, keys :Cache.Keys) -> (sealed :UInt32);
  # How many, from the first on, are here. Holds nothing. A namespace that nobody has here: 0.

  lease @1 (space :Data, keys :Cache.Keys, milliseconds :UInt32) -> (
    lease :UInt64,                # 0: nothing was lent.
    granted :UInt32,              # Milliseconds, from the arrival of the call; at most what was asked.
    pages :List(UInt32),          # Shard by shard of the first block, then of the second, and so on:
                                  # where the page begins in the pool, in units of 4 KiB.
    checksums :List(UInt64),      # XXH3-64, a page each, 0: none was taken; empty: of none of them.
    error :Cache.Error);          # kBusy: too much is lent. Set: nothing was lent.
  # Lends the longest prefix that is here. The reader counts the time from before its call, and lets
  # go of bytes whose last read ended later than that, by CLOCK_BOOTTIME.

  release @2 (lease :UInt64) -> Cache.Done;
  # The reader touches these pages no more. Leases that nobody releases end by themselves, also when
  # the connection is lost: reads may still be under way.

  awaitJob @3 (job :Cache.JobId, milliseconds :UInt32) -> Cache.Done;
  # From version 2 on. Answers when that job and all of its scheduler before it are over, as awaitJob
  # of cache.capnp does, and with the same errors: at the latest after that time, at most 10,000.
}
