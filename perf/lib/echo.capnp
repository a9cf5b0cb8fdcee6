@0xb1d49c7a2e6f3058;
# The bound that a lookup is held against: the same bytes, through the same library and the same
# kind of socket, to a server that does nothing with them.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("pegaflow::echo");

struct Bytes {
  # The shape of the wire's Keys: a byte and a blob.
  keyBytes @0 :UInt8;
  packed @1 :Data;
}

interface Echo {
  count @0 Bytes -> (sealed :UInt32, complete :Bool);
  # The same request and the same answer as a lookup: for comparison.

  back @1 Bytes -> Bytes;
  # Sends all the bytes back: the bound.
}
