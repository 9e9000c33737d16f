#include "launch/rendezvous_messages.hpp"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/json_text.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr size_t kMaxText = 4096;  // bytes of a name or a line

std::string cut(const std::string& text) {
  return text.substr(0, kMaxText);
}

json to_json(const JoinMessage& message) {
  return {{"type", "join"},
          {"version", message.version},
          {"job_id", cut(message.job_id)},
          {"min_nnodes", message.nnodes.least},
          {"max_nnodes", message.nnodes.most},
          {"max_restarts", message.max_restarts},
          {"heartbeat_ns", message.heartbeat_ns},
          {"lost_after_ns", message.lost_after_ns},
          {"node_rank", message.offer.node_rank},
          {"local_world_size", message.offer.local_world_size},
          {"host", cut(message.offer.host)},
          {"master_port", message.offer.master_port}};
}

json to_json(const RejoinMessage& message) {
  return {{"type", "rejoin"}, {"master_port", message.master_port}};
}

json to_json(const BeatMessage& /*message*/) {
  return {{"type", "beat"}};
}

json to_json(const FailedMessage& message) {
  return {{"type", "failed"},
          {"node_rank", message.failure.node_rank},
          {"rank", message.failure.rank},
          {"exit_code", message.failure.exit_code},
          {"text", cut(message.failure.text)},
          {"restart", static_cast<int>(message.failure.restart)}};
}

json to_json(const LeftMessage& message) {
  return {{"type", "left"}, {"rank", message.rank}};
}

json to_json(const FinishedMessage& /*message*/) {
  return {{"type", "finished"}};
}

json to_json(const RefusedMessage& message) {
  return {{"type", "refused"}, {"why", cut(message.why)}, {"help", cut(message.help)}};
}

json to_json(const StatusMessage& message) {
  return {{"type", "status"},
          {"running", message.running},
          {"present", message.present},
          {"lost", message.lost},
          {"turned_away", message.turned_away}};
}

json to_json(const LayoutMessage& message) {
  const JobLayout& layout = message.layout;
  return {{"type", "layout"},
          {"node_rank", layout.node_rank},
          {"local_world_sizes", layout.local_world_sizes},
          {"hosts", layout.hosts},
          {"master_addr", layout.master_addr},
          {"master_port", layout.master_port},
          {"attempt", layout.attempt},
          {"session", layout.session},
          {"store_port", message.store_port}};
}

int integer(const json& object, const char* name, int least, int most) {
  const auto value = whole_number_in(object.at(name), least, most);
  if (!value) throw std::out_of_range(name);
  return static_cast<int>(*value);
}

int64_t duration(const json& object, const char* name) {
  const auto value = whole_number_in(object.at(name), 0, std::numeric_limits<int64_t>::max());
  if (!value) throw std::out_of_range(name);
  return *value;
}

std::string text(const json& object, const char* name) {
  std::string value = object.at(name).get<std::string>();
  if (value.size() > kMaxText) throw std::out_of_range(name);
  return value;
}

constexpr int kMaxPort = 65535;
constexpr int kMaxRanks = 1 << 20;
constexpr int kMaxInt = std::numeric_limits<int>::max();

std::vector<std::string> texts(const json& object, const char* name) {
  auto values = object.at(name).get<std::vector<std::string>>();
  for (const auto& value : values) {
    if (value.size() > kMaxText) throw std::out_of_range(name);
  }
  return values;
}

NodeMessage read_join(const json& object) {
  return JoinMessage{
      .version = text(object, "version"),
      .job_id = text(object, "job_id"),
      .nnodes = {.least = integer(object, "min_nnodes", 1, kMostHosts),
                 .most = integer(object, "max_nnodes", 1, kMostHosts)},
      .max_restarts = integer(object, "max_restarts", 0, kMaxInt),
      .heartbeat_ns = duration(object, "heartbeat_ns"),
      .lost_after_ns = duration(object, "lost_after_ns"),
      .offer = {.node_rank = integer(object, "node_rank", -1, kMostHosts - 1),
                .local_world_size = integer(object, "local_world_size", 1, kMaxRanks),
                .host = text(object, "host"),
                .master_port = integer(object, "master_port", 0, kMaxPort)}};
}

