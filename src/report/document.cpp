#include "report/document.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <filesystem>

#include "lockstep/file.hpp"
#include "report/draw_chart.hpp"
#include "report/svg_canvas.hpp"

namespace lockstep {

std::string format_date(std::time_t date) {
  return fmt::format("{:%Y-%m-%d %H:%M} UTC", fmt::gmtime(date));
}

std::vector<Figure> all_figures(const Document& document) {
  std::vector<Figure> figures;
  for (const auto& section : document.sections) {
    figures.insert(figures.end(), section.figures.begin(), section.figures.end());
  }
  return figures;
}

std::vector<std::vector<size_t>> figure_rows(const std::vector<Figure>& figures) {
  std::vector<std::vector<size_t>> rows;
  bool open = false;  // the last row has one narrow figure
  for (size_t i = 0; i < figures.size(); ++i) {
    const bool wide = is_wide(figures[i].chart);
    if (open && !wide) {
      rows.back().push_back(i);
      open = false;
    } else {
      rows.push_back({i});
      open = !wide;
    }
  }
  return rows;
}

std::string encode_link(std::string_view path) {
  constexpr std::string_view kPlain =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/";
  std::string encoded;
  for (const char c : path) {
    if (kPlain.find(c) != std::string_view::npos) {
      encoded += c;
    } else {
      encoded += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return encoded;
}

void write_report(const Document& document, const std::string& folder) {
  const std::filesystem::path out(folder);
  const auto figures = all_figures(document);
  for (size_t i = 0; i < figures.size(); ++i) {
    const std::string name = fmt::format("figure-{}", i + 1);
    write_file_atomically((out / (name + ".svg")).string(),
                          render_svg(figures[i].chart, name, SvgPlace::kFile));
  }
  write_file_atomically((out / "report.md").string(), render_markdown(document));
  write_file_atomically((out / "report.html").string(), render_html(document));
  write_file_atomically((out / "report.pdf").string(), render_pdf(document));
}

}  // namespace lockstep
