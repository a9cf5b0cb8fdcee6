#pragma once
/// \file
/// The seam between KJ's exceptions and our errors, on the RPC thread of the server.
///
/// Expected outcomes never cross it: they are values in the schema. What does cross: garbage from a
/// peer (KJ throws, the connection ends) and our own refusal to go on with a connection.

#include <kj/exception.h>

#include "base/error.h"

namespace pegaflow {

/// What KJ said, as an error: a lost connection is kPeerLost, overload kBusy, the rest kInternal.
Error error_from(const kj::Exception& exception);

/// An exception that ends the connection it is thrown on; the peer reads `error` as the reason.
kj::Exception to_exception(const Error& error);

}  // namespace pegaflow