NodeMessage read_failed(const json& object) {
  return FailedMessage{{.node_rank = integer(object, "node_rank", 0, kMostHosts - 1),
                        .rank = integer(object, "rank", -1, kMaxInt),
                        .exit_code = integer(object, "exit_code", -kMaxInt, kMaxInt),
                        .text = text(object, "text"),
                        .restart = static_cast<Restart>(integer(object, "restart", 0, 2))}};
}

NodeMessage read_layout(const json& object) {
  LayoutMessage message;
  JobLayout& layout = message.layout;
  layout.node_rank = integer(object, "node_rank", 0, kMostHosts - 1);
  int64_t ranks = 0;
  for (const json& size : object.at("local_world_sizes")) {
    layout.local_world_sizes.push_back(
        static_cast<int>(whole_number_in(size, 1, kMaxRanks).value_or(0)));
    ranks += layout.local_world_sizes.back();
    if (layout.local_world_sizes.back() == 0 || ranks > kMaxInt) throw std::out_of_range("ranks");
  }
  layout.hosts = texts(object, "hosts");
  layout.master_addr = text(object, "master_addr");
  layout.master_port = integer(object, "master_port", 0, kMaxPort);
  layout.attempt = integer(object, "attempt", 0, kMaxInt);
  layout.session = text(object, "session");
  message.store_port = integer(object, "store_port", 1, kMaxPort);
  const size_t nodes = layout.hosts.size();
  if (layout.local_world_sizes.size() != nodes || static_cast<size_t>(layout.node_rank) >= nodes)
    throw std::out_of_range("nodes");
  return message;
}

NodeMessage read(const json& object) {
  const std::string type = text(object, "type");
  if (type == "join") return read_join(object);
  if (type == "rejoin") return RejoinMessage{integer(object, "master_port", 0, kMaxPort)};
  if (type == "beat") return BeatMessage{};
  if (type == "failed") return read_failed(object);
  if (type == "left") return LeftMessage{integer(object, "rank", 0, kMaxInt)};
  if (type == "finished") return FinishedMessage{};
  if (type == "refused") return RefusedMessage{text(object, "why"), text(object, "help")};
  if (type == "layout") return read_layout(object);
  if (type != "status") throw std::out_of_range(type);
  StatusMessage status;
  status.running = integer(object, "running", 0, kMostHosts);
  for (const json& node : object.at("present")) {
    const auto rank = whole_number_in(node.at(0), -1, kMostHosts - 1);
    if (!rank || node.size() != 2) throw std::out_of_range("present");
    status.present.emplace_back(static_cast<int>(*rank), node.at(1).get<std::string>());
  }
  status.lost = texts(object, "lost");
  status.turned_away = texts(object, "turned_away");
  return status;
}

}  // namespace

std::string encode(const NodeMessage& message) {
  const json object =
      std::visit([](const auto& alternative) { return to_json(alternative); }, message);
  // Names and messages may contain invalid UTF-8.
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

RemoteFailure loss_of_node_0(const std::string& host, const std::string& why) {
  return {
      .node_rank = 0,
      .rank = -1,
      .exit_code = 1,
      .text = fmt::format("host {} (node 0), which coordinates the job, was lost: {}", host, why),
      .restart = Restart::kImpossible};
}

NodeMessage decode_node_message(std::string_view payload) {
  try {
    const auto object = parse_json(payload);
    if (!object) throw std::invalid_argument("not JSON");
    return read(*object);
  } catch (const std::exception&) {
    throw Error(Code::kRendezvous, "a message that is not a launcher's",
                "install the same version of lockstep on all hosts");
  }
}

}  // namespace lockstep
