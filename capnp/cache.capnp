@0xd3c1a5f07b2e4961;
# The messages between a client and the server of its node over the Unix socket. Control only: keys,
# slots and tokens; KV bytes go through the shared pool. docs/wire.md explains the protocol.
#
# Rules of the wire: expected outcomes are values in a union; an exception means that the connection
# is unusable. Fields are only ever added. A call repeated under one name changes nothing.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("pegaflow::wire");

struct Id128 {
  high @0 :UInt64;
  low @1 :UInt64;
}

struct Error {
  code @0 :UInt16;   # pegaflow::Errc, in its order; an unknown one counts as kInternal.
  detail @1 :Text;
}

struct Done {
  # The answer to a call that returns nothing.
  union {
    ok @0 :Void;
    error @1 :Error;
  }
}

struct Keys {
  # Block keys in prompt order, back to back. At most 8,192 a call.
  keyBytes @0 :UInt8;   # 1 to 32.
  packed @1 :Data;      # A multiple of keyBytes.
}

struct JobId {
  scheduler @0 :Id128;
  number @1 :UInt64;
}

interface ProcessHandle {
  # Carries the client's own pidfd as its descriptor: readable once the process is gone.
}

interface Pool {
  # Carries the pool's memfd as its descriptor.
}

struct Hello {
  minimum @0 :UInt16;             # Versions of this schema that the client speaks.
  maximum @1 :UInt16;
  process @2 :Id128;              # The client's incarnation.
  previousConnection @3 :Id128;   # The id that the server gave its last connection; zero: none.
  quiesced @4 :Bool;              # All copies that began under that connection have ended.
  build @5 :Text;                 # Program and version, for logs.
  handle @6 :ProcessHandle;       # Absent for a client that only looks up.
  features @7 :UInt64;            # Bits of the list below that the client implements; version 4.
}

# Features, by the bit in `hello`, for what a version alone does not decide. Each side sets the bits
# that it implements, ignores bits that it does not know, and uses a feature only if the other side
# has set its bit. A bit is never given a second meaning. 0 is what versions 1 to 3 send.
#
#   0  notices: `describe` and `decline`
#   1 to 63  free; the next addition takes the lowest and is entered here and in docs/wire.md

interface Gate {
  # The bootstrap of every connection.
  hello @0 Hello -> (
    version :UInt16,              # The one that both now speak; 0 when refused.
    minimum :UInt16,              # What the server speaks.
    maximum :UInt16,
    server :Id128,                # Its incarnation.
    connection :Id128,
    build :Text,
    session :Session,             # Null when refused.
    refused :Error,               # Set when version is 0.
    features :UInt64);            # Bits that the server implements; version 4.
}

enum Late {
  no @0;
  stuck @1;                       # The node that has the blocks does not answer.
  slow @2;                        # They are predicted to arrive too late to be of use.
}

struct Factor {
  # One line of a namespace's canonical list.
  name @0 :Text;
  value @1 :Text;
}

struct Registration {
  instance @0 :Text;              # One engine core: the engine's id.
  rank @1 :UInt32;
  ranks @2 :UInt32;               # Tensor x pipeline parallel size.
  factors @3 :List(Factor);       # In canonical order; equal lists are one namespace.
  pageBytes @4 :UInt64;
  blockCount @5 :UInt64;          # Of the engine's cache, for /instances.
  shard @6 :UInt32;               # Which share of each block it holds; ranks with equal bytes name
  shards @7 :UInt32 = 1;            # one shard. The lowest of them saves.
  node @8 :Int32 = -1;            # NUMA node of its memory; -1: unknown.
}

struct Engine {
  # What one side of an engine reports about itself: for /instances, metrics and `pegaflow doctor`.
  # It changes nothing else. The engine's version is in Hello.build.

  device @0 :Text;                # Where the KV cache is: the GPU's name; empty: unknown.
  kernels @1 :Kernels;
  copyPath @2 :CopyPath;
  loads @3 :Bool = true;          # Whether this side is set up to load blocks, and to save them.
  saves @4 :Bool = true;

