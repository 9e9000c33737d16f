#include "lockstep/trace.hpp"

#include <nlohmann/json.hpp>
#include <thread>

#include "support.hpp"

namespace lockstep::test::trace_test {
namespace {

using nlohmann::json;

json written(const Trace& trace) {
  const ScratchFolder scratch;
  trace.write(scratch.file("t.json"));
  return json::parse(test::read_bytes(scratch.file("t.json")));
}

std::vector<json> events_of(const json& file, const std::string& kind) {
  std::vector<json> events;
  for (const auto& event : file.at("traceEvents")) {
    if (event.at("ph") == kind) events.push_back(event);
  }
  return events;
}

TEST(Clock, NeverGoesBack) {
  int64_t before = monotonic_ns();
  for (int i = 0; i < 1000; ++i) {
    const int64_t now = monotonic_ns();
    ASSERT_GE(now, before);
    before = now;
  }
}

TEST(Trace, OffMeansEmpty) {
  Trace trace;
  EXPECT_FALSE(trace.enabled());
  trace.add({0, 0, "span", 1, 2});
  {
    TraceScope scope(&trace, 0, 0, "scope");
    scope.arg("key", "value");
    TraceScope nothing(nullptr, 0, 0, "nothing");
    nothing.arg("key", "value");
  }
  EXPECT_TRUE(trace.spans().empty());
  EXPECT_TRUE(written(trace).at("traceEvents").empty());
}

TEST(Trace, AScopeBegunWhileOffStaysSilent) {
  Trace trace;
  {
    const TraceScope scope(&trace, 0, 0, "early");
    trace.enable();
  }
  EXPECT_TRUE(trace.spans().empty());
}

TEST(Trace, TimesAreMicrosecondsSinceTheFirstSpan) {
  Trace trace;
  trace.enable();
  constexpr int64_t kStart = 7'000'000'000'123;
  trace.add({1, 2, "late", kStart + 1'234'567, kStart + 2'000'067, {{"bytes", "64"}}});
  trace.add({3, 0, "first", kStart, kStart + 1});
  const auto spans = events_of(written(trace), "X");
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0], (json{{"ph", "X"},
                            {"name", "late"},
                            {"pid", 1},
                            {"tid", 2},
                            {"ts", 1234.567},
                            {"dur", 765.5},
                            {"args", {{"bytes", "64"}}}}));
  EXPECT_EQ(
      spans[1],
      (json{{"ph", "X"}, {"name", "first"}, {"pid", 3}, {"tid", 0}, {"ts", 0.0}, {"dur", 0.001}}));
}

TEST(Trace, NamesRanksAndDevices) {
  Trace trace;
  trace.name_rank(1, "old");
  trace.name_rank(1, "rank 1");
  trace.name_device(1, 2, "cpu:2 (core 2)");
  const auto events = events_of(written(trace), "M");
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(
      events[0],
      (json{{"ph", "M"}, {"name", "process_name"}, {"pid", 1}, {"args", {{"name", "rank 1"}}}}));
  EXPECT_EQ(events[1].at("args").at("sort_index"), 1);
  EXPECT_EQ(events[2], (json{{"ph", "M"},
                             {"name", "thread_name"},
                             {"pid", 1},
                             {"tid", 2},
                             {"args", {{"name", "cpu:2 (core 2)"}}}}));
}

TEST(Trace, NestedScopesLieInsideEachOther) {
  Trace trace;
  trace.enable();
  {
    TraceScope outer(&trace, 0, 1, "outer");
    outer.arg("rows", "32");
    const TraceScope inner(&trace, 0, 1, "inner");
  }
  const auto spans = trace.spans();
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0].name, "outer");
  EXPECT_EQ(spans[0].args, (std::map<std::string, std::string>{{"rows", "32"}}));
  EXPECT_EQ(spans[1].name, "inner");
  EXPECT_LE(spans[0].begin_ns, spans[1].begin_ns);
  EXPECT_GE(spans[0].end_ns, spans[1].end_ns);
}

TEST(Trace, AnOuterSpanComesFirstEvenWhenBothBeginTogether) {
  Trace trace;
  trace.enable();
  trace.add({0, 0, "inner", 10, 20});
  trace.add({0, 0, "outer", 10, 30});
  EXPECT_EQ(trace.spans()[0].name, "outer");
}

TEST(Trace, AScopeEndsWithAnException) {
  Trace trace;
  trace.enable();
  EXPECT_THROW(
      {
        const TraceScope scope(&trace, 0, 0, "failing");
        throw std::runtime_error("failure");
      },
      std::runtime_error);
  ASSERT_EQ(trace.spans().size(), 1U);
}

TEST(Trace, KeepsEverySpanOfManyThreads) {
  constexpr int kThreads = 4;
  constexpr int kSpans = 500;
  Trace trace;
  trace.enable();
  std::vector<std::thread> threads;
  for (int device = 0; device < kThreads; ++device) {
    threads.emplace_back([&trace, device] {
      trace.name_device(0, device, "cpu:" + std::to_string(device));
      for (int i = 0; i < kSpans; ++i) const TraceScope scope(&trace, 0, device, std::to_string(i));
    });
  }
  for (auto& thread : threads) thread.join();
  const auto spans = trace.spans();
  ASSERT_EQ(spans.size(), static_cast<size_t>(kThreads * kSpans));
  for (int device = 0; device < kThreads; ++device) {
    for (int i = 0; i < kSpans; ++i) {
      const auto& span = spans[static_cast<size_t>(device * kSpans + i)];
      ASSERT_EQ(span.device, device);
      ASSERT_EQ(span.name, std::to_string(i));
    }
  }
  EXPECT_EQ(events_of(written(trace), "M").size(), static_cast<size_t>(kThreads));
}

TEST(Trace, AnyNameMakesAValidFile) {
  Trace trace;
  trace.enable();
  trace.add({0, 0, "quote \" newline \n bad \xff", 0, 1});
  EXPECT_EQ(events_of(written(trace), "X")[0].at("name"), "quote \" newline \n bad \xEF\xBF\xBD");
}

TEST(Trace, ASpanMayNotEndBeforeItBegins) {
  Trace trace;
  trace.enable();
  try {
    trace.add({0, 0, "backwards", 5, 3});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.message(), "trace span \"backwards\" ends 2 ns before it begins");
  }
  EXPECT_TRUE(trace.spans().empty());
}

TEST(Trace, WriteErrorsAreErrors) {
  const ScratchFolder scratch;
  const Trace trace;
  expect_error(Code::kFileWrite, {"/proc/t.json"}, [&] { trace.write("/proc/t.json"); });
  expect_error(Code::kFileWrite, {"make its folder first"},
               [&] { trace.write(scratch.file("no/t.json")); });
}

}  // namespace
}  // namespace lockstep::test::trace_test
