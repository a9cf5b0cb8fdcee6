@0xd3c1a5f07b2e4961;
# The messages between a client and the server of its node over the Unix socket. Control only: keys,
# slots and tokens; KV bytes go through the shared pool. docs/wire.md explains the protocol.
#
# Rules of the wire: expected outcomes are values in a union; an exception means that the connection
# is unusable. Fields are only added. Repeating a call under the same name changes nothing.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("pegaflow::wire");

struct Id128 {
  high @0 :UInt64;
  low @1 :UInt64;
}

struct Error {
  code @0 :UInt16;   # pegaflow::Errc, in its order; an unknown code counts as kInternal.
  detail @1 :Text;
}

struct Done {
  # The answer to a call that returns nothing.
  union {
    ok @0 :Void;
    error @1 :Error;
  }
}

struct JobsReached {
  # The answer to awaitJob. Older servers send Done, which has the same layout without `reached`.
  union {
    ok @0 :Void;
    error @1 :Error;
  }
  reached @2 :UInt64;
  # At the time of this answer, all jobs of the scheduler up to this number are over, or with `begun`
  # have begun. Also set with an error. 0: none, or the server does not know.
}

struct Keys {
  # Block keys in prompt order, back to back. At most 8,192 per call.
  keyBytes @0 :UInt8;   # 1 to 32.
  packed @1 :Data;      # A multiple of keyBytes.
  localUnits @2 :UInt32;
  # Only with several kinds of blocks: the count of leading units that the engine has itself.
  nodes @3 :List(Id128);
  # Of a lookup or claim: incarnations of nodes that a router believes to have the blocks, at most 8.
  # They are asked first, and the others only if these have nothing. Ignored with several kinds.
  noNodes @4 :Bool;
  # Of a lookup or claim: blocks of other nodes are not wanted; computing is faster.
  prefillNode @5 :Id128;
  # Of a lookup: the incarnation of the node of the engine that computes the prompt. Its workers'
  # offers count, too. Absent: only those of this node.
}

struct Kind {
  # One of several kinds of blocks of a namespace. A prompt is hashed in units: key i names the first
  # i + 1 units, and a block has the key of the unit that it ends with.
  rule @0 :Rule;
  tokens @1 :UInt32;              # trailing: the window without the next token. chunk: its length.
  blockTokens @2 :UInt32;         # A multiple of unitTokens, and a divisor of alignmentTokens.
  pageBytes @3 :UInt64;           # The size of a page of the rank's shard; 0: it has none, and neither
                                  # opens nor saves blocks of this kind.

  enum Rule {
    # The blocks that an engine needs to continue after n tokens.
    prefix @0;                    # All blocks of [0, n).
    trailing @1;                  # The blocks that cover [n - tokens, n).
    chunk @2;                     # The blocks from the last multiple of `tokens` up to n.
    state @3;                     # The one block that ends at n.
  }
}

struct Range {
  # Consecutive blocks of one kind, by their number from the beginning of the prompt.
  kind @0 :UInt8;
  first @1 :UInt32;
  count @2 :UInt32;
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

interface Guards {
  # Carries a memfd of a worker as its descriptor: an array of 64-bit words, its guards. A guard has
  # a value other than 0 while blocks of the worker may be read, and another one before the first
  # of them may change.
}

interface Exported {
  # Carries a socket of a worker as its descriptor, which holds the descriptors of allocations on a
  # GPU: one message with up to 253 sockets, each with one message with up to 253 descriptors. The
  # receiver takes them out and closes it; each reader gets a socket of its own.
}

struct Fabric {
  # FabricDescriptor: how to read the memory of a process of another node, for this life of it.
  backend @0 :Text;
  incarnation @1 :Id128;
  address @2 :Data;               # In the format of the backend.
  regions @3 :List(Region);

