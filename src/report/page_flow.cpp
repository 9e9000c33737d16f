#include "report/page_flow.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace lockstep {
namespace {

// How many of a paragraph's first lines stay together: two, or three if one would be left over.
double lead_of(size_t lines) {
  return static_cast<double>(lines == 3 ? 3 : std::min<size_t>(lines, 2));
}

constexpr double kAfterFloat = 12;
constexpr size_t kLeastRows = 3;     // of a table on one page
constexpr double kMostNotes = 60;    // of a table's notes, below its last row
constexpr double kWholeTable = 0.2;  // of a page; a lower table is not divided
constexpr double kLargestFont = 7.8;
constexpr double kSmallestFont = 6.4;
constexpr double kLeastGap = 9;
constexpr double kMostGap = 30;
constexpr double kLeading = 1.3;  // of the font size
constexpr double kPadding = 2.3;  // above and below the text of a row
constexpr double kHeavyRule = 0.8;
constexpr double kLightRule = 0.4;
constexpr double kHairline = 0.3;
constexpr Setting kTableTitle{{.size = 8.8, .bold = true}, 13.5, {}};
constexpr Setting kNote{{.size = 7.2}, 9.8, {Role::kMuted}};

// The width that a column needs in a font of size 1: with nothing broken, with cells unbroken, and
// broken between all words.
struct Need {
  double with_header = 0;
  double whole = 0;
  double word = 0;
};

std::vector<Need> needs_of(const Table& table) {
  std::vector<Need> needs;
  for (size_t column = 0; column < table.columns().size(); ++column) {
    const Font bold{.size = 1, .bold = true};
    const std::string& header = table.columns()[column].header;
    const double unbroken = text_width(header, bold);
    Need need{unbroken, widest_word(header, bold), widest_word(header, bold)};
    for (const auto& row : table.rows()) {
      need.whole = std::max(need.whole, text_width(row[column], {.size = 1}));
      need.word = std::max(need.word, widest_word(row[column], {.size = 1}));
    }
    need.with_header = std::max(need.whole, unbroken);
    // A header is broken if it would make its column much wider than the cells do.
    if (unbroken <= need.whole * 1.6) need.whole = need.with_header;
    needs.push_back(need);
  }
  return needs;
}

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// Divides `room` among the columns. All words fit if that is possible, and the rest is shared in
// proportion to the text that each column must break. Columns of numbers are the last to be broken.
std::vector<double> share_room(const Table& table, const std::vector<Need>& needs, double room,
                               double size) {
  std::vector<double> least;
  for (size_t i = 0; i < needs.size(); ++i) {
    const bool numbers = table.columns()[i].align == Align::kRight;
    least.push_back(size * (numbers ? needs[i].whole : needs[i].word));
  }
  if (sum(least) > room) {
    for (size_t i = 0; i < needs.size(); ++i) least[i] = size * needs[i].word;
  }
  const double taken = sum(least);
  if (taken >= room) {  // words must be broken too
    for (double& width : least) width *= room / taken;
    return least;
  }
  double wanted = 0;
  for (size_t i = 0; i < needs.size(); ++i) wanted += size * needs[i].whole - least[i];
  const double share = wanted > 0 ? std::min(1.0, (room - taken) / wanted) : 0;
  for (size_t i = 0; i < needs.size(); ++i) {
    least[i] += share * (size * needs[i].whole - least[i]);
  }
  return least;
}

}  // namespace

void Flow::new_page() {
  pages_.emplace_back();
  y_ = body_.y;
  draw_waiting();
}

void Flow::need(double height) {
  while (!fits(height) && !at_top()) new_page();
}

void Flow::draw_waiting() {
  while (!waiting_.empty() && (at_top() || fits(waiting_.front().height))) {
    const Waiting block = std::move(waiting_.front());
    waiting_.pop_front();
    block.draw(*this);
    y_ += kAfterFloat;
  }
}

void Flow::float_block(double height, double before, Draw draw) {
  if (waiting_.empty() && (at_top() || fits(before + height))) {
    space(before);
    draw(*this);
  } else {
    waiting_.push_back({height, std::move(draw)});
  }
}

void Flow::flush_floats() {
  if (waiting_.empty()) return;
  space(kAfterFloat);
  draw_waiting();
  while (!waiting_.empty()) new_page();
}

void Flow::space(double height) {
  if (!at_top()) y_ += height;
}

