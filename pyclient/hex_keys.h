#pragma once
/// \file
/// Block keys that engines pass as hexadecimal text.

#include <pybind11/pybind11.h>

namespace pegaflow::py_arguments {

/// Digests of 32 bytes, each a string of 64 hexadecimal digits in either case, as bytes back to
/// back. None unless `digests` is a sequence of such strings. With the GIL.
pybind11::object pack_hex_keys(const pybind11::object& digests);

}  // namespace pegaflow::py_arguments