  struct Region {
    number @0 :UInt32;
    sizeBytes @1 :UInt64;
    key @2 :Data;                 # In the format of the backend.
  }
}

struct Segment {
  # One run of bytes that each block has, in the order of a page.
  base @0 :UInt64;                # Its address in block 0, in the worker's process.
  stride @1 :UInt64;              # From one block to the next.
  bytes @2 :UInt64;               # Its size in one block.
  handle @3 :Data;                # Of memory on a GPU, feature 5: CUDA's IPC handle of the allocation that
                                  # contains it, 64 bytes; base is then its offset in there. All segments
                                  # have one, or none. Empty: ordinary memory. With DirectMemory.ranges: 64
                                  # zeros, so that a client without feature 7 takes it for a GPU's.
  region @4 :UInt32;              # With DirectMemory.fabric: the number of the region that contains it,
  offset @5 :UInt64;              # and the place of block 0 in there.
  range @6 :UInt32;               # With DirectMemory.ranges: the number of the one that contains it; base is
                                  # its offset in there.
}

struct MappedRange {
  # Addresses of a GPU that consist of several allocations.
  sizes @0 :List(UInt64);         # Bytes of each, in the order of their addresses.
}

struct DirectMemory {
  # A worker's KV cache, for engines that read blocks before they are in the pool.
  group @0 :Text;                 # Only workers that name the same group read it. 1 to 64 bytes.
  blocks @1 :UInt64;
  segments @2 :List(Segment);     # At most 1,024.
  guards @3 :Guards;
  guardCount @4 :UInt32;
  fabric @5 :Fabric;              # For engines of other nodes, to which neither addresses nor capabilities are
                                  # sent. Absent: they do not read it.
  guardRegion @6 :UInt32;         # With fabric: the number of the region of the guards.
  ranges @7 :List(MappedRange);   # Feature 7. Memory on a GPU without IPC handles, as expandable segments:
                                  # at most 1,024 ranges, of at most 64,009 allocations,
  exported @8 :Exported;          # whose descriptors are in here, in this order.
  needsConsent @9 :Bool;          # Feature 8. Processes read this memory only after the worker's process has
                                  # permitted it, one at a time: `awaitReader`.
  readsWithoutConsent @10 :Bool;  # Feature 8. This worker may read such memory of others in any case.
}

struct Guard {
  # Of consecutive blocks.
  place @0 :UInt32;               # In the array of guards.
  value @1 :UInt64;               # The guard's value while they may be read.
  blocks @2 :UInt32;              # The count of blocks.
}

struct Hello {
  minimum @0 :UInt16;             # Versions of this schema that the client speaks.
  maximum @1 :UInt16;
  process @2 :Id128;              # The client's incarnation.
  previousConnection @3 :Id128;   # The id of its previous connection to the server; zero: none.
  quiesced @4 :Bool;              # All copies that began under that connection have ended.
  build @5 :Text;                 # Program and version, for logs.
  handle @6 :ProcessHandle;       # Absent for a client that only looks up.
  features @7 :UInt64;            # Bits of the list below that the client implements; version 4.
}

# Features, by the bit in `hello`, for what a version alone does not decide. Each side sets the bits
# that it implements, ignores unknown bits, and uses a feature only if the other side has set its
# bit. A bit is never given a second meaning. Versions 1 to 3 send 0.
#
#   0  notices: `describe` and `decline`
#   1  kinds: several kinds of blocks in a namespace
#   2  cells: blocks that engines of other tensor-parallel sizes share
#   3  chains: `reportChain`
#   4  direct: `openNext`, and blocks that an engine reads out of another engine's memory
#   5  pending: `ready`, and memory on GPUs
#   6  pools: `confirm`, and blocks that a worker reads out of the pool of another node
#   7  ranges: memory on GPUs that consists of several allocations
#   8  consent: `awaitReader`, and memory that one process at a time may read
#   9 to 63  free; the next addition takes the lowest and is entered here and in docs/wire.md

interface Gate {
  # The bootstrap of every connection.
  hello @0 Hello -> (
    version :UInt16,              # The version of this connection; 0 when refused.
    minimum :UInt16,              # The versions that the server speaks.
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
  stuck @1;                       # The node that holds the blocks does not answer.
  slow @2;                        # The blocks are predicted to arrive too late.
}

struct Factor {
  # One line of the canonical list of a namespace.
  name @0 :Text;
  value @1 :Text;
}

struct Registration {
  instance @0 :Text;              # The id of the engine core.
  rank @1 :UInt32;
  ranks @2 :UInt32;               # Tensor x pipeline parallel size.
  factors @3 :List(Factor);       # In canonical order. Equal lists name the same namespace.
  pageBytes @4 :UInt64;
  blockCount @5 :UInt64;          # Blocks in the engine's own cache, for /instances.
  shard @6 :UInt32;               # The shard of each block that this rank holds. Ranks with equal
  shards @7 :UInt32 = 1;            # bytes name the same shard, and the lowest of them saves.
  node @8 :Int32 = -1;            # NUMA node of its memory; -1: unknown.
  kinds @9 :List(Kind);           # Feature 1. Empty: one kind, of rule prefix, with pages of
                                  # pageBytes. Else pageBytes is 0. At most 16, equal for all ranks
                                  # of the instance except for the pageBytes of each.
  unitTokens @10 :UInt32;         # With kinds: the tokens of a unit,
  alignmentTokens @11 :UInt32;    # and of what every restored length is a multiple.
  cells @12 :UInt32;              # Feature 2. 0: this rank holds one shard. Else blocks are shared
                                  # with engines of other tensor-parallel sizes: this rank holds that
                                  # many consecutive shards, from `shard` on, and pageBytes is the size
                                  # of their pages together. Equal for all ranks of the instance, and a
                                  # divisor of shard and shards. Not together with kinds.
  direct @13 :DirectMemory;       # Feature 4. Absent: no engine reads this one's memory, and this one
                                  # reads none. Not together with kinds or cells.
  readsPools @14 :Bool;           # Feature 6. The worker reads blocks out of the pools of other nodes, through
                                  # the fabric of `direct`. Only with that.
  readsPoolsSlowly @15 :Bool;     # With readsPools: slower than into ordinary memory, so only if it is forced.
}

struct Engine {
  # The report of one side of an engine about itself, for /instances, metrics and `pegaflow doctor`.
  # It has no other effect. The engine's version is in Hello.build.

