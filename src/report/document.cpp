#include "report/document.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <filesystem>

#include "base/file.hpp"
#include "base/utf8.hpp"
#include "report/draw_chart.hpp"
#include "report/svg.hpp"

namespace lockstep {
namespace {

// One line of text without special characters of Markdown.
std::string markdown_text(std::string_view text) {
  std::string escaped;
  for (const char c : escape_markdown(clean_text(text))) {
    if (c == '[' || c == ']') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

// Text between more backquotes than it contains in a row.
std::string markdown_code(std::string_view text) {
  const std::string clean = clean_text(text);
  std::string fence = "`";
  while (clean.find(fence) != std::string::npos) fence += '`';
  return fence.size() > 1 ? fence + " " + clean + " " + fence : fence + clean + fence;
}

constexpr const char* kPageStyle = R"(
*{box-sizing:border-box}
html{color-scheme:light dark;background:var(--paper);color:var(--ink);
-webkit-text-size-adjust:100%}
body{max-width:66rem;margin:0 auto;padding:2.2rem 1.4rem 3rem;
font:15px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 1rem}
h2{font-size:1.2rem;margin:2.4rem 0 .8rem;padding-bottom:.3rem;
border-bottom:1px solid var(--grid)}
h3{font-size:1rem;margin:1.4rem 0 .3rem}
p{margin:.3rem 0 .8rem;max-width:52rem}
a{color:inherit;text-underline-offset:.15em}
code{font:.88em 'DejaVu Sans Mono',ui-monospace,Consolas,monospace;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));gap:.25rem 2rem;
margin:0;padding:.8rem 0;border:solid var(--grid);border-width:1px 0;font-size:.86rem}
dl div{display:flex;gap:.6rem}
dl div.full{grid-column:1/-1}
dt{color:var(--muted);flex:0 0 5.2rem}
dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:.4rem 0 1.8rem}
table{border-collapse:collapse;font-size:.86rem;font-variant-numeric:tabular-nums;
border-bottom:1.5px solid var(--ink)}
caption{text-align:left;font-weight:600;padding:0 0 .45rem;font-size:.95rem}
th{text-align:left;font-weight:600;vertical-align:bottom;border-top:1.5px solid var(--ink);
border-bottom:1px solid var(--ink)}
th,td{padding:.32rem 1.1rem .32rem 0}
td{vertical-align:top;border-bottom:1px solid var(--grid)}
th:last-child,td:last-child{padding-right:.2rem}
th:first-child,td:first-child{white-space:nowrap}
.r{text-align:right;white-space:nowrap}
.note{color:var(--muted);font-size:.82rem;margin:.35rem 0 0;max-width:60rem}
.row{display:flex;flex-wrap:wrap;gap:1.2rem 1.6rem;margin:1rem 0}
figure{margin:0;flex:1 1 22rem;min-width:0;max-width:40rem}
figure.wide{flex-basis:100%;max-width:none}
figure.wide .scroll{margin:0}
figure.wide svg{min-width:40rem}
svg{display:block;width:100%;height:auto}
figcaption{color:var(--muted);font-size:.82rem;margin-top:.35rem}
.records{columns:16rem;font-size:.86rem;padding-left:1.2rem}
@media (max-width:48rem){td:not(.r):not(:first-child){min-width:7rem}}
@media (max-width:34rem){body{padding:1.2rem .9rem 2rem}h1{font-size:1.35rem}}
@media print{@page{size:A4;margin:16mm 15mm}body{max-width:none;padding:0;font-size:9.5pt}
.scroll{overflow:visible}figure.wide svg{min-width:0}h2,h3,caption{break-after:avoid}
tr,figure,.row{break-inside:avoid}thead{display:table-header-group}p{orphans:2;widows:2}figure{
flex-basis:14rem}}
)";

std::string fact_html(const std::string& name, const std::string& value_html, bool full = false) {
  return fmt::format("<div{}><dt>{}</dt><dd>{}</dd></div>\n", full ? " class=\"full\"" : "",
                     escape_xml(name), value_html);
}

std::string facts_html(const Document& document) {
  std::string html = "<dl>\n";
  if (!document.command.empty()) {
    html += fact_html("command", "<code>" + escape_xml(document.command) + "</code>", true);
  }
  html += fact_html("date", format_date(document.date));
  for (const auto& [name, value] : document.facts) html += fact_html(name, escape_xml(value));
  return html + "</dl>\n";
}

std::string table_html(const Table& table, size_t number) {
  const std::string title = escape_xml(table.title());
  std::string html = fmt::format(
      "<div class=\"scroll\" role=\"region\" aria-label=\"{0}\" tabindex=\"0\">\n<table>\n"
      "<caption>Table {1}. {0}</caption>\n<thead><tr>",
      title, number);
  const auto open = [&](const char* tag, size_t column) {
    const bool right = table.columns()[column].align == Align::kRight;
    return fmt::format("<{}{}{}>", tag, tag[1] == 'h' ? " scope=\"col\"" : "",
                       right ? " class=\"r\"" : "");
  };
  for (size_t i = 0; i < table.columns().size(); ++i) {
    html += open("th", i) + escape_xml(table.columns()[i].header) + "</th>";
  }
  html += "</tr></thead>\n<tbody>\n";
  for (const auto& row : table.rows()) {
    html += "<tr>";
    for (size_t i = 0; i < row.size(); ++i) html += open("td", i) + escape_xml(row[i]) + "</td>";
    html += "</tr>\n";
  }
  html += "</tbody>\n</table>\n";
  for (const auto& note : table.notes()) html += "<p class=\"note\">" + escape_xml(note) + "</p>\n";
  return html + "</div>\n";
}