void Flow::line(const std::string& text, const Setting& setting, double indent) {
  need(setting.leading);
  const double baseline =
      y_ + (setting.leading - setting.font.size) / 2 + kAscent * setting.font.size;
  page().text({body_.x + indent, baseline}, text, {.font = setting.font, .colour = setting.colour});
  y_ += setting.leading;
}

void Flow::paragraph(const std::string& text, const Setting& setting) {
  const auto lines = wrap_lines(text, setting.font, body_.width);
  need(lead_of(lines.size()) * setting.leading);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines.size() - i == 2) need(2 * setting.leading);
    line(lines[i], setting);
  }
}

void Flow::rule(double thickness, Colour colour) {
  page().line({body_.x, y_}, {body_.x + body_.width, y_}, {.colour = colour, .width = thickness});
}

double set_height(const std::string& text, const Setting& setting, double width) {
  return static_cast<double>(wrap_lines(text, setting.font, width).size()) * setting.leading;
}

double lead_height(const std::string& text, const Setting& setting, double width) {
  return lead_of(wrap_lines(text, setting.font, width).size()) * setting.leading;
}

PageTable::PageTable(const Table& table, size_t number, double width, double page_height)
    : table_(table),
      title_(fmt::format("Table {}. {}", number, table.title())),
      page_width_(width),
      page_height_(page_height) {
  choose_widths(width);
  std::vector<std::string> headers;
  for (const auto& column : table.columns()) headers.push_back(column.header);
  header_ = make_row(headers, {.size = font_size_, .bold = true});
  // A header may take a third of a page, and a row the rest.
  shorten(header_, page_height / 3);
  const double most = page_height - header_.height - kPadding;
  for (const auto& row : table.rows()) add_row(row, most);
}

void PageTable::choose_widths(double width) {
  auto needs = needs_of(table_);
  if (needs.empty()) return;
  const auto gaps = static_cast<double>(needs.size() - 1);
  double with_headers = 0;
  for (const auto& need : needs) with_headers += need.with_header;
  if (with_headers * kLargestFont <= width - gaps * kLeastGap) {  // there is room for all
    for (auto& need : needs) need.whole = need.with_header;
  }
  double whole = 0;
  for (const auto& need : needs) whole += need.whole;
  // Use the largest font in which no cell is broken, or else a medium one with broken cells.
  const double room = std::max(width - gaps * kLeastGap, width * 0.5);
  font_size_ = std::min(kLargestFont, whole > 0 ? room / whole : kLargestFont);
  if (font_size_ < kSmallestFont) font_size_ = (kLargestFont + kSmallestFont) / 2;
  widths_ = share_room(table_, needs, room, font_size_);
  const double left_over = width - sum(widths_);
  const double gap = gaps > 0 ? std::min(left_over / gaps, kMostGap) : 0;
  double left = 0;
  for (const double column : widths_) {
    lefts_.push_back(left);
    left += column + gap;
  }
}

double PageTable::right_edge() const {
  return widths_.empty() ? 0 : lefts_.back() + widths_.back();
}

PageTable::Row PageTable::make_row(const std::vector<std::string>& texts, const Font& font) const {
  Row row;
  size_t lines = 1;
  for (size_t i = 0; i < texts.size(); ++i) {
    // Slightly wider, so that rounding does not break the widest cell.
    row.cells.push_back(wrap_lines(texts[i], font, widths_[i] + 0.01));
    lines = std::max(lines, row.cells.back().size());
  }
  row.height = static_cast<double>(lines) * font_size_ * kLeading + 2 * kPadding;
  return row;
}

void PageTable::shorten(Row& row, double most_height) const {
  if (row.height <= most_height) return;
  const auto lines = static_cast<size_t>((most_height - 2 * kPadding) / (font_size_ * kLeading));
  for (auto& cell : row.cells) cell.resize(std::min(cell.size(), lines));
  row.height = static_cast<double>(lines) * font_size_ * kLeading + 2 * kPadding;
}