  enum Kernels {
    # Whether the client's build contains GPU kernels: without them small pieces are copied slowly
    # and pages get no checksums.
    unknown @0;
    missing @1;
    present @2;
    notNeeded @3;                 # The KV cache is in ordinary memory.
  }

  enum CopyPath {
    unknown @0;
    host @1;                      # Between ordinary memory and the pool.
    direct @2;                    # A GPU's copy engine moves each piece of a page by itself.
    staged @3;                    # Kernels gather pages in GPU memory, which are moved as a whole.
  }
}

enum Side {
  scheduler @0;
  worker @1;
}

enum DeclineReason {
  # Bounded, because it is a label of a metric. An unknown one counts as other.
  other @0;
  configuration @1;               # An option of the connector does not make sense.
  engine @2;                      # A setting or the version of the engine is not supported.
  model @3;                       # The kinds of KV cache of the model are not supported.
  weights @4;                     # The weights have no id.
  device @5;                      # The device or the arrangement of the KV cache is not supported.
  failure @6;                     # The connector failed and was disabled; the engine's log says why.
}

struct Decline {
  # Why an engine that is configured to use this cache does not use it.
  instance @0 :Text;
  side @1 :Side;
  rank @2 :UInt32;                # Of a worker.
  reason @3 :DeclineReason;
  detail @4 :Text;                # One sentence; the server keeps the first 512 bytes.
}

interface Session {
  # One connection's rights. A client is a worker (register), a scheduler (attach) or both.

  register @0 Registration -> (
    pool :Pool,
    poolBytes :UInt64,
    namespace :Text,              # Its display hash.
    refused :Error);              # Set when pool is null. kBusy: ask again later.

  attach @1 (instance :Text, scheduler :Id128) -> Done;
  # The scheduler's side of an instance. Allowed before its ranks are there. `scheduler` is what its
  # jobs are named after (JobId); none: they cannot be awaited.

  lookup @2 Keys -> (sealed :UInt32, complete :Bool, reachable :UInt32);
  # The length of the longest sealed prefix. Holds nothing. complete: all ranks are connected;
  # otherwise everything is a miss. From version 3 on, reachable: the count of further blocks,
  # behind those, that one other node has.

  claim @3 (token :Id128, keys :Keys, computeDelayMicros :UInt32, computeBlockNanos :UInt32) -> (
    ready :UInt32, complete :Bool, error :Error, coming :UInt32,
    firstMicros :UInt32, lastMicros :UInt32);
  # A claim on the longest sealed prefix that the limits allow. From version 3 on, coming: the count
  # of further blocks, behind those, that are in flight from another node; the claim grows as they
  # arrive. ready 0 and coming 0: no claim was made.
  # From version 4 on, computeBlockNanos: how long the engine computes one block, once it has begun
  # computeDelayMicros from now; blocks of another node are fetched only if they are predicted to
  # arrive sooner than that. 0: unknown, every block that can be fetched is. firstMicros and
  # lastMicros: when the first and the last coming block are predicted to arrive, from the answer
  # on; 0: unknown.

  unclaim @4 (token :Id128) -> Done;

  open @5 (token :Id128, first :UInt32, count :UInt32, pin :UInt64, patienceMs :UInt32,
           worthMicros :UInt32, computeMicros :UInt32) -> (
    slots :List(UInt32), error :Error,    # error set: no slots.
    checksums :List(UInt64),              # A slot each, 0: none was taken; empty: of none of them.
    coming :UInt32,                       # Of the others, how many may still come: open them again.
    late :Late);                          # Why the call did not wait for them any longer.
  # Pins the blocks first .. first + count of the claim under a name that the worker chose. The slots
  # are those of the rank's own pages. A slot is where its page begins in the pool, in units of 4 KiB.
  # From version 3 on there may be fewer slots than count: of those blocks, from the first on, that
  # are there. With none of them there, and some coming, the call waits for patienceMs at most, and
  # then answers with no slots; no pin was made.
  # worthMicros: waiting is of use while the last of the blocks is predicted to arrive within so much
  # time from now; 0xFFFFFFFF: however long that is, as long as the node that they come from answers;
  # 0, and what clients before this field send: for patienceMs, whatever happens. Servers before this
  # field wait for patienceMs. With no block there the call ends early where waiting is of no use, and
  # `late` says why.
  # computeMicros: how long the engine computes these blocks; 0: not known. Of several calls that wait
  # for a node that does not answer one ends first, and the others so much later, unless the node
  # answers again by then: the engine computes one prompt after the other anyway.

