#include "report/document.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "base/file.hpp"
#include "report/draw_chart.hpp"
#include "report/svg.hpp"

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
  bool open = false;  // whether the last row has a single narrow figure
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

std::string numbered(const Question& question) {
  return question.number.empty() ? question.question : question.number + " " + question.question;
}

std::vector<WordBlock> blocks_of(const Words& words) {
  std::vector<WordBlock> blocks;
  bool open = false;  // whether the next line continues the last block
  for (size_t begin = 0; begin < words.size();) {
    const size_t end = std::min(words.find('\n', begin), words.size());
    std::string line = words.substr(begin, end - begin);
    begin = end + 1;
    const size_t first = line.find_first_not_of(" \t\r");
    line.erase(0, std::min(first, line.size()));
    if (line.empty()) {
      open = false;
      continue;
    }
    const bool item = line.starts_with("- ") || line.starts_with("* ");
    if (item || !open) blocks.push_back({"", item});
    if (item) line.erase(0, 2);
    blocks.back().text += (blocks.back().text.empty() ? "" : " ") + line;
    open = true;
  }
  return blocks;
}

std::vector<Listing> listings_of(const Document& document, bool printed) {
  std::vector<Listing> listings;
  std::copy_if(document.code.begin(), document.code.end(), std::back_inserter(listings),
               [printed](const Listing& listing) { return listing.printed == printed; });
  return listings;
}

std::vector<std::string> lines_of(std::string_view text) {
  constexpr size_t kTab = 4;
  std::vector<std::string> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string line;
    for (const char c : text.substr(0, end)) {
      if (c == '\t') {
        line.append(kTab - line.size() % kTab, ' ');
      } else if (c != '\r') {
        line += c;
      }
    }
    lines.push_back(std::move(line));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

std::string notes_label(const std::string& author) {
  return author.empty() ? "Notes" : "Notes by " + author;
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

std::vector<ReportFile> report_files(const Document& document) {
  std::vector<ReportFile> files = {{"report.html", render_html(document)},
                                   {"report.pdf", render_pdf(document)},
                                   {"report.md", render_markdown(document)}};
  const auto figures = all_figures(document);
  for (size_t i = 0; i < figures.size(); ++i) {
    const std::string name = fmt::format("figure-{}", i + 1);
    files.push_back({name + ".svg", render_svg(figures[i].chart, name, SvgTarget::kFile)});
  }
  for (const auto& listing : document.code) {
    files.push_back({"code/" + listing.name, listing.text});
  }
  return files;
}

void write_files(const std::vector<ReportFile>& files, const std::string& folder) {
  const std::filesystem::path out(folder);
  for (const auto& [path, bytes] : files) {
    const std::filesystem::path parent = std::filesystem::path(path).parent_path();
    std::error_code ignored;  // the write names what is wrong with the folder
    if (!parent.empty()) std::filesystem::create_directory(out / parent, ignored);
    write_file_atomically((out / path).string(), bytes);
  }
}

void write_report(const Document& document, const std::string& folder) {
  write_files(report_files(document), folder);
}

}  // namespace lockstep
