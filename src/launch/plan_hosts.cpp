#include "launch/plan_reader.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/lists.hpp"
#include "lockstep/error.hpp"
#include "net/socket.hpp"

namespace lockstep {
namespace {

constexpr int kStaticPort = 29500;  // torchrun's
constexpr int kRendezvousPort = 29400;
constexpr double kShortestHostTimeout = 3;  // seconds
constexpr double kShortestHeartbeat = 0.1;  // seconds
constexpr double kBeatsBeforeLoss = 3;      // a heartbeat may be late; several in a row are not

// "host", "host:29400", "[::1]:29400", "::1".
Endpoint parse_rendezvous_endpoint(const Setting& setting, int default_port) {
  const std::string& text = setting.text;
  const char* help = "write HOST:PORT, such as node0:29400";
  Endpoint endpoint{text, default_port};
  std::string port;
  if (text.starts_with('[')) {
    const size_t close = text.find(']');
    if (close == std::string::npos) PlanReader::fail(setting, "has no ]", help);
    endpoint.host = text.substr(1, close - 1);
    const std::string rest = text.substr(close + 1);
    if (!rest.empty() && rest[0] != ':') PlanReader::fail(setting, "is not HOST:PORT", help);
    if (!rest.empty()) port = rest.substr(1);
  } else if (const size_t colon = text.find(':');
             colon != std::string::npos && text.rfind(':') == colon) {
    endpoint.host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (port.empty()) PlanReader::fail(setting, "ends where a port should be", help);
  }
  if (endpoint.host.empty()) PlanReader::fail(setting, "names no host", help);
  if (port.empty()) return endpoint;
  const auto number = parse_whole_number(port);
  if (!number || *number < 1 || *number > 65535) {
    PlanReader::fail(setting, fmt::format("has no port from 1 to 65535: \"{}\"", port), help);
  }
  endpoint.port = *number;
  return endpoint;
}

// The number of `key` in "a=1,b=2"; `fallback` if it is not there.
double rendezvous_number(const Setting& conf, std::string_view key, double fallback) {
  for (const std::string_view item : split_list(conf.text, ',')) {
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      PlanReader::fail(conf, fmt::format("has \"{}\" where KEY=VALUE belongs", item),
                       "write join_timeout=300");
    }
    if (item.substr(0, equals) != key) continue;
    const auto number = parse_finite_number(item.substr(equals + 1));
    if (!number || *number <= 0 || *number > kLongestSeconds) {
      PlanReader::fail(conf, fmt::format("has no number of seconds for {}", key),
                       fmt::format("write {}=300", key));
    }
    return *number;
  }
  return fallback;
}

HostCount count_hosts(PlanReader& reader) {
  const Setting* setting = reader.find("nnodes");
  if (setting == nullptr || reader.is_on("standalone")) {
    reader.add_fact("hosts", "1", reader.is_on("standalone") ? "--standalone" : "default");
    return {};
  }
  const auto count = parse_host_count(setting->text);
  if (!count) {
    PlanReader::fail(
        *setting,
        fmt::format("is neither a number of hosts from 1 to {} nor a range of them", kMostHosts),
        "write --nnodes 2, or --nnodes 1:3 for one to three hosts");
  }
  reader.add_fact("hosts", count->words(), setting->source);
  return *count;
}

// A flag of ours, torchrun's key in --rdzv-conf, or the default.
double rendezvous_seconds(PlanReader& reader, LaunchPlan& plan, std::string_view flag,
                          std::string_view key, std::string_view fact, double fallback) {
  const Setting* conf = reader.find("rdzv-conf");
  const double torchruns = conf == nullptr ? fallback : rendezvous_number(*conf, key, fallback);
  const double value = reader.seconds(flag, fact, torchruns);
  if (!reader.is_on(flag) && torchruns != fallback) plan.facts.back().source = conf->source;
  return value;
}

void plan_waits(PlanReader& reader, LaunchPlan& plan) {
  plan.join_timeout_s = rendezvous_seconds(reader, plan, "join-timeout", "join_timeout",
                                           "longest wait for enough hosts", plan.join_timeout_s);
  if (plan.join_timeout_s <= 0) {
    PlanReader::fail(*reader.find("join-timeout"), "is not a positive time", "write 300");
  }
  if (plan.nnodes.elastic()) {
    plan.last_call_s = rendezvous_seconds(reader, plan, "last-call", "last_call_timeout",
                                          "wait for each further host",
                                          std::min(plan.last_call_s, plan.join_timeout_s / 2));
    if (plan.last_call_s >= plan.join_timeout_s) {
      throw Error(Code::kUsage,
                  fmt::format("the wait for a further host, {} s, is not shorter than the longest "
                              "wait for enough hosts, {} s",
                              plan.last_call_s, plan.join_timeout_s),
                  "write --last-call 30 --join-timeout 300");
    }
  }
  plan.heartbeat_s = reader.seconds("heartbeat", "heartbeat between hosts", plan.heartbeat_s);
  if (plan.heartbeat_s < kShortestHeartbeat) {
    PlanReader::fail(*reader.find("heartbeat"),
                     fmt::format("is less than {} s", kShortestHeartbeat), "write --heartbeat 1");
  }
  plan.host_timeout_s =
      reader.seconds("host-timeout", "silence after which a host is lost", plan.host_timeout_s);
  const double shortest = std::max(kShortestHostTimeout, kBeatsBeforeLoss * plan.heartbeat_s);
  if (plan.host_timeout_s < shortest) {
    throw Error(Code::kUsage,
                fmt::format("{} \"{}\" is less than {} s",
                            reader.is_on("host-timeout") ? reader.find("host-timeout")->source
                                                         : "the default of --host-timeout",
                            plan.host_timeout_s, shortest),
                fmt::format("hosts send a heartbeat every {} s: write --host-timeout {}",
                            plan.heartbeat_s, std::max(10.0, 10 * plan.heartbeat_s)));
  }
}

void plan_rendezvous(PlanReader& reader, LaunchPlan& plan) {
  const Setting* backend = reader.find("rdzv-backend");
  if (backend != nullptr && backend->text != "static" && backend->text != "c10d") {
    PlanReader::fail(*backend, "is not a rendezvous that lockstep knows",
                     "leave it out: the launchers rendezvous at --rdzv-endpoint anyway");
  }
  plan.job_id = reader.text("rdzv-id", "job", "none");
  const Setting* rank = reader.find("node-rank");
  if (!plan.nnodes.several()) {
    if (rank != nullptr && rank->text != "0") {
      PlanReader::fail(*rank, "does not exist: there is one host", "say --nnodes as well");
    }
    plan.node_rank = 0;
    return;
  }
  plan.node_rank = reader.whole("node-rank", "this host's number", -1, 0, plan.nnodes.most - 1);
  if (plan.node_rank < 0) plan.facts.back().value = "by order of arrival";
  plan_waits(reader, plan);
  const Setting* endpoint = reader.find("rdzv-endpoint");
  const Setting* master = reader.find("master-addr");
  if (endpoint == nullptr && master == nullptr) {
    throw Error(Code::kUsage,
                fmt::format("{} hosts need a rendezvous endpoint", plan.nnodes.words()),
                "say --rdzv-endpoint HOST:29400 with host 0's name, the same on every host");
  }
  const Setting& chosen = endpoint != nullptr ? *endpoint : *master;
  Endpoint address =
      parse_rendezvous_endpoint(chosen, endpoint != nullptr ? kRendezvousPort : kStaticPort);
  if (endpoint == nullptr && reader.is_on("master-port")) {
    address.port = reader.whole("master-port", "port of the rendezvous", kStaticPort, 1, 65535);
  }
  plan.endpoint_host = address.host;
  plan.endpoint_port = address.port;
  reader.add_fact("rendezvous", fmt::format("{}:{}", address.host, address.port), chosen.source);
}

void plan_master(PlanReader& reader, LaunchPlan& plan) {
  if (plan.nnodes.several()) return;
  plan.master_addr = reader.text("master-addr", "MASTER_ADDR", "127.0.0.1");
  plan.master_port = reader.whole("master-port", "MASTER_PORT", 0, 1, 65535);
  if (plan.master_port == 0) plan.facts.back().value = "a free port";
}

}  // namespace

void plan_hosts(PlanReader& reader, LaunchPlan& plan) {
  plan.nnodes = count_hosts(reader);
  plan_rendezvous(reader, plan);
  plan_master(reader, plan);
}

}  // namespace lockstep
