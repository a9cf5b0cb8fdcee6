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
    listen :Text,                 # HOST:PORT of the dialer's --peer-listen; empty: not set.
    dialed :Text,                 # The address that the dialer used. Both together name the link; a
                                  # link that greets again replaces its older connection. Empty from
                                  # peer version 2 and older, whose connections end by themselves.
    features :UInt64) -> (        # Bits of the list below that the dialer implements; version 3.
    version :UInt16,              # The version of this connection; 0 when refused.
    minimum :UInt16,
    maximum :UInt16,
    node :Cache.Id128,
    build :Text,
    challenge :Data,
    proof :Data,                  # The answerer's proof that it knows the secret; see docs/nodes.md.
    refused :Cache.Error,         # Set when version is 0.
    features :UInt64);            # Bits that the answerer implements; version 3.

  enter @1 (proof :Data) -> (     # The dialer's proof. Once, after greet.
    peer :Peer,                   # Null when refused.
    fabric :Cache.Fabric,         # How to read the pool, which is the first region.
    refused :Cache.Error,
    others :List(Cache.Fabric));  # Further lanes to the same pool, "ucx" beside "tcp". The dialer uses
                                  # the best lane that both nodes have.
}

# Features, by the bit in `greet`, for what a version alone does not decide; the rules are those of the
# list in cache.capnp. Versions 1 and 2 send 0.
#
#   0        watch
#   1        locateEach
#   2        disks: `locate`, `locateEach` and `lease` also count blocks that are only on the owner's disks
#   3        direct: `begun`, `offered`, `openNext` and `endRead`
#   4 to 63  free; the next addition takes the lowest and is entered here and in docs/nodes.md

struct Epoch {
  # The latest reset of a namespace in the cluster; see docs/nodes.md. The greater counter is newer;
  # for equal counters, the greater id. Both 0: never reset.
  counter @0 :UInt64;             # Below 2^63.
  id @1 :UInt64;                  # Random.
}

struct Epochs {
  # All epochs known to a node.
  of @0 :List(Entry);             # At most 1,024.
  floor @1 :Epoch;                # The epoch of every namespace that is not listed.

  struct Entry {
    space @0 :Data;
    epoch @1 :Epoch;
  }
}

struct OnDisks {
  # Blocks that are on disks of the owner and not in its pool, and when they will be there.
  blocks @0 :UInt32;
  bytesPerSecond @1 :UInt64;      # The recent rate of its disks; 0: unknown.
  queuedBytes @2 :UInt64;         # Bytes that its disks read before those blocks.
}

interface Peer {
  # The calls available to an authenticated server. The name of a namespace is the keyless BLAKE2b-256
  # of its canonical factors and its page sizes, so only equal ones match. Each node has generation
  # numbers of its own.
  #
  # From version 3 on a request about a namespace contains the reader's epoch, and the answer contains
  # the owner's. Each side retires its own blocks of the namespace when it receives a newer epoch.
  # Blocks are found and lent only while both epochs are equal. With a node of version 2 or older,
  # only namespaces that were never reset are shared.

  locate @0 (space :Data, keys :Cache.Keys, epoch :Epoch) -> (
    sealed :UInt32,
    epoch :Epoch,
    onDisks :OnDisks);            # With feature 2: those of the prefix that are only on disks.
  # The length of the longest prefix that this node holds, with feature 2 in its pool or on its disks.
  # Holds nothing for the caller. 0: the namespace is unknown here, or has another epoch.

  lease @1 (
    space :Data,
    keys :Cache.Keys,
    milliseconds :UInt32,
    epoch :Epoch,
    staging :UInt64,              # If not 0: the next blocks of that staging, in place of keys.
    patience :UInt32) -> (        # Milliseconds to wait for them, at most 1,000.
    lease :UInt64,                # 0: nothing was lent.
    granted :UInt32,              # Milliseconds from the arrival of the call; at most the request's.
    pages :List(UInt32),          # The offset of each page in the pool in units of 4 KiB: all shards
                                  # of the first block, then of the second, and so on.
    checksums :List(UInt64),      # XXH3-64, one per page; 0: the page has none. Empty: no page has one.
    error :Cache.Error,           # If set, nothing was lent. kBusy: too much is lent already.
    epoch :Epoch,
    pending :OnDisks,             # With feature 2: the blocks behind `pages` that follow from disks.
    staging :UInt64);             # The number to request them with; 0: none is pending.
  # Lends the longest prefix that this node holds. The reader's time runs from before its call, by
  # CLOCK_BOOTTIME; it discards bytes whose last read ended after that time. From version 3 on it also
  # discards them unless `confirm`, sent after that read, is answered with true.
  #
  # With feature 2 the owner also *stages* the next blocks of the prefix, if they are on its disks: it
  # reads them into its pool, and keeps them there until they are lent by a further request, or until
  # the reader ends the staging, sends no request for a second, or is disconnected.

