#pragma once
/// \file
/// Gives a worker's device the network over which engines of other hosts read its blocks.

#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/page_layout.h"
#include "transport/device.h"

namespace pegaflow {

struct NetworkChoice {
  /// RDMA cards as `pegaflow-server --nics` names them, or "auto" alone; empty: no network.
  std::vector<std::string> nics{};
  std::string ucx_library{};  ///< The file of libucp; empty: the installed one.
};

/// A device with a network.
struct NetworkOfWorker {
  std::shared_ptr<Device> device;
  /// Whether its cards write to the memory of `device` nearly as fast as to ordinary memory.
  bool is_fast = true;
};

/// The device with a network, which lends the memory of `layout` as long as it lives.
/// Each card reads test memory of the device first, and one that fails is left out. For a GPU
/// "auto" means the cards that are nearest to it. Errors: kRefused for a device whose memory other
/// hosts cannot read, without a card or with none that reads it, and those of UcxFabric::create(),
/// NetworkDevice::create().
Result<NetworkOfWorker> with_network(std::shared_ptr<Device> device, const PageLayout& layout,
                                     const NetworkChoice& choice);

}  // namespace pegaflow
