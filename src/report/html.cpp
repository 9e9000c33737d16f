#include <fmt/format.h>

#include "report/document.hpp"
#include "report/draw_chart.hpp"
#include "report/svg.hpp"
#include "report/timeline_viewer.hpp"

namespace lockstep {
namespace {

constexpr size_t kDenseColumns = 9;  // tables with more are set in smaller letters
constexpr size_t kLongCell = 34;     // longer texts may be broken into lines

constexpr const char* kPageStyle = R"(
*{box-sizing:border-box}
html{color-scheme:light dark;background:var(--paper);color:var(--ink);
-webkit-text-size-adjust:100%}
body{max-width:72rem;margin:0 auto;padding:2.2rem 1.4rem 3rem;
font:15px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 1rem}
h2{font-size:1.2rem;margin:2.4rem 0 .8rem;padding-bottom:.3rem;
border-bottom:1px solid var(--grid)}
h3{font-size:1rem;margin:1.4rem 0 .3rem}
p{margin:.3rem 0 .8rem;max-width:52rem;overflow-wrap:break-word}
a{color:inherit;text-underline-offset:.15em}
code,pre{font:.88em/1.5 'DejaVu Sans Mono',ui-monospace,Consolas,monospace}
code{overflow-wrap:anywhere}
.author{font-size:1.05rem;margin:-.6rem 0 1rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(17rem,100%),1fr));
gap:.25rem 2rem;margin:0;padding:.8rem 0;border:solid var(--grid);border-width:1px 0;
font-size:.86rem}
dl div{display:flex;gap:.6rem;min-width:0}
dl div.full{grid-column:1/-1}
dt{color:var(--muted);flex:0 0 5.2rem;overflow-wrap:anywhere}
dd{margin:0;min-width:0;overflow-wrap:anywhere}
.trained{margin:1.2rem 0 0;padding:.7rem 1rem .3rem;border:1px solid var(--grid);
border-radius:.4rem}
.trained h2{font-size:1rem;margin:0;padding:0;border:0}
.trained dl{border:0;padding:.5rem 0;grid-auto-flow:dense;
grid-template-columns:repeat(auto-fill,minmax(min(23rem,100%),1fr))}
.trained dt{flex-basis:7.5rem}
.warning{margin:1.2rem 0;padding:.6rem 1rem;border-left:3px solid #d55e00}
.own{margin:.4rem 0 1.2rem;padding:.5rem 0 .1rem 1rem;border-left:3px solid #0072b2;
max-width:52rem}
.own .label{color:var(--muted);font-size:.82rem;margin:0 0 .2rem}
.own ul{margin:.3rem 0 .8rem;padding-left:1.2rem}
.block{margin:.4rem 0 1.8rem}
.caption{font-weight:600;font-size:.95rem;margin:0 0 .45rem;max-width:none}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.86rem;font-variant-numeric:tabular-nums;
border-bottom:1.5px solid var(--ink)}
th{text-align:left;font-weight:600;vertical-align:bottom;border-top:1.5px solid var(--ink);
border-bottom:1px solid var(--ink)}
th,td{padding:.32rem 1.1rem .32rem 0}
td{vertical-align:top;border-bottom:1px solid var(--grid);white-space:nowrap}
td.long{white-space:normal;min-width:12rem}
th:last-child,td:last-child{padding-right:.2rem}
th:first-child{white-space:nowrap}
.r{text-align:right}
.dense{font-size:.8rem}
.dense th,.dense td{padding-right:.8rem}
.note{color:var(--muted);font-size:.82rem;margin:.35rem 0 0;max-width:60rem}
.row{display:flex;flex-wrap:wrap;gap:1.2rem 1.6rem;margin:1rem 0}
figure{margin:0;flex:1 1 20rem;min-width:0;max-width:40rem}
figure.wide{flex-basis:100%;max-width:none}
figure.wide .static svg{min-width:40rem}
svg{display:block;width:100%;height:auto}
figcaption{color:var(--muted);font-size:.82rem;margin-top:.35rem;overflow-wrap:break-word}
pre{margin:0;padding:.8rem 1rem;font-size:.8rem;width:max-content;min-width:100%}
.listing{border:1px solid var(--grid);border-radius:.4rem;max-height:34rem;overflow:auto}
.listing:focus-visible,.scroll:focus-visible{outline:2px solid #0072b2;outline-offset:2px}
.records{columns:16rem;font-size:.86rem;padding-left:1.2rem;overflow-wrap:anywhere}
@media screen and (max-width:48rem){.block .scroll{--shade:rgb(128 128 128/.5);background:
linear-gradient(90deg,var(--paper) 40%,transparent) 0 0/2rem 100% no-repeat local,
linear-gradient(270deg,var(--paper) 40%,transparent) 100% 0/2rem 100% no-repeat local,
linear-gradient(90deg,var(--shade),transparent) 0 0/.7rem 100% no-repeat scroll,
linear-gradient(270deg,var(--shade),transparent) 100% 0/.7rem 100% no-repeat scroll}}
@media (max-width:34rem){body{padding:1.2rem .9rem 2rem}h1{font-size:1.35rem}
.trained div{flex-wrap:wrap;gap:0 .6rem}}
@media print{@page{size:A4;margin:16mm 15mm}body{max-width:none;padding:0;font-size:9.5pt}
.scroll,.listing{overflow:visible;max-height:none;background:none}figure.wide .static svg{min-width:0}
h2,h3,.caption{break-after:avoid}pre{white-space:pre-wrap;width:auto;font-size:7pt;padding:.4rem}
table{font-size:8pt}.dense{font-size:6.5pt}th,td{padding-right:.6rem}
tr,figure,.row,.own{break-inside:avoid}thead{display:table-header-group}p{orphans:2;widows:2}
figure{flex-basis:14rem}}
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

std::string trained_html(const std::vector<Fact>& trained) {
  if (trained.empty()) return "";
  constexpr size_t kLong = 42;  // a longer value takes the width of the box
  std::string html =
      "<aside class=\"trained\" aria-labelledby=\"trained\">\n"
      "<h2 id=\"trained\">What was trained</h2>\n<dl>\n";
  for (const auto& [name, value] : trained) {
    html += fact_html(name, escape_xml(value), display_width(value) > kLong);
  }
  return html + "</dl>\n</aside>\n";
}

std::string words_html(const Words& words, const std::string& author) {
  const auto blocks = blocks_of(words);
  if (blocks.empty()) return "";
  std::string html = fmt::format("<div class=\"own\" role=\"note\">\n<p class=\"label\">{}</p>\n",
                                 escape_xml(notes_label(author)));
  bool in_list = false;
  for (const auto& block : blocks) {
    if (block.item != in_list) html += block.item ? "<ul>\n" : "</ul>\n";
    in_list = block.item;
    html += fmt::format("<{0}>{1}</{0}>\n", block.item ? "li" : "p", escape_xml(block.text));
  }
  return html + (in_list ? "</ul>\n" : "") + "</div>\n";
}

// The caption is outside of what scrolls, so that a narrow screen shows all of it.
std::string table_html(const Table& table, size_t number) {
  std::string html = fmt::format(
      "<div class=\"block\">\n<p class=\"caption\" id=\"table-{0}\">Table {0}. {1}</p>\n"
      "<div class=\"scroll\" role=\"region\" aria-labelledby=\"table-{0}\" tabindex=\"0\">\n"
      "<table{2} aria-labelledby=\"table-{0}\">\n<thead><tr>",
      number, escape_xml(table.title()),
      table.columns().size() > kDenseColumns ? " class=\"dense\"" : "");
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
    for (size_t i = 0; i < row.size(); ++i) {
      const bool is_long = i > 0 && display_width(row[i]) > kLongCell;
      html += (is_long ? "<td class=\"long\">" : open("td", i)) + escape_xml(row[i]) + "</td>";
    }
    html += "</tr>\n";
  }
  html += "</tbody>\n</table>\n</div>\n";
  for (const auto& note : table.notes()) html += "<p class=\"note\">" + escape_xml(note) + "</p>\n";
  return html + "</div>\n";
}