std::string figure_html(const Figure& figure, size_t number) {
  const bool wide = is_wide(figure.chart);
  const std::string svg =
      render_svg(figure.chart, fmt::format("figure-{}", number), SvgTarget::kInPage);
  return fmt::format("<figure{}>\n{}{}{}<figcaption>Figure {}. {}</figcaption>\n</figure>\n",
                     wide ? " class=\"wide\"" : "", wide ? "<div class=\"scroll\">\n" : "", svg,
                     wide ? "</div>\n" : "", number, escape_xml(figure.caption));
}

std::string figures_html(const std::vector<Figure>& figures, size_t& number) {
  std::string html;
  for (const auto& row : figure_rows(figures)) {
    html += "<div class=\"row\">\n";
    for (const size_t index : row) html += figure_html(figures[index], ++number);
    html += "</div>\n";
  }
  return html;
}

std::string records_html(const std::vector<RecordLink>& records) {
  if (records.empty()) return "";
  std::string html =
      "<section>\n<h2>Records</h2>\n<p>Everything above is made from these files, one per run."
      "</p>\n<ul class=\"records\">\n";
  for (const auto& [name, path] : records) {
    html += fmt::format("<li><a href=\"{}\">{}</a></li>\n", encode_link(path), escape_xml(name));
  }
  return html + "</ul>\n</section>\n";
}

}  // namespace

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

std::string render_markdown(const Document& document) {
  std::string text = fmt::format("# {}\n\n", markdown_text(document.title));
  text += fmt::format("- date: {}\n", format_date(document.date));
  if (!document.command.empty())
    text += fmt::format("- command: {}\n", markdown_code(document.command));
  for (const auto& [name, value] : document.facts) {
    text += fmt::format("- {}: {}\n", markdown_text(name), markdown_text(value));
  }
  size_t figure_number = 0;
  for (const auto& section : document.sections) {
    if (!section.heading.empty()) text += fmt::format("\n## {}\n", markdown_text(section.heading));
    for (const auto& table : section.tables) text += "\n" + table.markdown();
    for (const auto& figure : section.figures) {
      ++figure_number;
      text += fmt::format("\n![{0}](figure-{1}.svg)\n\nFigure {1}. {2}\n",
                          markdown_text(chart_title(figure.chart)), figure_number,
                          markdown_text(figure.caption));
    }
    for (const auto& [question, answer] : section.questions) {
      text += fmt::format("\n**{}** {}\n", markdown_text(question), markdown_text(answer));
    }
  }
  if (document.records.empty()) return text;
  text += "\n## Records\n\nEverything above is made from these files, one per run.\n\n";
  for (const auto& [name, path] : document.records) {
    text += fmt::format("- [{}]({})\n", markdown_text(name), encode_link(path));
  }
  return text;
}

std::string render_html(const Document& document) {
  const std::string title = escape_xml(document.title);
  std::string html = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  html += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  html += fmt::format("<title>{}</title>\n<style>{}{}{}</style>\n</head>\n<body>\n", title,
                      colour_style(":root"), kPageStyle, svg_style());
  html += fmt::format("<header>\n<h1>{}</h1>\n{}</header>\n<main>\n", title, facts_html(document));
  size_t tables = 0;
  size_t figures = 0;
  for (const auto& section : document.sections) {
    html += "<section>\n";
    if (!section.heading.empty()) html += "<h2>" + escape_xml(section.heading) + "</h2>\n";
    for (const auto& table : section.tables) html += table_html(table, ++tables);
    html += figures_html(section.figures, figures);
    for (const auto& [question, answer] : section.questions) {
      html += fmt::format("<h3>{}</h3>\n<p>{}</p>\n", escape_xml(question), escape_xml(answer));
    }
    html += "</section>\n";
  }
  return html + records_html(document.records) + "</main>\n</body>\n</html>\n";
}

void write_report(const Document& document, const std::string& folder) {
  const std::filesystem::path out(folder);
  const auto figures = all_figures(document);
  for (size_t i = 0; i < figures.size(); ++i) {
    const std::string name = fmt::format("figure-{}", i + 1);
    write_file_atomically((out / (name + ".svg")).string(),
                          render_svg(figures[i].chart, name, SvgTarget::kFile));
  }
  write_file_atomically((out / "report.md").string(), render_markdown(document));
  write_file_atomically((out / "report.html").string(), render_html(document));
  write_file_atomically((out / "report.pdf").string(), render_pdf(document));
}

}  // namespace lockstep
