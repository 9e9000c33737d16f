# Target docs: the pages and the public headers as HTML, in the build folder's docs/html. Needs doxygen, and python3 for
# cmake/doxygen_filter.py.

find_program(LOCKSTEP_DOXYGEN doxygen)
find_program(LOCKSTEP_DOXYGEN_PYTHON python3)
if(LOCKSTEP_DOXYGEN AND LOCKSTEP_DOXYGEN_PYTHON)
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/Doxyfile" CONTENT
    "@INCLUDE = ${PROJECT_SOURCE_DIR}/Doxyfile\nOUTPUT_DIRECTORY = ${PROJECT_BINARY_DIR}/docs\n")
  add_custom_target(docs
    COMMAND "${CMAKE_COMMAND}" -E make_directory "${PROJECT_BINARY_DIR}/docs"
    COMMAND "${LOCKSTEP_DOXYGEN}" "${PROJECT_BINARY_DIR}/Doxyfile"
    COMMAND "${CMAKE_COMMAND}" -E echo "docs: ${PROJECT_BINARY_DIR}/docs/html/index.html"
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}" VERBATIM)
endif()
