#pragma once

#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/table.hpp"
#include "report/chart.hpp"

namespace lockstep {

/// One fact about the run's environment or its training: "host cpu", "AMD EPYC".
struct Fact {
  std::string name;
  std::string value;
};

/// The author's own words, in the little Markdown that a report shows: paragraphs, and items of a
/// list, which start with "- ". Blocks are separated by blank lines.
using Words = std::string;

struct Question {
  std::string question;
  std::string answer;
  std::string number = {};  ///< "2.1", by which notes refer to it; may be empty
  Words notes = {};         ///< the author's, shown apart from the measured answer
};

/// Tables come first, then figures, then questions.
struct Section {
  std::string heading = {};
  std::vector<Table> tables = {};
  std::vector<Figure> figures = {};
  std::vector<Question> questions = {};
  Words notes = {};  ///< the author's, at the end of the section
};

/// A file beside the report.
struct RecordLink {
  std::string name;
  std::string path;  ///< relative to the report's folder
};

/// Source code that was run.
struct Listing {
  std::string name;  ///< of its file: "homework2_combined.cpp"
  std::string text;
  bool printed = true;  ///< in the report; else it has only a link to its file
};

/// A report, independent of its format.
struct Document {
  std::string title = {};
  std::time_t date = 0;
  std::string command = {};        ///< the command line that made it
  std::vector<Fact> facts = {};    ///< host and versions
  std::string author = {};         ///< who hands it in; may be empty
  std::vector<Fact> trained = {};  ///< what was trained; empty: the report does not say
  std::string warning = {};        ///< why the figures cannot be relied on; may be empty
  Words notes = {};                ///< the author's, before everything else
  std::vector<Section> sections = {};
  std::vector<RecordLink> records = {};
  std::vector<Listing> code = {};  ///< each is also written to code/<name>
};

/// The end of the year 9999: no later date can be shown.
inline constexpr std::time_t kLastDate = 253'402'300'799;

/// "2026-01-02 03:04 UTC".
std::string format_date(std::time_t date);

/// Figures in the order of the document; the n-th is figure-n.svg.
std::vector<Figure> all_figures(const Document& document);

/// Which figures stand side by side, as rows of one or two indices.
std::vector<std::vector<size_t>> figure_rows(const std::vector<Figure>& figures);

/// A question with its number: "2.1 Is device 0 more loaded?".
std::string numbered(const Question& question);

/// A block of the author's words: a paragraph, or an item of a list.
struct WordBlock {
  std::string text;
  bool item = false;
};

/// The blocks of some words; line breaks inside of a block become spaces.
std::vector<WordBlock> blocks_of(const Words& words);

/// The listings that are printed, or those that are not.
std::vector<Listing> listings_of(const Document& document, bool printed);

/// The lines of a listing, with tabs as spaces.
std::vector<std::string> lines_of(std::string_view text);

/// What stands above the author's words: "Notes by Ada".
std::string notes_label(const std::string& author);

/// A relative path, percent-encoded for a link.
std::string encode_link(std::string_view path);

/// Markdown that links to figure-1.svg, figure-2.svg …, which must be written beside it.
std::string render_markdown(const Document& document);

/// A self-contained page: it includes its styles, its figures, and a script that zooms timelines.
/// Without scripts it shows the same figures.
std::string render_html(const Document& document);

/// A PDF of A4 pages. The same document gives the same bytes.
std::string render_pdf(const Document& document);

/// A file of a report: its path relative to the report's folder, and its bytes.
struct ReportFile {
  std::string path;
  std::string bytes;
};

/// report.html, report.pdf, report.md with its figures, and code/*.
std::vector<ReportFile> report_files(const Document& document);

/// Writes the files into a folder that exists. Nothing of the folder changes if one of them
/// cannot be rendered, and each file is replaced at once. An Error names the file that failed.
void write_report(const Document& document, const std::string& folder);
void write_files(const std::vector<ReportFile>& files, const std::string& folder);

}  // namespace lockstep
