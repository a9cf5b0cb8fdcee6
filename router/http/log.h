#pragma once
/// \file
/// The log of the code that pegaflow-router and pegaflow-index share.

#include "base/log.h"

namespace pegaflow::router {

/// Has the name of the program: pegaflow-index replaces it before threads start.
inline Log g_log{"router"};

}  // namespace pegaflow::router
