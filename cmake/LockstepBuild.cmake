# How everything here is compiled: warnings, sanitizers, ccache.

option(LOCKSTEP_ASSERTIONS "check the standard library's preconditions" OFF)
set(LOCKSTEP_SANITIZE "" CACHE STRING "sanitizers, as for -fsanitize=; empty: none")
option(LOCKSTEP_FUZZ "build the fuzz targets as libFuzzer programs; needs clang" OFF)
if(LOCKSTEP_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "LOCKSTEP_FUZZ=ON, but ${CMAKE_CXX_COMPILER} has no libFuzzer.\n"
      "help: -DCMAKE_CXX_COMPILER=clang++ in a new build folder (cmake --preset fuzz), or leave it off: fuzz_tests needs no clang")
  endif()
  set(LOCKSTEP_SANITIZE fuzzer-no-link,address,undefined)
endif()

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# -fPIC for all, executables too: one precompiled header serves only code of one kind.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fPIC>" "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fPIC>")
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")

# A translation unit with <torch/torch.h> takes 10 to 20 seconds. ccache accepts a precompiled
# header only when told that its time stamps and macros do not matter.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    "${CMAKE_COMMAND}" -E env
    "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
    "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" "CCACHE_NOHASHDIR=true" "${CCACHE_PROGRAM}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CMAKE_CXX_COMPILER_LAUNCHER}")
endif()

# lockstep_unity(<target>): compiles the files of each folder together, in groups of about 2,500 lines, which takes less than
# half the processor time of one file after the other. So no two files of a folder may define the same name in an
# anonymous namespace. The preset dev compiles each file alone, which shows a missing include.
option(LOCKSTEP_UNITY "compile a folder's files together" ON)
function(lockstep_unity target)
  if(NOT LOCKSTEP_UNITY)
    return()
  endif()
  set(limit 100000)  # bytes
  get_target_property(sources ${target} SOURCES)
  set(last_folder "")
  foreach(source ${sources})
    get_filename_component(path "${source}" ABSOLUTE)
    get_filename_component(folder "${path}" DIRECTORY)
    file(SIZE "${path}" bytes)
    math(EXPR filled "${filled} + ${bytes}")
    if(NOT folder STREQUAL last_folder OR filled GREATER limit)
      math(EXPR group "${group} + 1")
      set(filled ${bytes})
      set(last_folder "${folder}")
    endif()
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "group${group}")
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

add_library(lockstep_flags INTERFACE)
set(warnings -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor)
target_compile_options(lockstep_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${warnings}>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # -fpch-preprocess is what ccache needs to see through a precompiled header; GCC 12 reports overlaps
  # inside std::string that cannot happen (its bug 105329).
  target_compile_options(lockstep_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess;-Wno-restrict>")
endif()
# Without NDEBUG, classes of libtorch's headers (at::RecordFunction) have members that its binaries, built with NDEBUG,
# do not have. So a debug build keeps it, and checks the standard library's preconditions instead.
target_compile_definitions(lockstep_flags INTERFACE NDEBUG)
if(LOCKSTEP_ASSERTIONS)
  target_compile_definitions(lockstep_flags INTERFACE _GLIBCXX_ASSERTIONS)
endif()
if(LOCKSTEP_SANITIZE)
  target_compile_options(lockstep_flags INTERFACE
    "-fsanitize=${LOCKSTEP_SANITIZE}" -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(lockstep_flags INTERFACE "-fsanitize=${LOCKSTEP_SANITIZE}")
endif()

# lockstep_compile_with(<target> <libraries>): compiles with the headers and flags of libraries that only its .cpp files
# use. Unlike a private link of a static library this is no dependency of the installed package.
function(lockstep_compile_with target)
  foreach(library ${ARGN})
    target_include_directories(${target} SYSTEM PRIVATE "$<TARGET_PROPERTY:${library},INTERFACE_INCLUDE_DIRECTORIES>")
    target_compile_definitions(${target} PRIVATE "$<TARGET_PROPERTY:${library},INTERFACE_COMPILE_DEFINITIONS>")
    target_compile_options(${target} PRIVATE "$<TARGET_PROPERTY:${library},INTERFACE_COMPILE_OPTIONS>")
  endforeach()
endfunction()