  device @0 :Text;                # Where the KV cache is: the GPU's name; empty: unknown.
  kernels @1 :Kernels;
  copyPath @2 :CopyPath;
  loads @3 :Bool = true;          # Whether this side is configured to load blocks, and to save them.
  saves @4 :Bool = true;

  enum Kernels {
    # Whether the client's build contains GPU kernels. Without them small pieces are copied slowly
    # and pages have no checksums.
    unknown @0;
    missing @1;
    present @2;
    notNeeded @3;                 # The KV cache is in ordinary memory.
  }

  enum CopyPath {
    unknown @0;
    host @1;                      # Between ordinary memory and the pool.
    direct @2;                    # The GPU's copy engine moves each piece of a page separately.
    staged @3;                    # Kernels gather a page in GPU memory; it is moved as a whole.
  }
}

enum Side {
  scheduler @0;
  worker @1;
}

enum DeclineReason {
  # Bounded, because the reason is a label of a metric. An unknown reason counts as other.
  other @0;
  configuration @1;               # An option of the connector is invalid.
  engine @2;                      # A setting or the version of the engine is not supported.
  model @3;                       # The kinds of KV cache of the model are not supported.
  weights @4;                     # The weights have no id.
  device @5;                      # The device or the arrangement of the KV cache is not supported.
  failure @6;                     # The connector failed and was disabled; the engine's log says why.
}

struct Decline {
  # The reason why an engine that is configured to use this cache does not use it.
  instance @0 :Text;
  side @1 :Side;
  rank @2 :UInt32;                # The worker's rank; ignored for a scheduler.
  reason @3 :DeclineReason;
  detail @4 :Text;                # One sentence; the server keeps the first 512 bytes.
}

interface Session {
  # The rights of one connection. A client is a worker (register), a scheduler (attach) or both.

  register @0 Registration -> (
    pool :Pool,
    poolBytes :UInt64,
    namespace :Text,              # Its display hash.
    refused :Error,               # Set when pool is null. kBusy: retry later.
    keptPool :Id128);             # The name of a pool that outlives this server: a client that has
                                  # this one mapped keeps its mapping. Absent: unmap at the end of the
                                  # connection.

