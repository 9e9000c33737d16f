# Runs after an executable was linked: writes the add_test() of each of its suites. See LockstepSuites.cmake.
execute_process(COMMAND "${executable}" --gtest_list_tests OUTPUT_VARIABLE listed RESULT_VARIABLE status TIMEOUT 120)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${executable} --gtest_list_tests ended with ${status}")
endif()

string(REGEX MATCHALL "(^|\n)[^ \n]+\\." suites "${listed}")
set(text "")
foreach(word ${runner})
  string(APPEND command "[==[${word}]==] ")
endforeach()
foreach(suite ${suites})
  string(STRIP "${suite}" suite)
  string(REPLACE "/" "-" file "${name}.${suite}xml")
  string(REGEX REPLACE "\\.$" "" test "${name}.${suite}")
  string(APPEND text "add_test([==[${test}]==] ${command}[==[${executable}]==] [==[--gtest_filter=${suite}*]==]"
    " [==[--gtest_output=xml:${results}/${file}]==])\n"
    "set_tests_properties([==[${test}]==] PROPERTIES LABELS ${label} TIMEOUT ${timeout} SKIP_RETURN_CODE 77")
  if(environment)
    string(APPEND text " ENVIRONMENT [==[${environment}]==]")
  endif()
  string(APPEND text ")\n")
endforeach()
file(WRITE "${output}" "${text}")
