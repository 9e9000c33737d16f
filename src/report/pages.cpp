#include "report/pages.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "report/draw_chart.hpp"
#include "report/flow.hpp"
#include "report/page_table.hpp"

namespace lockstep {
namespace {

constexpr Setting kTitle{{.size = 15, .bold = true}, 19, {}};
constexpr Setting kHeading{{.size = 11.5, .bold = true}, 15, {}};
constexpr Setting kQuestion{{.size = 8.7, .bold = true}, 12.2, {}};
constexpr Setting kText{{.size = 8.7}, 12.2, {}};
constexpr Setting kCaption{{.size = 7.2}, 9.8, {Role::kMuted}};
constexpr Setting kFact{{.size = 7.4}, 10.4, {}};
constexpr Setting kFactName{{.size = 7.4}, 10.4, {Role::kMuted}};
constexpr Setting kCommand{{.size = 7.2, .mono = true}, 10.4, {}};
constexpr double kChartFont = 7.2;
constexpr double kBetweenCharts = 20;
constexpr double kBetweenBlocks = 12;
constexpr double kBeforeHeading = 16;

// Name and value of a fact, line by line, so that a value of any length can go on to other pages.
struct FactLine {
  std::string name;  // only of the first line
  std::string value;
};

std::vector<FactLine> fact_lines(const Fact& fact, const Setting& setting, double width) {
  std::vector<FactLine> lines;
  for (auto& line : wrap_lines(fact.value, setting.font, width)) {
    lines.push_back({lines.empty() ? fact.name : "", std::move(line)});
  }
  return lines;
}

// Where values begin, right of the names.
double names_width(const Document& document) {
  double widest = text_width("command", kFactName.font);
  for (const auto& fact : document.facts) {
    widest = std::max(widest, text_width(fact.name, kFactName.font));
  }
  return std::min(widest, 90.0) + 9;
}

void draw_fact_line(Flow& flow, const FactLine& line, double left, double names,
                    const Setting& setting) {
  const double baseline = flow.y() + kAscent * setting.font.size + 1.4;
  flow.page().text({left, baseline}, fit_text(line.name, kFactName.font, names - 4),
                   {.font = kFactName.font, .colour = kFactName.colour});
  flow.page().text({left + names, baseline}, line.value,
                   {.font = setting.font, .colour = setting.colour});
}

// The command over the whole width; under it date and facts in two columns of equal length.
void draw_stamp(Flow& flow, const Document& document) {
  const double names = names_width(document);
  const double column = (flow.width() - kBetweenCharts) / 2;
  flow.rule(0.4, {Role::kMuted});
  flow.advance(4);
  if (!document.command.empty()) {
    const Fact command{"command", document.command};
    for (const auto& line : fact_lines(command, kCommand, flow.width() - names)) {
      flow.need(kCommand.leading);
      draw_fact_line(flow, line, flow.left(), names, kCommand);
      flow.advance(kCommand.leading);
    }
  }
  std::vector<FactLine> lines =
      fact_lines({"date", format_date(document.date)}, kFact, column - names);
  for (const auto& fact : document.facts) {
    for (auto& line : fact_lines(fact, kFact, column - names)) lines.push_back(std::move(line));
  }
  size_t half = (lines.size() + 1) / 2;
  while (half < lines.size() && lines[half].name.empty()) ++half;  // no fact in both columns
  for (size_t i = 0; i < half; ++i) {
    flow.need(kFact.leading);
    draw_fact_line(flow, lines[i], flow.left(), names, kFact);
    if (half + i < lines.size()) {
      draw_fact_line(flow, lines[half + i], flow.left() + column + kBetweenCharts, names, kFact);
    }
    flow.advance(kFact.leading);
  }
  flow.advance(5);
  flow.rule(0.4, {Role::kMuted});
}

// One or two figures side by side, with their captions.
class FigureRow {
 public:
  FigureRow(const Section& section, std::vector<size_t> indices, size_t first_number, double width)
      : section_(section), indices_(std::move(indices)) {
    const auto count = static_cast<double>(indices_.size());
    column_ = (width - (count - 1) * kBetweenCharts) / count;
    for (size_t i = 0; i < indices_.size(); ++i) {
      const Figure& figure = section_.figures[indices_[i]];
      chart_height_ = std::max(chart_height_, chart_height(figure.chart, column_, kChartFont));
      captions_.push_back(
          wrap_lines(fmt::format("Figure {}. {}", first_number + indices_[i], figure.caption),
                     kCaption.font, column_));
      if (captions_.back().size() > kMostCaptionLines) captions_.back().resize(kMostCaptionLines);
      caption_lines_ = std::max(caption_lines_, captions_.back().size());
    }
  }

  double height() const {
    return chart_height_ + 4 + static_cast<double>(caption_lines_) * kCaption.leading;
  }

