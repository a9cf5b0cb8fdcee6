#include "transport/ucx/worker.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "transport/ucx/ucx_error.h"

namespace pegaflow::ucx {
namespace {

constexpr Log kLog{"ucx"};
constexpr unsigned kMessageId = 1;
/// Limits one poll, so that neither a flood of events nor a busy peer starves the thread's other
/// work.
constexpr int kMostRounds = 64;

struct Setting {
  const char* name;
  const char* value;
};

/// A dead peer is detected within some 0.8 s (7 x 100 ms, in steps of InfiniBand's timer); UCX's
/// default is 7 s. Six retries, since Soft-RoCE takes seven as "no limit".
constexpr Setting kCard[] = {
    {"RC_TIMEOUT", "100ms"}, {"RC_RETRY_COUNT", "6"}, {"KEEPALIVE_INTERVAL", "1s"}};
/// A GET that the card cannot execute must fail instead of being emulated. From 1.21 on.
constexpr Setting kNoEmulation = {"PROTO_EMULATION_ENABLE", "n"};
/// UCX's transports: over a card, and for tests over sockets, where our own timeouts find holes in
/// the network (Options::stall_timeout). With memory of a GPU also cuda_copy, which detects it and
/// copies it where a network does not. Never cuda_ipc: it costs 20 times as much for each read as a
/// card (vllm#55434), and maps the memory of other processes until this one ends (ucx#11753).
constexpr const char* kTransports[2][2] = {{"rc,ud:aux", "rc,ud:aux,cuda_copy"},
                                           {"tcp", "tcp,cuda_copy"}};
constexpr Setting kBoth[] = {{"RNDV_THRESH", "inf"}};
/// The dealer distributes bytes to cards itself; up to 1.13 UCX never uses two.
constexpr Setting kOneRail = {"MAX_RMA_RAILS", "1"};
/// 1.13 has it, but a program cannot set it.
constexpr Setting kRelaxed = {"IB_PCI_RELAXED_ORDERING", "try"};

void set(const UcpApi& api, ucp_config_t* config, const Setting& setting) {
  if (std::getenv((std::string("UCX_") + setting.name).c_str()) != nullptr) return;
  const ucs_status_t status = api.config_modify(config, setting.name, setting.value);
  if (status != UCS_OK) {
    kLog.debug("UCX rejected a setting name={} value={} reason={}", setting.name, setting.value,
               api.status_string(status));
  }
}

/// An outgoing message, with its payload.
struct Sending {
  const UcpApi* api;
  std::vector<std::byte> bytes;