  attach @1 (instance :Text, scheduler :Id128) -> Done;
  # The scheduler's side of an instance. Allowed before its ranks are connected. `scheduler` is the
  # first part of the ids of its jobs (JobId); without it they cannot be awaited.

  lookup @2 Keys -> (sealed :UInt32, complete :Bool, reachable :UInt32, offered :UInt32);
  # The length of the longest sealed prefix. Holds nothing. complete: all ranks are connected;
  # otherwise everything is a miss. From version 3 on, reachable: the number of blocks after that
  # prefix that one other node holds. With several kinds, sealed is the length of the longest
  # restorable prefix in units; 0: none beyond localUnits. The longest that is restorable with the
  # blocks of one other node is longer by `reachable` units. offered: the number of blocks after the
  # sealed prefix and the `reachable` ones that openNext finds in the memory of another engine;
  # feature 4.

  claim @3 (token :Id128, keys :Keys, computeDelayMicros :UInt32, computeBlockNanos :UInt32) -> (
    ready :UInt32, complete :Bool, error :Error, coming :UInt32,
    firstMicros :UInt32, lastMicros :UInt32, ranges :List(Range));
  # A claim on the longest sealed prefix that the limits allow. From version 3 on, coming: the number
  # of blocks after that prefix that are in flight from another node; the claim grows as they
  # arrive. ready 0 and coming 0: no claim was made.
  # With several kinds: a claim on the blocks that the longest restorable prefix needs, all of them
  # or none. `ranges` are its blocks. Its length is `ready` units if all of them are here, else
  # `coming` units, with `ready` 0; the time to compute a block is that of a unit.
  # From version 4 on, computeBlockNanos: the time in which the engine computes one block, beginning
  # computeDelayMicros from now. Blocks of another node are fetched only if they are predicted to
  # arrive before that. 0: unknown; every block that can be fetched is fetched. firstMicros and
  # lastMicros: the predicted time from this answer to the arrival of the first and of the last
  # block in flight; 0: unknown.

  unclaim @4 (token :Id128) -> Done;

  open @5 (token :Id128, first :UInt32, count :UInt32, pin :UInt64, patienceMs :UInt32,
           worthMicros :UInt32, computeMicros :UInt32, kind :UInt8, known :List(UInt64),
           throughPool :Bool) -> (
    slots :List(UInt32), error :Error,    # error set: no slots.
    checksums :List(UInt64),              # One per slot; 0: the page has none. Empty: no page has one.
    coming :UInt32,                       # The other blocks still in flight; open them again.
    late :Late,                           # Why the call stopped waiting for them.
    pages :List(UInt32), source :UInt64, fabric :Fabric);
  # Pins the blocks first .. first + count of the claim's range of that kind under a name that the
  # worker chose. The slots are those of the rank's own pages. A slot is the offset of a page in the
  # pool in units of 4 KiB.
  # From version 3 on there may be fewer slots than count: those of the blocks that have arrived, from
  # the first on. If none has arrived and some are in flight, the call waits for at most patienceMs
  # and then answers without slots and without a pin.
  # worthMicros: waiting is useful while the last of the blocks is predicted to arrive within this
  # time from now. 0xFFFFFFFF: wait as long as the node that sends them answers. 0, also sent by older
  # clients: wait for patienceMs in any case, as servers without this field do. If no block has
  # arrived and waiting is not useful, the call ends early, and `late` gives the reason.
  # computeMicros: the time in which the engine computes these blocks; 0: unknown. If several calls
  # wait for a node that does not answer, one of them ends first and each other one that much later,
  # unless the node answers by then: the engine computes one prompt at a time anyway.
  # pages: with feature 6, to a worker with readsPools, in place of slots: the blocks are in the pool of
  # another node, which keeps them there, and the worker reads them from these places, in units of 4 KiB.
  # Their bytes count only if `confirm` says so after the last read. source: the name of that pool, never
  # 0. fabric: how to read it; its first region is the pool. Absent for a source in `known`.
  # throughPool: no pages. Blocks that the worker was to read are fetched into the pool of this node.

  release @6 (pin :UInt64) -> Done;
  # All copies out of the pin have ended.

