@0xb1d49c7a2e6f3058;
# The bound of a lookup: the same bytes, through the same library and the same kind of socket, to a
# server that does nothing with them.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("pegaflow::echo");

struct Bytes {
  # The shape of the wire's Keys: a byte and a blob.
  keyBytes @0 :UInt8;
  packed @1 :Data;
}

interface Echo {
  count @0 Bytes -> (sealed :UInt32, complete :Bool);
  # The request and the response of a lookup: for comparison.

  back @1 Bytes -> Bytes;
  # Returns all bytes: the bound.
}
