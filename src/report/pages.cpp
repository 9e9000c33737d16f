#include "report/pages.hpp"

#include <cairo/cairo-pdf.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numbers>

#include "base/utf8.hpp"
#include "lockstep/error.hpp"
#include "report/cairo.hpp"
#include "report/draw_chart.hpp"
#include "report/page_flow.hpp"

namespace lockstep {
namespace {

constexpr Setting kPageTitle{{.size = 15, .bold = true}, 19, {}};
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

// Draws the command over the whole width and below it date and facts in two columns.
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
  while (half < lines.size() && lines[half].name.empty()) ++half;  // keeps each fact in one column
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
  static constexpr size_t kMostCaptionLines = 16;  // so that a figure with its caption fits a page

  const Section& section_;
  std::vector<size_t> indices_;
  double column_ = 0;
  double chart_height_ = 0;
  std::vector<std::vector<std::string>> captions_;  // [figure][line]
  size_t caption_lines_ = 0;
};

double question_lead(const Question& question, double width) {
  return set_height(question.question, kQuestion, width) +
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
  const std::string page_number = fmt::format("page {} of {}", number, count);
  const double room = kPrinted.width - text_width(page_number, font) - 20;
  page.text({kPrinted.x, baseline}, fit_text(title, font, room),
            {.font = font, .colour = {Role::kMuted}});
  page.text({kPrinted.right(), baseline}, page_number,
            {.font = font, .colour = {Role::kMuted}, .anchor = Anchor::kEnd});
}

uint32_t rgb_of(Colour colour) {
  switch (colour.role) {
    case Role::kInk:
      return 0x15181C;
    case Role::kMuted:
      return 0x5A626B;
    case Role::kGrid:
      return 0xD5DADF;
    case Role::kPaper:
      return 0xFFFFFF;
    case Role::kPalette:
      return kPalette.at(palette_index(colour.index));
    case Role::kOnPalette:
      break;
  }
  return palette_index(colour.index) == 0 ? 0xFFFFFF : 0x111111;
}

// Draws with Cairo in the colours of print.
class CairoCanvas final : public Canvas {
 public:
  // The context must outlive the canvas.
  explicit CairoCanvas(cairo_t* context) : context_(context) {}

  void segments(std::span<const Segment> lines, const Stroke& stroke) override;
  void polyline(std::span<const Point> points, const Stroke& stroke) override;
  void polygon(std::span<const Point> corners, Colour fill) override;
  void rectangle(const Box& box, Colour fill) override;
  void circle(Point centre, double radius, Colour fill) override;
  void text(Point at, std::string_view utf8, const TextStyle& style) override;

 private:
  void set_colour(Colour colour);
  void stroke_path(const Stroke& stroke);