  reserve @7 (job :JobId, keys :Keys, first :UInt32, kind :UInt8, depths :Data,
              mayRefuse :Bool, blocks :List(UInt32), guard :UInt32, guardValue :UInt64,
              pending :Bool) -> (
    slots :List(UInt32), error :Error);
  # A job is of one kind, and the keys are those of its blocks.
  # One slot per key; 0xFFFFFFFF: skip the key. The first rank of an instance to call it decides each
  # key of the job for all ranks; the others get the same answer. `first` is the position of the first
  # key in the job. Each rank that called it ends the job with publish or abandon, even if all keys
  # are skipped.
  # depths: one byte per key: 1 + log2(1 + n), rounded down, where n is the number of blocks of the
  # kind before it in its prompt; 0: unknown. Empty, also from older clients: all are unknown. A
  # server that may not write all blocks to its disks prefers those near the start of a prompt.
  # mayRefuse: no other engine waits for these blocks, so a server whose eviction policy refuses saves
  # may skip keys to keep the blocks that it has. Older clients are never refused.
  # blocks, guard, guardValue: with feature 4, for a worker that has registered its memory: the blocks
  # that contain the keys, one per key, and the guard under which other engines may read them until the
  # job ends. guardValue 0: they may not. pending: with feature 5, their content is final only when the
  # worker calls `ready`, and until then they are not read.

  publish @8 (job :JobId, checksums :List(UInt64)) -> Done;
  # All copies into the rank's slots of the job have ended successfully. The last rank seals the
  # blocks. kGone: they were not sealed. checksums: XXH3-64 of each page, in the order of the slots of
  # reserve without the skipped keys; 0: the page has none. Empty, or as many as slots; with cells, one
  # for each cell of each slot. `open` returns one for each slot in any case.

  abandon @9 (job :JobId) -> Done;
  # All copies into the rank's slots of the job have ended; forget the blocks, on all ranks.

  resetCache @10 () -> (generation :UInt64, error :Error, unconfirmed :List(Text));
  # Blocks that the namespace holds now are never found again at this node and at all nodes that it
  # can reach. unconfirmed: the addresses of the peers that did not confirm it in time; this node does
  # not read their blocks of the namespace until they do. kGone until all ranks of the instance, which
  # give the page sizes, have been connected at the same time.

  goodbye @11 () -> Done;
  # All copies have ended, the pool is unmapped, and no further call follows.

  corrupt @12 (pin :UInt64, pages :List(UInt32)) -> Done;
  # The pages at these positions of the pin differ from what was saved: their blocks are never found
  # or opened again. Sent before release.

  journal @13 (space :UInt64, position :UInt64) -> (
    space :UInt64,                # The namespace's present generation; 0: it has none yet.
    position :UInt64,             # Pass it to the next call.
    lost :Bool,                   # Entries before these are missing: any block may be gone.
    more :Bool,                   # More entries follow: call again at once.
    keys :Data,                   # 32 bytes each, shorter keys padded with zeros.
    there :Data,                  # One byte per key: 1 the block was added, 0 it was removed.
    error :Error,
    kinds :Data);                 # One byte per key, its kind. Empty: all are of kind 0.
  # Which blocks of the namespace were added and removed, in order, since an earlier answer returned
  # this space and position. Position 0xFFFFFFFFFFFFFFFF: begin now; the answer has the present
  # position and no entries. lost is set, too, when the space differs, that is after a reset.

  awaitJob @14 (server :Id128, job :JobId, patienceMs :UInt32, begun :Bool) -> JobsReached;
  # From version 2 on. Answers when that job and all earlier jobs of its scheduler are over: sealed on
  # all shards, or dropped. kGone, at once or as soon as it is true: `server` is neither this one nor a
  # node that is connected to it (from version 3 on), the scheduler is not attached there, or a rank
  # of its instance is disconnected. kTimeout after patienceMs, at most 10,000. kBusy: too many calls
  # are waiting. kRefused: that node is too old. Whatever the answer, lookups find all sealed blocks.
  # begun: answers already when all ranks of the engine have reserved that job; feature 4. For an engine
  # of another node only if the caller's workers can read its memory, else kRefused. patienceMs 0: answers at once, so for a job far ahead with kTimeout and
  # `reached`.