  release @2 (
    lease :UInt64,                # 0: none.
    staging :UInt64               # A staging that the reader ends; 0: none.
    ) -> Cache.Done;
  # The reader no longer accesses these pages. A lease that is not released ends when its time is over,
  # even if the connection is lost, because reads may still be in flight.

  awaitJob @3 (job :Cache.JobId, milliseconds :UInt32, begun :Bool) -> Cache.JobsReached;
  # From version 2 on. Answers when that job and all earlier jobs of its scheduler are over, as
  # awaitJob of cache.capnp does, with the same errors, or after that time, at most 10,000. begun: with
  # feature 3.

  confirm @4 (lease :UInt64) -> (held :Bool);
  # From version 3 on. Whether the pages of that lease have been kept in place until now, by the
  # owner's own clock. If so, the bytes that were read before this call was sent are those lent.

  exchange @5 Epochs -> Epochs;
  # From version 3 on. The dialer's first request: both nodes adopt the newer epoch of each namespace.
  # The dialer sends no other request before the answer.

  reset @6 (space :Data, epoch :Epoch) -> (epoch :Epoch);
  # From version 3 on. After the answer, blocks of an older epoch are never found or lent again at this
  # node. The answer is the node's epoch then: this one, or a newer one.

  watch @7 (seen :UInt64, epochs :Epochs, milliseconds :UInt32) -> (changes :UInt64, epochs :Epochs);
  # With feature 0. Reports resets to a node that cannot be dialed. The owner counts the changes of its
  # epochs since its start. `seen` is the count up to which the dialer has all epochs, 0 at first.
  # Answers when the count differs, with the count and all epochs, or after that time, at most 10,000,
  # with null epochs. The dialer's epochs are as in `exchange`.

  locateEach @8 (space :Data, keys :Cache.Keys, epoch :Epoch) -> (
    present :Data,
    epoch :Epoch,
    onDisks :OnDisks);            # With feature 2: those of them that are only on disks.
  # With feature 1. Which of the blocks this node holds: bit i % 8 of byte i / 8 stands for key i, and
  # bytes of 0 at the end may be left out. Otherwise as `locate`.

  offered @9 (space :Data, keys :Cache.Keys, epoch :Epoch, readers :List(Worker)) -> (
    sealed :UInt32,
    offered :UInt32,
    epoch :Epoch);
  # With feature 3. The length of the longest prefix that is in the pool of this node, and the number of
  # blocks after it that each of the readers could begin to read out of the memory of a worker of this
  # node. Holds nothing.

  openNext @10 (space :Data, keys :Cache.Keys, epoch :Epoch, reader :Worker, read :UInt64,
                milliseconds :UInt32, known :List(UInt64), poolOnly :Bool) -> (
    blocks :List(UInt32),
    guards :List(Cache.Guard),
    source :UInt64,
    memory :Cache.DirectMemory,   # With a fabric, without addresses and capabilities.
    sealed :UInt32,
    gone :List(UInt64),
    error :Cache.Error,
    epoch :Epoch);
  # With feature 3. As openNext of cache.capnp, for a worker of the dialer's node, under a name that the
  # dialer chose. If a worker of this node offers the first key, and its memory can be read from other
  # nodes, the reader may read `blocks` until `endRead`; not with poolOnly. Else `sealed` is the number of leading keys
  # that are in the pool of this node, where they can be leased. If there is neither, the call waits for
  # at most that time, at most 10,000, and is then answered without both; endRead ends it at once.

  endRead @11 (read :UInt64) -> ();
  # The reader has ended its reads under this name, or does not want them any longer.

  struct Worker {
    # A worker of the dialer's node that reads memory of workers.
    group @0 :Text;
    shard @1 :UInt32;
  }
}
