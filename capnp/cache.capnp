@0xd3c1a5f07b2e4961;
# What a client and a server of one node say to each other over the Unix socket. Control only: keys,
# slots and tokens; KV bytes go through the shared pool. docs/wire.md tells the story.
#
# Rules of the wire: expected outcomes are values in a union; an exception means that the connection
# is of no more use. Fields are only ever added. A call repeated under one name changes nothing.

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
}

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
    refused :Error);              # Set when version is 0.
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

interface Session {
  # One connection's rights. A client is a worker (register), a scheduler (attach) or both.

  register @0 Registration -> (
    pool :Pool,
    poolBytes :UInt64,
    namespace :Text,              # Its display hash.
    refused :Error);              # Set when pool is null. kBusy: ask again later.

  attach @1 (instance :Text, scheduler :Id128) -> Done;
  # The scheduler's side of an instance. Allowed before its ranks are there. `scheduler` is what its
  # jobs are named after (JobId); none: nobody can await them.

  lookup @2 Keys -> (sealed :UInt32, complete :Bool, reachable :UInt32);
  # How many, from the first on, are sealed. Holds nothing. complete: all ranks are connected;
  # otherwise everything is a miss. From version 3 on, reachable: how many more, behind those, one
  # other node has.

  claim @3 (token :Id128, keys :Keys) -> (ready :UInt32, complete :Bool, error :Error,
                                          coming :UInt32);
  # A claim on the longest sealed prefix that the limits allow. From version 3 on, coming: how many
  # more, behind those, are on their way from another node; the claim grows as they arrive. ready 0
  # and coming 0: no claim was made.

  unclaim @4 (token :Id128) -> Done;

  open @5 (token :Id128, first :UInt32, count :UInt32, pin :UInt64, patienceMs :UInt32) -> (
    slots :List(UInt32), error :Error,    # error set: no slots.
    checksums :List(UInt64),              # A slot each, 0: none was taken; empty: of none of them.
    coming :UInt32);                      # Of the others, how many may still come: open them again.
  # Pins the blocks first .. first + count of the claim under a name that the worker chose. The slots
  # are those of the rank's own pages. A slot is where its page begins in the pool, in units of 4 KiB.
  # From version 3 on there may be fewer slots than count: of those blocks, from the first on, that
  # are there. With none of them there, and some coming, the call waits for patienceMs at most, and
  # then answers with no slots; no pin was made.

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

  resetCache @10 () -> (generation :UInt64, error :Error);
  # Nothing that the namespace holds now is ever found again.

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
}
