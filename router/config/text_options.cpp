#include "router/config/text_options.h"

namespace pegaflow::router {

using std::chrono::milliseconds;
using std::chrono::minutes;

void declare_text_options(const TextOptions& options, OptionTable& table) {
  table.list("hash-seeds", options.hash_seeds,
             "The values of PYTHONHASHSEED of engines that set it, beside 0. The blocks of token "
             "ids are computed with them, once an engine's events have confirmed one; without it "
             "such prompts are learned like texts.");
  table.list(
      "render", options.render,
      "Servers that make token ids of texts (vLLM's POST /v1/.../render, or POST /tokenize), "
      "each as http://HOST:PORT: an engine with --enable-scale-out, or `vllm launch render`. "
      "They are asked about long texts that are not known. Without one such a text counts as a "
      "new one until events or a lesson have taught its blocks.");
  table.duration("render-timeout", options.render_timeout, milliseconds(1), minutes(1),
                 "The time limit for the tokens of one text, by which a request is delayed at "
                 "most; later its text counts as a new one.");
  table.integer("render-inflight", options.render_inflight, 1, 1024,
                "The maximum number of texts at one server of --render: its tokenizer has one "
                "core.");
}

void declare_event_option(std::vector<std::string>& kv_events, OptionTable& table) {
  table.list("kv-events", kv_events,
             "The endpoint of an engine's KV events, as ENGINE=tcp://HOST:PORT with the engine's "
             "URL in the list of engines, for engines that do not report it (vLLM before 0.32, "
             "TensorRT-LLM, engines behind address translation). It replaces what the engine "
             "reports. Optional parts follow as +replay=tcp://HOST:PORT, +topic=TOPIC, +rank=R, "
             "+ranks=N and +format=sglang or +format=trtllm.");
}

}  // namespace pegaflow::router