  cairo_t* context_;
};

void CairoCanvas::set_colour(Colour colour) {
  const uint32_t rgb = rgb_of(colour);
  const auto part = [rgb](unsigned shift) {
    return static_cast<double>(rgb >> shift & 0xFFU) / 255;
  };
  cairo_set_source_rgb(context_, part(16), part(8), part(0));
}

void CairoCanvas::stroke_path(const Stroke& stroke) {
  set_colour(stroke.colour);
  const double w = stroke.width;
  const std::array dashed = {4 * w, 2.5 * w};
  const std::array dotted = {1.2 * w, 1.8 * w};
  const std::array dash_dot = {5 * w, 2 * w, 1.2 * w, 2 * w};
  std::span<const double> dashes;
  if (stroke.dash == Dash::kDashed) dashes = dashed;
  if (stroke.dash == Dash::kDotted) dashes = dotted;
  if (stroke.dash == Dash::kDashDot) dashes = dash_dot;
  cairo_set_dash(context_, dashes.data(), static_cast<int>(dashes.size()), 0);
  cairo_set_line_width(context_, w);
  cairo_stroke(context_);
}

void CairoCanvas::segments(std::span<const Segment> lines, const Stroke& stroke) {
  for (const auto& [from, to] : lines) {
    cairo_move_to(context_, from.x, from.y);
    cairo_line_to(context_, to.x, to.y);
  }
  stroke_path(stroke);
}

void CairoCanvas::polyline(std::span<const Point> points, const Stroke& stroke) {
  for (const auto& [x, y] : points) cairo_line_to(context_, x, y);
  stroke_path(stroke);
}

void CairoCanvas::polygon(std::span<const Point> corners, Colour fill) {
  for (const auto& [x, y] : corners) cairo_line_to(context_, x, y);
  cairo_close_path(context_);
  set_colour(fill);
  cairo_fill(context_);
}

void CairoCanvas::rectangle(const Box& box, Colour fill) {
  cairo_rectangle(context_, box.x, box.y, box.width, box.height);
  set_colour(fill);
  cairo_fill(context_);
}

void CairoCanvas::circle(Point centre, double radius, Colour fill) {
  cairo_new_sub_path(context_);
  cairo_arc(context_, centre.x, centre.y, radius, 0, 2 * std::numbers::pi);
  set_colour(fill);
  cairo_fill(context_);
}

void CairoCanvas::text(Point at, std::string_view utf8, const TextStyle& style) {
  const std::string clean = clean_text(utf8);
  const double width = text_width(clean, style.font);
  double left = 0;
  if (style.anchor == Anchor::kMiddle) left = -width / 2;
  if (style.anchor == Anchor::kEnd) left = -width;
  select_font(context_, style.font);
  set_colour(style.colour);
  cairo_save(context_);
  cairo_translate(context_, at.x, at.y);
  cairo_rotate(context_, style.rotation * std::numbers::pi / 180);
  cairo_move_to(context_, left, 0);
  cairo_show_text(context_, clean.c_str());
  cairo_restore(context_);
  cairo_new_path(context_);
}

cairo_status_t append_bytes(void* bytes, const unsigned char* data, unsigned int length) {
  static_cast<std::string*>(bytes)->append(reinterpret_cast<const char*>(data), length);
  return CAIRO_STATUS_SUCCESS;
}

void check_cairo(cairo_status_t status) {
  if (status == CAIRO_STATUS_SUCCESS) return;
  throw Error(Code::kFileWrite,
              fmt::format("cannot make the PDF: Cairo says {}", cairo_status_to_string(status)),
              "apt-get install fonts-dejavu-core");
}

}  // namespace

std::vector<Drawing> lay_out_pages(const Document& document) {
  require_font();
  Flow flow(kBody);
  flow.paragraph(document.title, kPageTitle);
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

std::string render_pdf(const Document& document) {
  const auto pages = lay_out_pages(document);
  std::string bytes;
  const CairoSurface surface(
      cairo_pdf_surface_create_for_stream(append_bytes, &bytes, kPageWidth, kPageHeight));
  check_cairo(cairo_surface_status(surface.get()));
  const std::string title = clean_text(document.title);
  cairo_pdf_surface_set_metadata(surface.get(), CAIRO_PDF_METADATA_TITLE, title.c_str());
  cairo_pdf_surface_set_metadata(surface.get(), CAIRO_PDF_METADATA_CREATOR, "lockstep");
  const std::string date = fmt::format("{:%Y-%m-%dT%H:%M:%S}Z", fmt::gmtime(document.date));
  cairo_pdf_surface_set_metadata(surface.get(), CAIRO_PDF_METADATA_CREATE_DATE, date.c_str());
  {
    const CairoContext context(cairo_create(surface.get()));
    CairoCanvas canvas(context.get());
    for (const auto& page : pages) {
      page.replay(canvas);
      cairo_show_page(context.get());
    }
    check_cairo(cairo_status(context.get()));
  }
  cairo_surface_finish(surface.get());
  check_cairo(cairo_surface_status(surface.get()));
  return bytes;
}

}  // namespace lockstep
