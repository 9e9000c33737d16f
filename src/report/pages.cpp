#include "report/pages.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "report/draw_chart.hpp"
#include "report/page_flow.hpp"

namespace lockstep {
namespace {

constexpr Setting kPageTitle{{.size = 15, .bold = true}, 19, {}};
constexpr Setting kHeading{{.size = 11.5, .bold = true}, 15, {}};
constexpr Setting kQuestion{{.size = 8.7, .bold = true}, 12.2, {}};
constexpr Setting kText{{.size = 8.7}, 12.2, {}};
constexpr Setting kAuthor{{.size = 10}, 15, {}};
constexpr Setting kBoxTitle{{.size = 8.2, .bold = true}, 12, {}};
constexpr Setting kOwnLabel{{.size = 7.2}, 10.4, {Role::kMuted}};
constexpr Setting kCode{{.size = 6.6, .mono = true}, 8.6, {}};
constexpr Setting kCaption{{.size = 7.2}, 9.8, {Role::kMuted}};
constexpr Setting kFile{{.size = 7.2}, 9.8, {Role::kPalette, 0}};
constexpr Setting kListing{{.size = 8.7, .bold = true}, 12.2, {Role::kPalette, 0}};
constexpr Setting kFact{{.size = 7.4}, 10.4, {}};
constexpr Setting kFactName{{.size = 7.4}, 10.4, {Role::kMuted}};
constexpr Setting kCommand{{.size = 7.2, .mono = true}, 10.4, {}};
constexpr double kChartFont = 7.2;
constexpr double kBetweenCharts = 20;
constexpr double kBetweenBlocks = 12;
constexpr double kBeforeHeading = 16;
constexpr double kOwnIndent = 10;    // of the author's words, right of their bar
constexpr double kLeastChart = 0.7;  // of a chart's height, to fill the rest of a page

// One line of a fact, so that a long value can continue on the next page.
struct FactLine {
  std::string name;  // of the first line only
  std::string value;
};

std::vector<FactLine> fact_lines(const Fact& fact, const Setting& setting, double width) {
  std::vector<FactLine> lines;
  for (auto& line : wrap_lines(fact.value, setting.font, width)) {
    lines.push_back({lines.empty() ? fact.name : "", std::move(line)});
  }
  return lines;
}

// The width of the column of names.
double names_width(const std::vector<Fact>& facts) {
  double widest = text_width("command", kFactName.font);
  for (const auto& fact : facts) {
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

// Draws a fact over the whole width.
void draw_long_fact(Flow& flow, const Fact& fact, double names, const Setting& setting) {
  for (const auto& line : fact_lines(fact, setting, flow.width() - names)) {
    flow.need(setting.leading);
    draw_fact_line(flow, line, flow.left(), names, setting);
    flow.advance(setting.leading);
  }
}

// Draws facts in two columns, and below them those that would need several lines there.
void draw_facts(Flow& flow, const std::vector<Fact>& facts, double names) {
  const double column = (flow.width() - kBetweenCharts) / 2;
  std::vector<FactLine> lines;
  std::vector<Fact> long_facts;
  for (const auto& fact : facts) {
    auto own = fact_lines(fact, kFact, column - names);
    if (own.size() > 2) {
      long_facts.push_back(fact);
    } else {
      for (auto& line : own) lines.push_back(std::move(line));
    }
  }
  size_t half = (lines.size() + 1) / 2;
  while (half < lines.size() && lines[half].name.empty()) ++half;  // keeps each fact in one column
  for (size_t i = 0; i < half; ++i) {
    flow.need(kFact.leading);
    draw_fact_line(flow, lines[i], flow.left(), names, kFact);
    if (half + i < lines.size()) {
      draw_fact_line(flow, lines[half + i], flow.left() + column + kBetweenCharts, names, kFact);
    }
    flow.advance(kFact.leading);
  }
  for (const auto& fact : long_facts) draw_long_fact(flow, fact, names, kFact);
}

void draw_stamp(Flow& flow, const Document& document) {
  std::vector<Fact> facts = {{"date", format_date(document.date)}};
  facts.insert(facts.end(), document.facts.begin(), document.facts.end());
  const double names = names_width(facts);
  flow.rule(0.4, {Role::kMuted});
  flow.advance(4);
  if (!document.command.empty()) {
    draw_long_fact(flow, {"command", document.command}, names, kCommand);
  }
  draw_facts(flow, facts, names);
  flow.advance(5);
  flow.rule(0.4, {Role::kMuted});
}

void draw_trained(Flow& flow, const std::vector<Fact>& trained) {
  if (trained.empty()) return;
  flow.advance(5);
  flow.need(kBoxTitle.leading + 2 * kFact.leading);
  flow.paragraph("What was trained", kBoxTitle);
  draw_facts(flow, trained, names_width(trained));
  flow.advance(5);
  flow.rule(0.4, {Role::kMuted});
}

// Draws the author's words beside a bar, apart from what was measured.
void draw_words(Flow& flow, const Words& words, const std::string& author) {
  const auto blocks = blocks_of(words);
  if (blocks.empty()) return;
  const auto barred = [&](const std::string& text, const Setting& setting, double indent) {
    for (const auto& line : wrap_lines(text, setting.font, flow.width() - indent)) {
      flow.need(setting.leading);
      flow.page().rectangle({flow.left(), flow.y(), 2, setting.leading}, {Role::kPalette, 0});
      flow.line(line, setting, indent);
    }
  };
  flow.space(4);
  flow.need(kOwnLabel.leading + 2 * kText.leading);
  barred(notes_label(author), kOwnLabel, kOwnIndent);
  for (const auto& block : blocks) {
    if (block.item) {
      barred("• " + block.text, kText, kOwnIndent + 6);
    } else {
      barred(block.text, kText, kOwnIndent);
    }
  }
  flow.space(3);
}

// One figure or two side by side, with captions.
class FigureRow {
 public:
  FigureRow(const Section& section, std::vector<size_t> indices, size_t first_number, double width)
      : section_(section), indices_(std::move(indices)) {
    const auto count = static_cast<double>(indices_.size());
    column_ = (width - (count - 1) * kBetweenCharts) / count;
    for (size_t i = 0; i < indices_.size(); ++i) {
      const Figure& figure = section_.figures[indices_[i]];
      chart_height_ = std::max(chart_height_, chart_height(figure.chart, column_, kChartFont));
      timeline_ = timeline_ || std::holds_alternative<Timeline>(figure.chart);
      captions_.push_back(
          wrap_lines(fmt::format("Figure {}. {}", first_number + indices_[i], figure.caption),
                     kCaption.font, column_));
      if (captions_.back().size() > kMostCaptionLines) captions_.back().resize(kMostCaptionLines);
      caption_lines_ = std::max(caption_lines_, captions_.back().size());
    }
  }

  double height() const { return chart_height_ + caption_height(); }

  /// Charts become lower to fill the rest of a page. A timeline's rows do not.
  double least_height() const {
    return chart_height_ * (timeline_ ? 1 : kLeastChart) + caption_height();
  }

  /// Draws into what is left of the page, where the least height fits.
  void draw(Flow& flow) {
    chart_height_ = std::min(chart_height_, flow.rest() - caption_height());
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
  static constexpr size_t kMostCaptionLines = 16;  // so that a figure with its caption fits a page

  double caption_height() const {
    return 4 + static_cast<double>(caption_lines_) * kCaption.leading;
  }

  const Section& section_;
  std::vector<size_t> indices_;
  double column_ = 0;
  double chart_height_ = 0;
  bool timeline_ = false;
  std::vector<std::vector<std::string>> captions_;  // [figure][line]
  size_t caption_lines_ = 0;
};

double question_lead(const Question& question, double width) {
  return set_height(numbered(question), kQuestion, width) +
         lead_height(question.answer, kText, width);
}

// Tables and figures are numbered through the document.
struct Numbers {
  size_t table = 1;
  size_t figure = 1;
};

// The height that must follow a section's heading on the same page.
double section_lead(const Section& section, const Numbers& numbers, const Flow& flow) {
  if (!section.tables.empty()) {
    const PageTable table(section.tables.front(), numbers.table, flow.width(), flow.page_height());
    return table.lead_height();
  }
  if (!section.figures.empty()) {
    return FigureRow(section, figure_rows(section.figures).front(), numbers.figure, flow.width())
        .least_height();
  }
  return section.questions.empty() ? 0 : question_lead(section.questions.front(), flow.width());
}

void draw_section(Flow& flow, const Section& section, Numbers& numbers, const std::string& author) {
  // A heading stands above its own figure, not above one of an earlier section.
  if (section.tables.empty() && !section.figures.empty()) flow.flush_floats();
  if (!section.heading.empty()) {
    flow.space(kBeforeHeading);
    const double heading = set_height(section.heading, kHeading, flow.width()) + 4;
    flow.need(heading + section_lead(section, numbers, flow));
    flow.page().bookmark(flow.y(), section.heading, 0);
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
  for (const auto& indices : figure_rows(section.figures)) {
    FigureRow row(section, indices, numbers.figure, flow.width());
    const double least = row.least_height();
    flow.float_block(least, first ? 0 : kBetweenBlocks,
                     [row = std::move(row)](Flow& page) mutable { row.draw(page); });
    first = false;
  }
  numbers.figure += section.figures.size();
  for (const auto& question : section.questions) {
    space(7);
    flow.need(question_lead(question, flow.width()));
    flow.page().bookmark(flow.y(), numbered(question), 1);
    flow.paragraph(numbered(question), kQuestion);
    flow.paragraph(question.answer, kText);
    draw_words(flow, question.notes, author);
  }
  draw_words(flow, section.notes, author);
}

double baseline_of(const Setting& setting) {
  return (setting.leading - setting.font.size) / 2 + kAscent * setting.font.size;
}

// Text that leads to a file beside the report, `indent` from the left edge. Does not advance.
void draw_link(Flow& flow, double indent, const std::string& text, const std::string& path,
               const Setting& setting) {
  const double x = flow.left() + indent;
  flow.page().text({x, flow.y() + baseline_of(setting)}, text,
                   {.font = setting.font, .colour = setting.colour});
  flow.page().link({x, flow.y(), text_width(text, setting.font), setting.leading}, path);
}

// Numbered lines. A long line goes on below, without a number.
void draw_listing(Flow& flow, const Listing& listing) {
  const auto lines = lines_of(listing.text);
  const double numbers = text_width(std::to_string(lines.size()), kCode.font);
  const double indent = numbers + 8;
  flow.space(kBetweenBlocks);
  flow.need(kQuestion.leading + 4 * kCode.leading);
  flow.page().bookmark(flow.y(), listing.name, 1);
  draw_link(flow, 0, fit_text(listing.name, kListing.font, flow.width()), "code/" + listing.name,
            kListing);
  flow.advance(kListing.leading);
  flow.advance(2);
  for (size_t i = 0; i < lines.size(); ++i) {
    bool first = true;
    for (const auto& part : fold_line(lines[i], kCode.font, flow.width() - indent)) {
      flow.need(kCode.leading);
      if (first) {
        flow.page().text({flow.left() + numbers, flow.y() + baseline_of(kCode)},
                         std::to_string(i + 1),
                         {.font = kCode.font, .colour = {Role::kMuted}, .anchor = Anchor::kEnd});
      }
      first = false;
      flow.line(part, kCode, indent);
    }
  }
}

// Names of files, one after the other, each with a link.
void draw_links(Flow& flow, const std::vector<RecordLink>& files) {
  double x = 0;
  for (const auto& file : files) {
    const bool last = &file == &files.back();
    const std::string name = fit_text(file.name, kFile.font, flow.width() - 4);
    const double width = text_width(name, kFile.font);
    if (x > 0 && x + width + 4 > flow.width()) {
      flow.advance(kFile.leading);
      x = 0;
    }
    flow.need(kFile.leading);
    draw_link(flow, x, name, file.path, kFile);
    flow.page().text({flow.left() + x + width, flow.y() + baseline_of(kCaption)}, last ? "." : ",",
                     {.font = kCaption.font, .colour = kCaption.colour});
    x += width + text_width(", ", kCaption.font);
  }
  flow.advance(kFile.leading);
}

void draw_code(Flow& flow, const Document& document) {
  if (document.code.empty()) return;
  flow.space(kBeforeHeading);
  flow.need(kHeading.leading + kBetweenBlocks + kQuestion.leading + 6 * kCode.leading);
  flow.page().bookmark(flow.y(), "Code", 0);
  flow.paragraph("Code", kHeading);
  for (const auto& listing : listings_of(document, true)) draw_listing(flow, listing);
  std::vector<RecordLink> others;
  for (const auto& listing : listings_of(document, false)) {
    others.push_back({listing.name, "code/" + listing.name});
  }
  if (others.empty()) return;
  flow.space(kBetweenBlocks);
  flow.need(2 * kCaption.leading);
  flow.paragraph("Also run, and in the folder code beside this file:", kCaption);
  draw_links(flow, others);
}

void draw_records(Flow& flow, const Document& document) {
  if (document.records.empty()) return;
  flow.space(kBeforeHeading);
  flow.need(3 * kCaption.leading);
  flow.page().bookmark(flow.y(), "Records", 0);
  flow.paragraph(
      fmt::format("Everything measured above is made from {} record{} in the folder records beside "
                  "this file:",
                  document.records.size(), document.records.size() > 1 ? "s" : ""),
      kCaption);
  draw_links(flow, document.records);
}

void draw_foot(Drawing& page, const std::string& title, size_t number, size_t count) {
  const Font font{.size = 7};
  const double rule = kPrinted.bottom() - 11;
  const double baseline = kPrinted.bottom() - kDescent * font.size - 0.2;
  page.line({kPrinted.x, rule}, {kPrinted.right(), rule}, {.colour = {Role::kGrid}, .width = 0.4});
  const std::string page_number = fmt::format("page {} of {}", number, count);
  const double room = kPrinted.width - text_width(page_number, font) - 20;
  page.text({kPrinted.x, baseline}, fit_text(title, font, room),
            {.font = font, .colour = {Role::kMuted}});
  page.text({kPrinted.right(), baseline}, page_number,
            {.font = font, .colour = {Role::kMuted}, .anchor = Anchor::kEnd});
}

}  // namespace

std::vector<Drawing> lay_out_pages(const Document& document) {
  require_font();
  Flow flow(kBody);
  flow.paragraph(document.title, kPageTitle);
  if (!document.author.empty()) flow.paragraph(document.author, kAuthor);
  flow.advance(6);
  draw_stamp(flow, document);
  draw_trained(flow, document.trained);
  if (!document.warning.empty()) {
    flow.space(8);
    flow.paragraph(document.warning, kQuestion);
  }
  draw_words(flow, document.notes, document.author);
  Numbers numbers;
  for (const auto& section : document.sections) {
    draw_section(flow, section, numbers, document.author);
  }
  flow.flush_floats();
  draw_records(flow, document);
  draw_code(flow, document);
  std::vector<Drawing> pages = flow.take();
  for (size_t i = 0; i < pages.size(); ++i) {
    draw_foot(pages[i], document.title, i + 1, pages.size());
  }
  return pages;
}

}  // namespace lockstep