void PageTable::add_row(const std::vector<std::string>& texts, double most_height) {
  Row whole = make_row(texts, {.size = font_size_});
  if (whole.height <= most_height) {
    rows_.push_back(std::move(whole));
    return;
  }
  // A row that is longer than a page is divided.
  const auto most_lines =
      static_cast<size_t>(std::max(1.0, (most_height - 2 * kPadding) / (font_size_ * kLeading)));
  size_t lines = 0;
  for (const auto& cell : whole.cells) lines = std::max(lines, cell.size());
  for (size_t begin = 0; begin < lines; begin += most_lines) {
    Row part;
    for (const auto& cell : whole.cells) {
      const size_t from = std::min(begin, cell.size());
      const size_t to = std::min(begin + most_lines, cell.size());
      part.cells.emplace_back(cell.begin() + static_cast<std::ptrdiff_t>(from),
                              cell.begin() + static_cast<std::ptrdiff_t>(to));
    }
    part.height = static_cast<double>(std::min(most_lines, lines - begin)) * font_size_ * kLeading +
                  2 * kPadding;
    rows_.push_back(std::move(part));
  }
}

double PageTable::notes_height() const {
  double height = 4;
  for (const auto& note : table_.notes()) height += set_height(note, kNote, page_width_);
  return height;
}

double PageTable::height() const {
  double height = set_height(title_, kTableTitle, page_width_) + 2 + header_.height;
  for (const auto& row : rows_) height += row.height;
  return height + notes_height();
}

double PageTable::needed_before(size_t index) const {
  const size_t left = rows_.size() - index;
  // The last rows go together, and so do the first ones.
  const size_t together = index == 0 || left == kLeastRows ? std::min(left, kLeastRows) : 1;
  double height = 0;
  for (size_t i = index; i < index + together; ++i) height += rows_[i].height;
  if (height > page_height_ / 2) return rows_[index].height;
  return index + together == rows_.size() ? height + std::min(notes_height(), kMostNotes) : height;
}

double PageTable::lead_height() const {
  const double title = set_height(title_, kTableTitle, page_width_) + 2 + header_.height;
  const bool whole = height() < kWholeTable * page_height_ || rows_.size() < 2 * kLeastRows;
  if (whole && height() < page_height_) return height();
  return title + (rows_.empty() ? 0 : needed_before(0));
}

void PageTable::draw_row(Flow& flow, const Row& row, const Font& font, bool at_bottom) const {
  const double leading = font_size_ * kLeading;
  for (size_t column = 0; column < row.cells.size(); ++column) {
    const auto& lines = row.cells[column];
    const bool right = table_.columns()[column].align == Align::kRight;
    const double x = flow.left() + lefts_[column] + (right ? widths_[column] : 0);
    double y = flow.y() + kPadding + (leading - font.size) / 2 + kAscent * font.size;
    if (at_bottom)
      y = flow.y() + row.height - kPadding - kDescent * font.size -
          (static_cast<double>(lines.size()) - 1) * leading;
    for (const auto& line : lines) {
      flow.page().text(
          {x, y}, line,
          {.font = font, .colour = {}, .anchor = right ? Anchor::kEnd : Anchor::kStart});
      y += leading;
    }
  }
  flow.advance(row.height);
}

void PageTable::draw_header(Flow& flow) const {
  const auto rule = [&](double thickness) {
    flow.page().line({flow.left(), flow.y()}, {flow.left() + right_edge(), flow.y()},
                     {.colour = {}, .width = thickness});
  };
  rule(kHeavyRule);
  draw_row(flow, header_, {.size = font_size_, .bold = true}, true);
  rule(kLightRule);
}

void PageTable::draw(Flow& flow) const {
  flow.need(lead_height());
  flow.page().bookmark(flow.y(), title_, 1);
  flow.paragraph(title_, kTableTitle);
  flow.advance(2);
  flow.need(header_.height + (rows_.empty() ? 0 : rows_.front().height));
  draw_header(flow);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const auto rule = [&](double thickness, Colour colour) {
      flow.page().line({flow.left(), flow.y()}, {flow.left() + right_edge(), flow.y()},
                       {.colour = colour, .width = thickness});
    };
    if (i > 0 && !flow.fits(needed_before(i))) {
      rule(kLightRule, {});
      flow.need(needed_before(i) + header_.height);
      draw_header(flow);
    } else if (i > 0) {
      rule(kHairline, {Role::kGrid});
    }
    draw_row(flow, rows_[i], {.size = font_size_}, false);
  }
  flow.page().line({flow.left(), flow.y()}, {flow.left() + right_edge(), flow.y()},
                   {.colour = {}, .width = kHeavyRule});
  flow.advance(4);
  for (const auto& note : table_.notes()) flow.paragraph(note, kNote);
}

}  // namespace lockstep
