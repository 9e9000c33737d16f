#pragma once

#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/table.hpp"
#include "report/chart.hpp"

namespace lockstep {

/// One fact about the run's environment: "host cpu", "AMD EPYC".
struct Fact {
  std::string name;
  std::string value;
};

struct Question {
  std::string question;
  std::string answer;
};

/// Tables come first, then figures, then questions.
struct Section {
  std::string heading = {};
  std::vector<Table> tables = {};
  std::vector<Figure> figures = {};
  std::vector<Question> questions = {};
};

/// A file beside the report.
struct RecordLink {
  std::string name;
  std::string path;  ///< relative to the report's folder
};

/// A report, independent of its format.
struct Document {
  std::string title = {};
  std::time_t date = 0;
  std::string command = {};      ///< the command line that made it
  std::vector<Fact> facts = {};  ///< host and versions
  std::vector<Section> sections = {};
  std::vector<RecordLink> records = {};
};

/// "2026-01-02 03:04 UTC".
std::string format_date(std::time_t date);

/// Figures in the order of the document; the n-th is figure-n.svg.
std::vector<Figure> all_figures(const Document& document);

/// Which figures stand side by side, as rows of one or two indices.
std::vector<std::vector<size_t>> figure_rows(const std::vector<Figure>& figures);

/// A relative path, percent-encoded for a link.
std::string encode_link(std::string_view path);

/// Markdown that links to figure-1.svg, figure-2.svg …, which must be written beside it.
std::string render_markdown(const Document& document);

/// A self-contained page: it includes its styles and figures and has no script.
std::string render_html(const Document& document);

/// A PDF of A4 pages. The same document gives the same bytes.
std::string render_pdf(const Document& document);

/// Writes report.md with its figures, report.html and report.pdf into a folder that exists.
void write_report(const Document& document, const std::string& folder);

}  // namespace lockstep
