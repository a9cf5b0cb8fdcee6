#pragma once
/// \file
/// Translates between KJ's exceptions and Error.
///
/// Expected outcomes are values in the schema and need no translation. These do: an invalid message
/// from a peer (KJ throws, the connection ends), and the decision of this side to end a connection.

#include <kj/exception.h>

#include "base/error.h"

namespace pegaflow {

/// The error for an exception: a lost connection is kPeerLost, overload kBusy, the rest kInternal.
Error error_from(const kj::Exception& exception);

/// An exception that ends the connection it is thrown on; the peer reads `error` as the reason.
kj::Exception to_exception(const Error& error);

}  // namespace pegaflow