  release @6 (pin :UInt64) -> Done;
  # All copies out of the pin have ended.

  reserve @7 (job :JobId, keys :Keys, first :UInt32) -> (slots :List(UInt32), error :Error);
  # A slot a key, 0xFFFFFFFF: skip it. The first rank of an instance to ask decides each key of the
  # job for all of them, the others get the same answer; `first` is the place of the first key in the
  # job. Each rank that asked ends the job, with publish or abandon, even if all keys are skipped.

  publish @8 (job :JobId, checksums :List(UInt64)) -> Done;
  # All copies into the rank's slots of the job have ended and are whole. The last rank seals.
  # kGone: they were not sealed. checksums: XXH3-64 of each page, in the order of the slots that
  # reserve gave, without those to be skipped; 0: none was taken. Empty, or as many as slots.

  abandon @9 (job :JobId) -> Done;
  # All copies into the rank's slots of the job have ended; forget the blocks, on all ranks.

  resetCache @10 () -> (generation :UInt64, error :Error, unconfirmed :List(Text));
  # Nothing that the namespace holds now is ever found again, at this node and at all nodes that it
  # can reach. unconfirmed: the peers that did not confirm it in time, by address; this node does not
  # read their blocks of the namespace until they have. kGone while the ranks of the instance, which
  # give the sizes of the pages, have never been there together.

  goodbye @11 () -> Done;
  # All copies have ended, the pool is unmapped, nothing more will be asked.

  corrupt @12 (pin :UInt64, pages :List(UInt32)) -> Done;
  # These pages of the pin, by their place in it, are not what was saved: their blocks are never
  # found or opened again. Comes before release.

  journal @13 (space :UInt64, position :UInt64) -> (
    space :UInt64,                # What the namespace has now; 0: it has nothing yet.
    position :UInt64,             # Where to go on.
    lost :Bool,                   # Statements are missing before these: all may be gone.
    more :Bool,                   # There are more: ask again at once.
    keys :Data,                   # 32 bytes each, shorter keys padded with zeros.
    there :Data,                  # A byte for each key: 1 it is there, 0 it is gone.
    error :Error);
  # Which blocks of the namespace became findable and which ceased to be, in order, since an earlier
  # answer gave this space and this position. Position 0xFFFFFFFFFFFFFFFF: from now on, answers with
  # nothing but where that is. lost is set too when the space is another one, after a reset.

  awaitJob @14 (server :Id128, job :JobId, patienceMs :UInt32) -> Done;
  # From version 2 on. Answers when that job and all of its scheduler before it are over: sealed on
  # all shards, or dropped. kGone at once, or as soon as it is so: `server` is neither this one nor a
  # node that is connected to it (from version 3 on), the scheduler is not attached there, or a rank
  # of its instance is away. kTimeout after patienceMs, at most 10,000. kBusy: too many wait already.
  # kRefused: that node is too old. Whatever the answer, what is sealed is found by a lookup.

  describe @15 Engine -> Done;
  # Feature 0. Sent by a worker or a scheduler once it knows, and again when something has changed;
  # replaces what the connection reported before. kInvalidArgument before register and attach.

  decline @16 Decline -> Done;
  # Feature 0. The engine is configured to use the cache and does not: the server shows it, with the
  # reason, until the connection ends or says goodbye. Replaces an earlier one of this connection.
  # kInvalidArgument for a connection that has registered or attached; kBusy beyond 256 connections
  # that have declined.
}