std::string figure_html(const Figure& figure, size_t number) {
  const auto* timeline = std::get_if<Timeline>(&figure.chart);
  const std::string id = fmt::format("figure-{}", number);
  std::string html = fmt::format("<figure{}>\n", timeline != nullptr ? " class=\"wide timeline\""
                                                 : is_wide(figure.chart) ? " class=\"wide\""
                                                                         : "");
  html += fmt::format(
      "<div class=\"static scroll\" role=\"region\" aria-label=\"{}\"{}>\n{}</div>\n",
      escape_xml(chart_title(figure.chart)), is_wide(figure.chart) ? " tabindex=\"0\"" : "",
      render_svg(figure.chart, id, SvgTarget::kInPage));
  if (timeline != nullptr) {
    html += "<script type=\"application/json\">" + timeline_json(*timeline) + "</script>\n";
  }
  return html + fmt::format("<figcaption>Figure {}. {}</figcaption>\n</figure>\n", number,
                            escape_xml(figure.caption));
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

std::string code_html(const Document& document) {
  if (document.code.empty()) return "";
  std::string html = "<section>\n<h2>Code</h2>\n";
  for (const auto& listing : listings_of(document, true)) {
    std::string text;
    for (const auto& line : lines_of(listing.text)) text += escape_xml(line) + "\n";
    html += fmt::format(
        "<h3><a href=\"{0}\">{1}</a></h3>\n<div class=\"listing\" role=\"region\" "
        "aria-label=\"{1}\" tabindex=\"0\"><pre>{2}</pre></div>\n",
        encode_link("code/" + listing.name), escape_xml(listing.name), text);
  }
  const auto others = listings_of(document, false);
  if (!others.empty()) html += "<p>Also run:</p>\n<ul>\n";
  for (const auto& listing : others) {
    html += fmt::format("<li><a href=\"{}\">{}</a></li>\n", encode_link("code/" + listing.name),
                        escape_xml(listing.name));
  }
  return html + (others.empty() ? "" : "</ul>\n") + "</section>\n";
}

std::string records_html(const std::vector<RecordLink>& records) {
  if (records.empty()) return "";
  std::string html =
      "<section>\n<h2>Records</h2>\n<p>Everything measured above is made from these files, one per "
      "run.</p>\n<ul class=\"records\">\n";
  for (const auto& [name, path] : records) {
    html += fmt::format("<li><a href=\"{}\">{}</a></li>\n", encode_link(path), escape_xml(name));
  }
  return html + "</ul>\n</section>\n";
}

bool has_timeline(const Document& document) {
  for (const auto& figure : all_figures(document)) {
    if (std::holds_alternative<Timeline>(figure.chart)) return true;
  }
  return false;
}

}  // namespace

