#pragma once
/// \file
/// The counters and the time of one call.

#include <cstddef>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "server/rpc/rpc_counters.h"
#include "server/rpc/session_context.h"

namespace pegaflow::server {

inline constexpr Log kRpcLog{"rpc"};

/// Counts one call and its duration once it is answered.
class Measured {
 public:
  Measured(SessionContext& context, Method method)
      : context_(context), method_(method), begin_(context.clock.now()) {}

  void ok() const {
    RpcCounters::PerMethod& counters = context_.counters.of(method_);
    ++counters.ok;
    counters.duration.record(context_.clock.now() - begin_);
  }
  void failed(const Error& error) const {
    RpcCounters::PerMethod& counters = context_.counters.of(method_);
    ++counters.failed[static_cast<std::size_t>(error.code)];
    counters.duration.record(context_.clock.now() - begin_);
    kRpcLog.debug("call failed method={} error=\"{}\"", to_string(method_), to_string(error));
  }
  template <typename T>
  void ended(const Result<T>& result) const {
    result ? ok() : failed(result.error());
  }

 private:
  SessionContext& context_;
  Method method_;
  TimePoint begin_;
};

}  // namespace pegaflow::server
