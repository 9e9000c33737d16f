#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "report/axis.hpp"
#include "report/draw_chart.hpp"
#include "report/svg.hpp"
#include "report_support.hpp"

namespace lockstep::test::report_chart_test {
namespace {

std::vector<std::string> labels_of(const Axis& axis) {
  std::vector<std::string> labels;
  for (const auto& tick : axis.ticks) labels.push_back(tick.label);
  return labels;
}

using Labels = std::vector<std::string>;

TEST(ReportAxis, StepsAreRound) {
  EXPECT_EQ(labels_of(linear_axis(0, 37, Unit::kNumber, 4)), (Labels{"0", "10", "20", "30", "40"}));
  EXPECT_EQ(labels_of(linear_axis(-3, 4, Unit::kNumber, 4)), (Labels{"-4", "-2", "0", "2", "4"}));
  EXPECT_EQ(labels_of(linear_axis(0, 0.3, Unit::kNumber, 3)), (Labels{"0", "0.1", "0.2", "0.3"}));
}

TEST(ReportAxis, OneUnitForAllTicks) {
  EXPECT_EQ(labels_of(linear_axis(0, 1900, Unit::kMilliseconds, 4)),
            (Labels{"0", "0.5 s", "1 s", "1.5 s", "2 s"}));
  EXPECT_EQ(labels_of(linear_axis(0, 0.09, Unit::kMilliseconds, 2)),
            (Labels{"0", "50 µs", "100 µs"}));
  EXPECT_EQ(labels_of(linear_axis(0, 30.0 * (1 << 20), Unit::kBytes, 4)),
            (Labels{"0", "8 MiB", "16 MiB", "24 MiB", "32 MiB"}));
  EXPECT_EQ(labels_of(linear_axis(0, 100, Unit::kPercent, 2)), (Labels{"0", "50 %", "100 %"}));
}

TEST(ReportAxis, PlacesValuesBetweenItsEnds) {
  const Axis axis = linear_axis(0, 40, Unit::kNumber, 4);
  EXPECT_DOUBLE_EQ(axis.position(0), 0);
  EXPECT_DOUBLE_EQ(axis.position(10), 0.25);
  EXPECT_DOUBLE_EQ(axis.position(1000), 1) << "outside is drawn at the edge";
  const Axis log = point_axis({1, 2, 4, 8, 16}, true, Unit::kNumber);
  EXPECT_DOUBLE_EQ(log.position(4), 0.5);
}

TEST(ReportAxis, PowersOfTheBase) {
  EXPECT_EQ(labels_of(log_axis(1, 64, 2, Unit::kNumber)),
            (Labels{"1", "2", "4", "8", "16", "32", "64"}));
  EXPECT_EQ(labels_of(log_axis(0.004, 20, 10, Unit::kNumber)), (Labels{"0.01", "0.1", "1", "10"}));
  EXPECT_LE(log_axis(1e-200, 1e200, 10, Unit::kNumber).ticks.size(), 8U);
  EXPECT_GE(log_axis(3, 4, 10, Unit::kNumber).ticks.size(), 2U) << "round numbers between powers";
  EXPECT_EQ(labels_of(log_axis(180, 4000, 10, Unit::kMilliseconds)),
            (Labels{"0.2 s", "0.5 s", "1 s", "2 s"}))
      << "ticks along the whole axis";
}

TEST(ReportAxis, OddRangesStillHaveTicks) {
  constexpr double kTiny = std::numeric_limits<double>::denorm_min();
  const std::vector<std::pair<double, double>> ranges = {
      {0, 0},          {5, 5},          {-5, -5},          {0, kTiny},
      {0, 1e289},      {-1e289, 1e289}, {1e9, 1e9 + 1e-7}, {1, 1 + 1e-12},
      {1e-280, 2e-280}};
  for (const auto& [low, high] : ranges) {
    for (const Unit unit : {Unit::kNumber, Unit::kMilliseconds, Unit::kBytes, Unit::kPercent}) {
      const Axis axis = linear_axis(low, high, unit, 4);
      EXPECT_FALSE(axis.ticks.empty()) << low << " " << high;
      EXPECT_LT(axis.low, axis.high) << low << " " << high;
      EXPECT_LE(axis.low, low);
      EXPECT_GE(axis.high, high);
    }
  }
}

TEST(ReportAxis, ValuesAreWrittenInTheirUnit) {
  EXPECT_EQ(format_value(Unit::kMilliseconds, 12.34), "12.3 ms");
  EXPECT_EQ(format_value(Unit::kMilliseconds, 0), "0 ms");
  EXPECT_EQ(format_value(Unit::kBytes, 24.0 * (1 << 20)), "24.0 MiB");
  EXPECT_EQ(format_value(Unit::kPercent, 45), "45 %");
  EXPECT_EQ(format_value(Unit::kNumber, 65536), "65536");
  EXPECT_EQ(format_value(Unit::kNumber, 0.03125), "0.03125");
  EXPECT_EQ(format_value(Unit::kNumber, std::nan("")), "nan");
  EXPECT_EQ(format_value(Unit::kBytes, 1e200), "1e+200 B") << "more than any integer holds";
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Box kBox{20, 30, 240, 150};

Drawing drawn(const Chart& chart, const Box& box = kBox) {
  Drawing drawing;
  draw_chart(drawing, chart, box, 7);
  return drawing;
}

BarChart two_by_two() {
  return {.title = "Memory",
          .unit = Unit::kBytes,
          .categories = {"cpu:0", "cpu:1"},
          .series = {{.name = "DP", .values = {30e6, 20e6}, .deviations = {1e6, 0}},
                     {.name = "DDP", .values = {27e6, 27e6}}}};
}

LineChart one_line(std::vector<double> x, std::vector<double> y) {
  return {.title = "Line", .series = {{.name = "a", .x = std::move(x), .y = std::move(y)}}};
}

// Charts with odd data.
std::vector<Chart> odd_charts() {
  const std::string long_word(300, 'W');
  std::vector<Chart> charts = {BarChart{}, LineChart{}, Timeline{},
                               BarChart{.title = long_word, .categories = {"a"}},
                               BarChart{.categories = {"a", "b"}, .series = {{}, {}}}};
  for (const double value : {0.0, -3.0, 1.0, 1e-320, 1e280, -1e280, 1e308, kNan, kInf, -kInf}) {
    charts.emplace_back(BarChart{
        .categories = {"a", long_word},
        .series = {{.name = long_word, .values = {value, 2}, .deviations = {value, value}}}});
    charts.emplace_back(BarChart{.unit = Unit::kBytes,
                                 .categories = {"a"},
                                 .series = {{"x", {value}}, {"y", {1}}},
                                 .stacked = true});
    for (const bool log : {false, true}) {
      for (const bool zero : {false, true}) {
        LineChart lines = one_line({value, 1, 2}, {3, value, value});
        lines.series[0].deviations = {value, 1};
        lines.log_x = lines.log_y = log;
        lines.from_zero = zero;
        lines.x_label = long_word;
        charts.emplace_back(lines);
      }
    }
    charts.emplace_back(
        Timeline{.rows = {{long_word, {{"s", value, 2, -1}, {"t", 0, value, 99}}}, {"", {}}}});
  }
  BarChart many{.categories = std::vector<std::string>(200, "category"),
                .series = {{"one", std::vector<double>(200, 5)}}};
  charts.emplace_back(many);
  Timeline rows;
  for (int i = 0; i < 300; ++i) rows.rows.push_back({"row", {{"span", 1.0 * i, i + 2.0, i}}});
  charts.emplace_back(rows);
  return charts;
}

TEST(ReportChart, OddDataStayInTheBox) {
  for (const auto& chart : odd_charts()) {
    const double height = chart_height(chart, kBox.width, 7);
    ASSERT_TRUE(std::isfinite(height));
    const Box box{20, 30, kBox.width, height};
    expect_inside(drawn(chart, box), box);
  }
}

TEST(ReportChart, OddDataMakeWellFormedSvg) {
  for (const auto& chart : odd_charts()) {
    const std::string svg = render_svg(chart, "figure-1", SvgTarget::kFile);
    EXPECT_EQ(xml_fault(svg), "");
    EXPECT_EQ(svg.find("=\"nan"), std::string::npos);
    EXPECT_EQ(svg.find("=\"inf"), std::string::npos);
  }
}

TEST(ReportChart, WithoutDataSaysSo) {
  EXPECT_EQ(count_text(drawn(BarChart{}), "no data"), 1U);
  EXPECT_EQ(count_text(drawn(one_line({1, 2}, {kNan, kInf})), "no data"), 1U);
  EXPECT_EQ(count_text(drawn(Timeline{.rows = {{"a", {{"s", 3, 2, 0}}}}}), "no data"), 1U);
  EXPECT_EQ(count_text(drawn(two_by_two()), "no data"), 0U);
}

TEST(ReportChart, BarsCarryTheirValues) {
  const Drawing drawing = drawn(two_by_two());
  EXPECT_EQ(count_text(drawing, "28.6 MiB"), 1U);
  EXPECT_EQ(count_text(drawing, "25.7 MiB"), 2U);
}

TEST(ReportChart, ValuesThatDoNotFitLeaveTheirUnitToTheAxis) {
  BarChart chart = two_by_two();
  chart.categories.assign(4, "c");
  chart.series.assign(3, {.name = "s", .values = {30e6, 30e6, 30e6, 30e6}});
  const Drawing drawing = drawn(chart);
  EXPECT_EQ(count_text(drawing, "28.6 MiB"), 0U);
  EXPECT_EQ(count_text(drawing, "28.6"), 12U);
  chart.series[2].values[3] = 900;
  const Drawing upright = drawn(chart);
  EXPECT_EQ(count_text(upright, "28.6"), 0U) << "the units differ";
  EXPECT_EQ(count_text(upright, "28.6 MiB"), 11U);
  for (const auto& text : test::texts_of(upright)) {
    if (text.utf8 == "28.6 MiB") {
      EXPECT_EQ(text.style.rotation, -90);
    }
  }
}

TEST(ReportChart, LegendOnlyForSeveralSeries) {
  BarChart chart = two_by_two();
  EXPECT_EQ(count_text(drawn(chart), "DP"), 1U);
  chart.series.pop_back();
  EXPECT_EQ(count_text(drawn(chart), "DP"), 0U);
}

TEST(ReportChart, StacksShowPartsAndTotal) {
  const BarChart chart{.unit = Unit::kBytes,
                       .categories = {"code 1"},
                       .series = {{"weights", {1 << 20}}, {"state", {0}}, {"rest", {3 << 20}}},
                       .stacked = true};
  const Drawing drawing = drawn(chart);
  EXPECT_EQ(count_text(drawing, "1.00 MiB"), 1U);
  EXPECT_EQ(count_text(drawing, "3.00 MiB"), 1U);
  EXPECT_EQ(count_text(drawing, "4.00 MiB"), 1U);
  EXPECT_EQ(count_text(drawing, "state"), 0U) << "a part that no bar has";
}

TEST(ReportChart, NotANumberIsAGap) {
  const Drawing drawing = drawn(one_line({1, 2, 3, 4, 5}, {1, 2, kNan, 2, 1}));
  size_t lines = 0;
  for (const auto& mark : drawing.marks()) lines += mark.index() == 1 ? 1 : 0;
  EXPECT_EQ(lines, 2U);
}

TEST(ReportChart, FewPointsAreTheTicks) {
  const std::string texts = joined_texts(drawn(one_line({1, 2, 4, 32}, {9, 8, 7, 6})));
  for (const char* tick : {"1 ", "2 ", "4 ", "32 "}) EXPECT_NE(texts.find(tick), std::string::npos);
}

TEST(ReportChart, SeriesDifferWithoutColour) {
  LineChart lines = one_line({1, 2}, {1, 2});
  lines.series.push_back({.name = "b", .x = {1, 2}, .y = {2, 3}});
  std::vector<Dash> dashes;
  const Drawing drawing = drawn(lines);
  for (const auto& mark : drawing.marks()) {
    if (const auto* line = std::get_if<Drawing::Polyline>(&mark))
      dashes.push_back(line->stroke.dash);
  }
  ASSERT_EQ(dashes.size(), 2U);
  EXPECT_NE(dashes[0], dashes[1]);
}

TEST(ReportChart, TimelineNamesItsSpans) {
  const Timeline chart{
      .title = "Step",
      .rows = {{"backward", {{"24.5 ms", 0, 24.5, 0}}}, {"bucket 0", {{"2.25 MiB", 1, 1.1, 1}}}}};
  const Drawing drawing = drawn(chart);
  EXPECT_EQ(count_text(drawing, "backward"), 1U);
  EXPECT_EQ(count_text(drawing, "24.5 ms"), 1U) << "inside";
  EXPECT_EQ(count_text(drawing, "2.25 MiB"), 1U) << "beside, since it does not fit inside";
  EXPECT_TRUE(is_wide(chart));
}

TEST(ReportChart, TimelineExplainsItsColours) {
  Timeline chart{.title = "Step", .rows = {{"cpu:0", {{"F0", 0, 1, 0}, {"B0", 2, 3, 2}}}}};
  EXPECT_EQ(count_text(drawn(chart), "forward"), 0U);
  chart.legend = {"forward", "", "backward"};
  EXPECT_EQ(count_text(drawn(chart), "forward"), 1U);
  EXPECT_EQ(count_text(drawn(chart), "backward"), 1U);
}

TEST(ReportChart, TimelinePartsSpansThatTouch) {
  const auto parting_lines = [](double second_begin) {
    const Timeline chart{.rows = {{"a", {{"F0", 0, 1, 0}, {"F1", second_begin, 3, 0}}}}};
    const Drawing drawing = drawn(chart);
    return std::count_if(drawing.marks().begin(), drawing.marks().end(), [](const auto& mark) {
      const auto* lines = std::get_if<Drawing::Segments>(&mark);
      return lines != nullptr && lines->stroke.colour.role == Role::kPaper;
    });
  };
  EXPECT_EQ(parting_lines(1), 1);
  EXPECT_EQ(parting_lines(2), 0);
}

TEST(ReportChart, SvgIsAccessibleAndSelectable) {
  const std::string svg = render_svg(two_by_two(), "figure-7", SvgTarget::kFile);
  for (const char* part :
       {"role=\"img\"", "aria-labelledby=\"figure-7-title figure-7-desc\"",
        "<title id=\"figure-7-title\">Memory</title>", "DP: cpu:0 28.6 MiB, cpu:1 19.1 MiB",
        ">cpu:0</text>", "prefers-color-scheme:dark", "xmlns=\"http://www.w3.org/2000/svg\""}) {
    EXPECT_NE(svg.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(render_svg(two_by_two(), "a", SvgTarget::kInPage).find("http"), std::string::npos);
}

TEST(ReportChart, SvgEscapesEveryText) {
  BarChart chart = two_by_two();
  chart.title = "</title><script>alert(1)</script>";
  chart.categories = {"a & b", "\"<b>\""};
  chart.series[0].name = "x\xFF\x01y";
  const std::string svg = render_svg(chart, "f", SvgTarget::kFile);
  EXPECT_EQ(xml_fault(svg), "");
  EXPECT_EQ(svg.find("<script"), std::string::npos);
  EXPECT_EQ(svg.find('\x01'), std::string::npos);
  EXPECT_NE(svg.find("a &amp; b"), std::string::npos);
}

TEST(ReportText, WrapsBetweenWordsAndInsideOfLongOnes) {
  const Font font{.size = 10};
  const double width = text_width("two words", font);
  EXPECT_EQ(wrap_lines("two words more", font, width + 0.1),
            (std::vector<std::string>{"two words", "more"}));
  for (const auto& line :
       wrap_lines(std::string(200, 'm') + " ü" + std::string(90, 'i'), font, 50)) {
    EXPECT_LE(text_width(line, font), 50);
  }
  EXPECT_EQ(wrap_lines("", font, 50).size(), 1U);
  EXPECT_EQ(fit_text("a long text", font, text_width("a lo…", font)), "a lo…");
  EXPECT_EQ(fit_text("abc", font, 1), "");
  EXPECT_DOUBLE_EQ(text_width("ab\xFF", font), text_width("ab\uFFFD", font));
}

}  // namespace
}  // namespace lockstep::test::report_chart_test
