# Writes OUT, which defines course_source(): the texts of SOURCES by the names of their files.

set(entries "")
foreach(source IN LISTS SOURCES)
  get_filename_component(name "${source}" NAME_WE)
  file(READ "${source}" text)
  string(APPEND entries "    {\"${name}\", R\"course(${text})course\"},\n")
endforeach()
file(WRITE "${OUT}" "#include <map>

#include \"cli/lab/lab.hpp\"

namespace lockstep::cli {

SourceListing course_source(const std::string& program) {
  static const std::map<std::string, std::string> kSources = {
${entries}  };
  return {program + \".cpp\", kSources.at(program)};
}

}  // namespace lockstep::cli
")