  describe @15 Engine -> Done;
  # Feature 0. Sent by a worker or a scheduler once the values are known and again when they change.
  # Replaces the connection's earlier report. kInvalidArgument before register and attach.

  decline @16 Decline -> Done;
  # Feature 0. The engine is configured to use the cache and does not use it. The server shows this with
  # the reason until the connection ends or sends goodbye. Replaces an earlier one of this connection.
  # kInvalidArgument for a connection that has registered or attached; kBusy beyond 256 connections
  # that have declined.

  boundaries @17 Keys -> (restorable :Data, complete :Bool, error :Error);
  # Feature 1, with several kinds. Every length at which the prompt is restorable: bit i of byte
  # i / 8 is the length (i + 1) x alignmentTokens. Holds nothing.

  reportChain @18 (session :UInt64, keys :Data, blockTokens :UInt32) -> (wanted :Bool, error :Error);
  # Feature 3. Which blocks the prompt of one request has, for routers that read the journal over HTTP;
  # docs/router_api.md. session: XXH3-64 of the request's session id. keys: the low 64 bits of the
  # engine's hash of each full block of `blockTokens` tokens, 8 bytes each with the least significant
  # first, from the beginning of the prompt on, at most 8,192. With several kinds: those of the first
  # kind of rule prefix. It has no other effect. wanted: a router has read chains within a minute;
  # without one a client reports a chain at most once a second.

  openNext @19 (pin :UInt64, keys :Keys, patienceMs :UInt32, known :List(UInt64), poolOnly :Bool,
                node :Id128) -> (
    slots :List(UInt32),
    checksums :List(UInt64),
    blocks :List(UInt32),
    guards :List(Guard),
    source :UInt64,
    memory :DirectMemory,
    process :ProcessHandle,
    error :Error,
    gone :List(UInt64));
  # Feature 4. Pins the leading blocks of `keys`, a part of a prompt in its order, under a name that
  # the worker chose, without a claim. Either they are in the pool: `slots` and `checksums` are as those
  # of open. Or another worker of the same namespace, group and shard has them in its memory and is
  # about to save them: `blocks` are its blocks, and `guards` cover them in this order.
  # Their bytes count only if each guard still has its value after they were read, and the process is
  # alive then. If none of them has the first block, the call waits for at most patienceMs, at most 10,000,
  # and then answers kTimeout; release ends it with kCancelled.
  # source: the name of that worker's registration, never 0. memory and process, its pidfd, are absent
  # for a source in `known`. gone: those in `known` that have left. poolOnly: no other engine's memory.
  # node: the incarnation of the node of the engine that computes the prompt, if that may be another
  # one. Then the worker may be one of that node: `memory` has a fabric and no guards, and there is no
  # process. The reader reads the guards through the fabric, after the last block. Blocks in the pool
  # of that node are fetched into the pool of this one. Absent: this node.
  # The pin ends with release, after the last read.

  awaitReads @20 (job :JobId) -> Done;
  # Feature 4. Answers when no worker reads the blocks of a job of this worker that has ended, or after
  # 2 s. From the job's end on no further worker begins to.

  ready @21 (job :JobId) -> Done;
  # Feature 5. The content of the job's pending blocks is final. Nothing happens if the job has ended.

  confirm @22 (pin :UInt64) -> (held :Bool, error :Error);
  # Feature 6. Sent after the last read of a pin of `pages`: whether the other node has kept these pages in
  # place until now, and the namespace was not reset. Otherwise their bytes are not those of the blocks.

  awaitReader @23 (permitted :UInt64, refused :UInt64) -> (reader :UInt64, process :ProcessHandle, error :Error);
  # Feature 8. Of a worker whose memory needs consent, and that consents to the reading process of `permitted`,
  # the last answer's reader, and to no other one; 0: to none. Answers when it is to consent to another one
  # instead: `process` is its pidfd. reader 0: to none, as that one has left. refused: the last answer's
  # reader, if the worker cannot consent to it; it is not named again. kTimeout after 10 s. A
  # further call ends an earlier one, with kCancelled. kInvalidArgument: the memory of this connection
  # needs no consent.
}