std::string render_html(const Document& document) {
  const std::string title = escape_xml(document.title);
  const bool viewer = has_timeline(document);
  std::string html = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  html += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  html += fmt::format("<title>{}</title>\n<style>{}{}{}{}</style>\n</head>\n<body>\n", title,
                      colour_style(":root"), kPageStyle, svg_style(), viewer ? viewer_style() : "");
  html += fmt::format("<header>\n<h1>{}</h1>\n", title);
  if (!document.author.empty()) {
    html += fmt::format("<p class=\"author\">{}</p>\n", escape_xml(document.author));
  }
  html += facts_html(document) + "</header>\n<main>\n" + trained_html(document.trained);
  if (!document.warning.empty()) {
    html += fmt::format("<p class=\"warning\">{}</p>\n", escape_xml(document.warning));
  }
  html += words_html(document.notes, document.author);
  size_t tables = 0;
  size_t figures = 0;
  for (const auto& section : document.sections) {
    html += "<section>\n";
    if (!section.heading.empty()) html += "<h2>" + escape_xml(section.heading) + "</h2>\n";
    for (const auto& table : section.tables) html += table_html(table, ++tables);
    html += figures_html(section.figures, figures);
    for (const auto& question : section.questions) {
      html += fmt::format("<h3>{}</h3>\n<p>{}</p>\n", escape_xml(numbered(question)),
                          escape_xml(question.answer));
      html += words_html(question.notes, document.author);
    }
    html += words_html(section.notes, document.author) + "</section>\n";
  }
  html += code_html(document) + records_html(document.records) + "</main>\n";
  if (viewer) html += fmt::format("<script>{}</script>\n", viewer_script());
  return html + "</body>\n</html>\n";
}

}  // namespace lockstep