  void draw(Flow& flow) const {
    flow.need(height());
    for (size_t i = 0; i < indices_.size(); ++i) {
      const double x = flow.left() + static_cast<double>(i) * (column_ + kBetweenCharts);
      draw_chart(flow.page(), section_.figures[indices_[i]].chart,
                 {x, flow.y(), column_, chart_height_}, kChartFont);
      double y = flow.y() + chart_height_ + 4 + kAscent * kCaption.font.size;
      for (const auto& line : captions_[i]) {
        flow.page().text({x, y}, line, {.font = kCaption.font, .colour = kCaption.colour});
        y += kCaption.leading;
      }
    }
    flow.advance(height());
  }

 private:
  static constexpr size_t kMostCaptionLines = 16;  // a figure with its caption fits a page

  const Section& section_;
  std::vector<size_t> indices_;
  double column_ = 0;
  double chart_height_ = 0;
  std::vector<std::vector<std::string>> captions_;  // [place][line]
  size_t caption_lines_ = 0;
};

double question_lead(const Question& question, double width) {
  return set_height(question.question, kQuestion, width) +
         lead_height(question.answer, kText, width);
}

// Numbers of tables and figures go on through the document.
struct Numbers {
  size_t table = 1;
  size_t figure = 1;
};

// What must stand under a section's heading on the same page.
double section_lead(const Section& section, const Numbers& numbers, const Flow& flow) {
  if (!section.tables.empty()) {
    const PageTable table(section.tables.front(), numbers.table, flow.width(), flow.page_height());
    const bool moved_whole = table.height() < flow.page_height() / 3;
    return moved_whole ? table.height() : table.lead_height();
  }
  if (!section.figures.empty()) {
    return FigureRow(section, figure_rows(section.figures).front(), numbers.figure, flow.width())
        .height();
  }
  return section.questions.empty() ? 0 : question_lead(section.questions.front(), flow.width());
}

void draw_section(Flow& flow, const Section& section, Numbers& numbers) {
  if (!section.heading.empty()) {
    flow.space(kBeforeHeading);
    const double heading = set_height(section.heading, kHeading, flow.width()) + 4;
    flow.need(heading + section_lead(section, numbers, flow));
    flow.paragraph(section.heading, kHeading);
    flow.advance(4);
  }
  bool first = true;
  const auto space = [&](double height) {
    if (!first) flow.space(height);
    first = false;
  };
  for (const auto& table : section.tables) {
    space(kBetweenBlocks);
    PageTable(table, numbers.table++, flow.width(), flow.page_height()).draw(flow);
  }
  for (const auto& row : figure_rows(section.figures)) {
    space(kBetweenBlocks);
    FigureRow(section, row, numbers.figure, flow.width()).draw(flow);
  }
  numbers.figure += section.figures.size();
  for (const auto& question : section.questions) {
    space(7);
    flow.need(question_lead(question, flow.width()));
    flow.paragraph(question.question, kQuestion);
    flow.paragraph(question.answer, kText);
  }
}

void draw_records(Flow& flow, const Document& document) {
  if (document.records.empty()) return;
  std::string names;
  for (const auto& record : document.records) {
    names += (names.empty() ? "" : ", ") + record.name;
  }
  flow.space(kBeforeHeading);
  flow.paragraph(
      fmt::format("Everything above is made from {} record{}, kept beside this file: {}.",
                  document.records.size(), document.records.size() > 1 ? "s" : "", names),
      kCaption);
}

void draw_foot(Drawing& page, const std::string& title, size_t number, size_t count) {
  const Font font{.size = 7};
  const double rule = kPrinted.bottom() - 11;
  const double baseline = kPrinted.bottom() - kDescent * font.size - 0.2;
  page.line({kPrinted.x, rule}, {kPrinted.right(), rule}, {.colour = {Role::kGrid}, .width = 0.4});
  const std::string place = fmt::format("page {} of {}", number, count);
  const double room = kPrinted.width - text_width(place, font) - 20;
  page.text({kPrinted.x, baseline}, fit_text(title, font, room),
            {.font = font, .colour = {Role::kMuted}});
  page.text({kPrinted.right(), baseline}, place,
            {.font = font, .colour = {Role::kMuted}, .anchor = Anchor::kEnd});
}

}  // namespace

std::vector<Drawing> lay_out_pages(const Document& document) {
  require_font();
  Flow flow(kBody);
  flow.paragraph(document.title, kTitle);
  flow.advance(6);
  draw_stamp(flow, document);
  Numbers numbers;
  for (const auto& section : document.sections) draw_section(flow, section, numbers);
  draw_records(flow, document);
  std::vector<Drawing> pages = flow.take();
  for (size_t i = 0; i < pages.size(); ++i) {
    draw_foot(pages[i], document.title, i + 1, pages.size());
  }
  return pages;
}

}  // namespace lockstep
