#pragma once

// A record to begin with, and what every field of one must stand.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "lockstep/record.hpp"
#include "support.hpp"

namespace lockstep::test {

inline RunRecord sample() {
  RunRecord record;
  record.program = "practical5_dp";
  record.options = {{"steps", "20"}, {"devices", "cpu:2"}};
  record.host = {{"name", "here"}};
  record.versions = {{"lockstep", "0.1.0"}};
  record.world_size = 1;
  record.devices = {{.name = "cpu:0",
                     .physical = "core 0",
                     .shared_by = 2,
                     .threads = 3,
                     .peak_bytes = int64_t{1} << 40,
                     .final_bytes = 7,
                     .busy_fraction = 0.5,
                     .sent_bytes_per_step = 11,
                     .received_bytes_per_step = 13},
                    {.name = "cpu:1", .physical = "core 1"}};
  record.split = {22, 22, 20};
  record.step_ms = {
      .mean = 1.5, .stddev = 0.25, .median = 1.4, .p95 = 1.9, .min = 1, .max = 2, .n = 18};
  record.warmup_steps = 2;
  record.total_s = 0.1;
  record.losses = {1.0, 0.1, 1e-300};
  record.samples_per_s = 1e6;
  record.effective_batch = 64;
  record.all_reduces = {.count = 2.5, .bytes = 4096};
  record.comm_ms = 0.7;
  record.exposed_comm_ms = 0.3;
  return record;
}

/// Every field in turn is taken away, and then given a value of another type.
inline void expect_each_field_named(const nlohmann::json::json_pointer& object,
                                    const RunRecord& record) {
  using nlohmann::json;
  const json whole = to_json(record);
  for (const auto& [name, value] : whole.at(object).items()) {
    SCOPED_TRACE(name);
    json without = whole;
    without.at(object).erase(name);
    expect_error(Code::kRecord, {"has no \"" + name + "\""}, [&] { record_from_json(without); });
    for (const json& wrong :
         {json(nullptr), json(true), json("text"), json{{"a", 1}}, json{1, "x"}}) {
      json changed = whole;
      changed.at(object)[name] = wrong;
      // A map of texts is also an object, and a text is a text.
      if (value.type() == wrong.type() && value.is_string()) continue;
      SCOPED_TRACE(wrong.dump());
      expect_error(Code::kRecord, {}, [&] { record_from_json(changed); });
    }
  }
}

}  // namespace lockstep::test