  static void on_sent(void* request, ucs_status_t, void* self) {
    auto* const sending = static_cast<Sending*>(self);
    sending->api->request_free(request);
    delete sending;
  }
};

}  // namespace

// ---- context

Result<std::unique_ptr<Context>> Context::open(const UcpApi& api, const Options& options) {
  ucp_config_t* config = nullptr;
  ucs_status_t status = api.config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return fail_ucx(api, status, "read UCX's configuration");
  set(api, config, {"NET_DEVICES", options.device.c_str()});
  for (const Setting& setting : kBoth) set(api, config, setting);
  if (api.version() >= 1014) set(api, config, kOneRail);
  set(api, config, {"TLS", kTransports[options.sockets ? 1 : 0][options.gpu ? 1 : 0]});
  if (!options.sockets) {
    for (const Setting& setting : kCard) set(api, config, setting);
    if (api.version() >= 1014) set(api, config, kRelaxed);
    if (api.version() >= 1021) set(api, config, kNoEmulation);
  }
  ucp_params_t parameters{};
  parameters.field_mask =
      UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
  parameters.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  parameters.name = "pegaflow";
  parameters.estimated_num_eps = options.peers;
  ucp_context_h context = nullptr;
  status = api.init_version(UCP_API_MAJOR, UCP_API_MINOR, &parameters, config, &context);
  api.config_release(config);
  if (status != UCS_OK) return fail_ucx(api, status, "open " + options.device + " with UCX");
  return std::unique_ptr<Context>(new Context(api, context));
}

Context::~Context() { api_.cleanup(context_); }

Result<void> Context::check_kind(MemoryKind kind) const {
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  const ucs_status_t status = api_.context_query(context_, &attributes);
  if (status != UCS_OK) return fail_ucx(api_, status, "list the kinds of memory that UCX supports");
  if ((attributes.memory_types & (std::uint64_t{1} << ucx_type(kind))) != 0) {
    if (kind != MemoryKind::kCuda || api_.version() >= 1021) return {};
    return fail(Errc::kRefused,
                "UCX {} at {} registers a part of an allocation of a GPU at a wrong place: name "
                "version 1.21 or newer with PEGA_UCX_LIBRARY",
                api_.get_version_string(), api_.file);
  }
  return fail(Errc::kRefused,
              "UCX {} at {} has no CUDA support on this machine: name one that has it with "
              "--ucx-library or PEGA_UCX_LIBRARY",
              api_.get_version_string(), api_.file);
}

Result<ucp_mem_h> Context::map(const Memory& memory) {
  ucp_mem_map_params_t parameters{};
  parameters.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                          UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  parameters.address = memory.base;
  parameters.length = memory.bytes;
  parameters.memory_type = ucx_type(memory.kind);
  ucp_mem_h handle = nullptr;
  const ucs_status_t status = api_.mem_map(context_, &parameters, &handle);
  if (status == UCS_OK) return handle;
  const char* const remedy = memory.kind == MemoryKind::kCuda
                                 ? "can the card reach GPU memory, by dma-buf or nvidia_peermem?"
                                 : "is RLIMIT_MEMLOCK large enough?";
  return fail_ucx(api_, status,
                  fmt::format("register {} bytes with the card ({})", memory.bytes, remedy));
}

void Context::unmap(ucp_mem_h handle) { (void)api_.mem_unmap(context_, handle); }

Result<std::vector<std::byte>> Context::pack_key(ucp_mem_h handle) {
  void* packed = nullptr;
  std::size_t size = 0;
  const ucs_status_t status = api_.rkey_pack(context_, handle, &packed, &size);
  if (status != UCS_OK) return fail_ucx(api_, status, "pack a region's key");
  const auto* const begin = static_cast<const std::byte*>(packed);
  std::vector<std::byte> key(begin, begin + size);
  api_.rkey_buffer_release(packed);
  return key;
}

// ---- worker

Result<std::unique_ptr<Worker>> Worker::create(Context& context) {
  const UcpApi& api = context.api();
  ucp_worker_params_t parameters{};
  parameters.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  parameters.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucp_worker_h made = nullptr;
  ucs_status_t status = api.worker_create(context.get(), &parameters, &made);
  if (status != UCS_OK) return fail_ucx(api, status, "create a UCX worker");
  std::unique_ptr<Worker> worker(new Worker(api, made));
  status = api.worker_get_efd(made, &worker->fd_);
  if (status != UCS_OK) return fail_ucx(api, status, "get the descriptor of UCX events");
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessageId;
  handler.cb = &Worker::on_message;
  handler.arg = worker.get();
  status = api.worker_set_am_recv_handler(made, &handler);
  if (status != UCS_OK) return fail_ucx(api, status, "receive messages through UCX");
  ucp_address_t* address = nullptr;
  std::size_t size = 0;
  status = api.worker_get_address(made, &address, &size);
  if (status != UCS_OK) return fail_ucx(api, status, "get a worker's address");
  const auto* const begin = reinterpret_cast<const std::byte*>(address);
  worker->address_.assign(begin, begin + size);
  api.worker_release_address(made, address);
  return worker;
}

Worker::~Worker() { api_.worker_destroy(worker_); }

bool Worker::progress() {
  int rounds = 0;
  while (rounds < kMostRounds && api_.worker_progress(worker_) != 0) ++rounds;
  return rounds > 0;
}

bool Worker::arm() { return api_.worker_arm(worker_) != UCS_ERR_BUSY; }

ucs_status_t Worker::on_message(void* self, const void*, std::size_t, void* data, std::size_t size,
                                const ucp_am_recv_param_t* parameters) {
  auto* const worker = static_cast<Worker*>(self);
  // Our messages are all eager and at least of that size; others are ignored.
  if ((parameters->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 || size < sizeof(Message) ||
      size > sizeof(Message) + kMostPackedBytes + sizeof(std::uint64_t)) {
    return UCS_OK;
  }
  Arrived& arrived = worker->arrived_.emplace_back();
  std::memcpy(&arrived.message, data, sizeof(Message));
  const auto* const rest = static_cast<const std::byte*>(data) + sizeof(Message);
  arrived.rest.assign(rest, rest + (size - sizeof(Message)));
  return UCS_OK;
}

// ---- endpoint

Result<std::unique_ptr<Endpoint>> Endpoint::connect(Worker& worker,
                                                    std::span<const std::byte> address) {
  std::unique_ptr<Endpoint> endpoint(new Endpoint(worker));
  ucp_ep_params_t parameters{};
  parameters.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                          UCP_EP_PARAM_FIELD_ERR_HANDLER;
  parameters.address = reinterpret_cast<const ucp_address_t*>(address.data());
  parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  parameters.err_handler = {&Endpoint::on_error, endpoint.get()};
  const ucs_status_t status =
      worker.api().ep_create(worker.get(), &parameters, &endpoint->endpoint_);
  if (status == UCS_OK) return endpoint;
  return fail_ucx(worker.api(), status, "open an endpoint to a peer");
}

void Endpoint::on_error(void* self, ucp_ep_h, ucs_status_t status) {
  static_cast<Endpoint*>(self)->set_broken(status);  // It is closed outside of progress().
}

void Endpoint::send(const Message& message, std::span<const std::byte> rest) {
  if (broken_ || endpoint_ == nullptr) return;
  const UcpApi& api = worker_.api();
  // One contiguous run of bytes: the message and its payload.
  auto sending = std::make_unique<Sending>();
  sending->api = &api;
  sending->bytes.resize(sizeof message + rest.size());
  std::memcpy(sending->bytes.data(), &message, sizeof message);
  if (!rest.empty()) std::memcpy(sending->bytes.data() + sizeof message, rest.data(), rest.size());
  ucp_request_param_t parameters{};
  parameters.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  parameters.cb.send = &Sending::on_sent;
  parameters.user_data = sending.get();
  parameters.flags = UCP_AM_SEND_FLAG_EAGER;
  const ucs_status_ptr_t sent = api.am_send_nbx(
      endpoint_, kMessageId, nullptr, 0, sending->bytes.data(), sending->bytes.size(), &parameters);
  if (UCS_PTR_IS_ERR(sent)) {
    set_broken(UCS_PTR_STATUS(sent));
  } else if (sent != nullptr) {
    (void)sending.release();  // on_sent() deletes it.
  }
}

void Endpoint::close(Close how) {
  if (endpoint_ == nullptr) return;
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  parameters.flags = how == Close::kNow ? UCP_EP_CLOSE_FLAG_FORCE : 0;
  const ucs_status_ptr_t closing =
      worker_.api().ep_close_nbx(std::exchange(endpoint_, nullptr), &parameters);
  if (closing != nullptr && !UCS_PTR_IS_ERR(closing)) closing_ = closing;
}

bool Endpoint::closed() {
  if (endpoint_ != nullptr) return false;
  if (closing_ == nullptr) return true;
  if (worker_.api().request_check_status(closing_) == UCS_INPROGRESS) return false;
  worker_.api().request_free(std::exchange(closing_, nullptr));
  return true;
}

}  // namespace pegaflow::ucx
