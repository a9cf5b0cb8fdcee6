#pragma once
/// \file
/// The results of simulated placement, as figures and as a table.

#include <string>
#include <vector>

#include "perf/lib/figures.h"
#include "perf/placement/place_arms.h"

namespace pegaflow::perf {

/// The figures of all policies; those of PegaFlow's stand beside the bounds of the same run: the
/// shared cache, round robin, Dynamo's cost, shortest queue with pulls.
Result<std::vector<Figure>> place_figures(const PlaceOutcome& outcome, const PlaceOptions& options);

/// A row for each policy, and its parameters below.
Result<std::string> place_table(const PlaceOutcome& outcome, const PlaceOptions& options);

}  // namespace pegaflow::perf
