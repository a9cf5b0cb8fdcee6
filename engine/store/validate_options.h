#pragma once
/// \file
/// The ranges of the store's options.

#include "base/error.h"
#include "engine/block_store.h"

namespace pegaflow::engine {

/// Errors: kInvalidArgument for the first option that is out of its range.
Result<void> validate_options(const BlockStore::Options& options);

}  // namespace pegaflow::engine
