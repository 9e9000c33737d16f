# One CTest test for each GoogleTest suite of an executable: libtorch is loaded once per suite and not once per test.
# Each suite leaves its results in <build>/tests/results/<executable>.<suite>.xml, where scripts/test counts them.

# lockstep_discover_suites(<target> LABEL <label> TIMEOUT <seconds> [ENVIRONMENT <variables>] [RUNNER <command>])
# A runner gets the executable and its flags as arguments.
function(lockstep_discover_suites target)
  cmake_parse_arguments(arg "" "LABEL;TIMEOUT" "ENVIRONMENT;RUNNER" ${ARGN})
  set(list_file "${CMAKE_CURRENT_BINARY_DIR}/${target}_suites.cmake")
  if(NOT EXISTS "${list_file}")
    file(WRITE "${list_file}" "")  # CTest reads it even where this executable is not built
  endif()
  add_custom_command(TARGET ${target} POST_BUILD VERBATIM BYPRODUCTS "${list_file}"
    COMMAND "${CMAKE_COMMAND}" "-Dexecutable=$<TARGET_FILE:${target}>" "-Dname=${target}" "-Dlabel=${arg_LABEL}"
      "-Drunner=${arg_RUNNER}" "-Denvironment=${arg_ENVIRONMENT}" "-Dtimeout=${arg_TIMEOUT}"
      "-Dresults=${CMAKE_BINARY_DIR}/tests/results" "-Doutput=${list_file}"
      -P "${PROJECT_SOURCE_DIR}/cmake/ListSuites.cmake")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${list_file}")
endfunction()
