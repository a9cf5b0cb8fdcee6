#pragma once
/// \file
/// Where KJ's exceptions become ours on the client's side.

#include <kj/exception.h>

#include "base/error.h"

namespace pegaflow {

/// What a call that ended in an exception means to us: kPeerLost when the connection is gone,
/// kInternal otherwise. Expected outcomes never come this way; they are values in the schema.
Error to_error(const kj::Exception& exception);

}  // namespace pegaflow
