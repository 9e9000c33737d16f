# What `cmake --install` lays down: headers, both libraries, the programs, and packages for find_package(lockstep) and
# pkg-config. No path of this machine is in them, except that of a libtorch that is not the system's.

include(CMakePackageConfigHelpers)

# Whether the system's loader, compiler and pkg-config look into this prefix by themselves.
set(system_prefix FALSE)
if(CMAKE_INSTALL_FULL_LIBDIR IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
  set(system_prefix TRUE)
endif()

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/lockstep")
set_target_properties(lockstep_core PROPERTIES EXPORT_NAME core)

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/lockstep" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  COMPONENT lockstep_development)

# lockstep_install_library(<target> <export set> <component>)
function(lockstep_install_library target export component)
  if(BUILD_SHARED_LIBS AND NOT system_prefix)
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN")
  endif()
  install(TARGETS ${target} EXPORT ${export}
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT lockstep_development
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT ${component} NAMELINK_COMPONENT lockstep_development)
endfunction()
lockstep_install_library(lockstep_core lockstepCoreTargets lockstep_core_library)
lockstep_install_library(lockstep lockstepTargets lockstep_library)
if(LOCKSTEP_CUDA AND NOT BUILD_SHARED_LIBS)
  lockstep_install_library(lockstep_cuda lockstepTargets lockstep_library)
endif()
if(LOCKSTEP_GLOO)
  install(TARGETS lockstep_gloo LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}/lockstep" COMPONENT lockstep_core_library)
endif()

if(LOCKSTEP_MPI)
  install(TARGETS lockstep_mpi LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}/lockstep" COMPONENT lockstep_mpi_module)
endif()

# Programs find the shared libraries wherever the prefix is moved to. The system's loader needs no run path.
function(lockstep_install_program target folder)
  if(BUILD_SHARED_LIBS AND NOT system_prefix)
    file(RELATIVE_PATH to_libraries "${CMAKE_INSTALL_PREFIX}/${folder}" "${CMAKE_INSTALL_FULL_LIBDIR}")
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN/${to_libraries}")
  endif()
  install(TARGETS ${target} RUNTIME DESTINATION "${folder}")
endfunction()

# Only the command has a name of its own in bin; it finds the others (cli/child.cpp).
set(programs_dir "${CMAKE_INSTALL_LIBEXECDIR}/lockstep")
if(LOCKSTEP_BUILD_PROGRAMS)
  lockstep_install_program(lockstep-cli "${CMAKE_INSTALL_BINDIR}")
  lockstep_install_program(lockstep-probe "${programs_dir}")
endif()
if(LOCKSTEP_BUILD_EXAMPLES)
  foreach(program ${LOCKSTEP_COURSE_PROGRAMS} verify_models)
    lockstep_install_program(${program} "${programs_dir}")
  endforeach()
endif()

# find_package
foreach(export lockstepCoreTargets lockstepTargets)
  install(EXPORT ${export} NAMESPACE lockstep:: DESTINATION "${package_dir}" COMPONENT lockstep_development)
endforeach()
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/lockstepConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/lockstepConfig.cmake" INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/lockstepConfig.cmake" "${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/LockstepTorch.cmake" "${PROJECT_SOURCE_DIR}/cmake/LockstepCuda.cmake"
  DESTINATION "${package_dir}" COMPONENT lockstep_development)

# pkg-config: a prefix of one's own is found from the file's place, so that it may be moved.
set(pc_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
set(pc_prefix "${CMAKE_INSTALL_PREFIX}")
if(NOT system_prefix)
  file(RELATIVE_PATH pc_to_prefix "${CMAKE_INSTALL_PREFIX}/${pc_dir}" "${CMAKE_INSTALL_PREFIX}")
  string(REGEX REPLACE "/$" "" pc_prefix "\${pcfiledir}/${pc_to_prefix}")
endif()
set(pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
set(pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
set(pc_core_libs "-pthread")
if(NOT BUILD_SHARED_LIBS)  # the program links what a shared library would
  string(APPEND pc_core_libs " -lcrypto -ldl")
  if(LOCKSTEP_GLOO)
    string(APPEND pc_core_libs " -Wl,-rpath,\${libdir}/lockstep")
  endif()
endif()
set(pc_torch_libs "-ltorch -ltorch_cpu -lc10")
if(LOCKSTEP_CUDA)  # without --no-as-needed the linker drops libtorch_cuda, and with it every CUDA kernel
  set(pc_torch_libs "-Wl,--push-state,--no-as-needed -ltorch_cuda -Wl,--pop-state -lc10_cuda ${pc_torch_libs}")
  if(NOT BUILD_SHARED_LIBS)
    get_target_property(cuda_libraries lockstep::cuda_runtime INTERFACE_LINK_LIBRARIES)
    foreach(library IN LISTS cuda_libraries)
      get_filename_component(folder "${library}" DIRECTORY)
      string(APPEND pc_torch_libs " ${library} -Wl,-rpath,${folder}")
    endforeach()
    set(pc_torch_libs "-llockstep_cuda ${pc_torch_libs}")
  endif()
endif()
if(LOCKSTEP_TORCH_ROOT)
  set(pc_torch_variables "torch=${LOCKSTEP_TORCH_ROOT}\n")
  set(pc_torch_cflags "-isystem \${torch}/include/torch/csrc/api/include -isystem \${torch}/include")
  set(first_libs "-Wl,--push-state,--no-as-needed,-lstdc++,--pop-state")  # see lockstep_find_torch
  set(pc_torch_libs "${first_libs} -L\${torch}/lib -Wl,-rpath,\${torch}/lib ${pc_torch_libs}")
else()
  set(pc_torch_variables "")
  set(pc_torch_cflags "-isystem /usr/include/torch/csrc/api/include")
endif()
foreach(file lockstep-core.pc lockstep.pc)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/${file}.in" "${PROJECT_BINARY_DIR}/${file}" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/${file}" DESTINATION "${pc_dir}" COMPONENT lockstep_development)
endforeach()

install(FILES "${PROJECT_SOURCE_DIR}/README.md" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
if(NOT LOCKSTEP_DEB)  # Debian's packages name the license in a file of their own
  install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
endif()
install(DIRECTORY "${PROJECT_SOURCE_DIR}/docs" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

# For programs of your own: the course's helpers and every example, and the package in the build folder too, so that
# `lockstep new` works before anything is installed.
if(LOCKSTEP_BUILD_EXAMPLES)
  file(GLOB examples CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/examples/*.cpp")
  install(FILES ${examples} DESTINATION "${CMAKE_INSTALL_DATADIR}/lockstep/examples")
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/examples/course" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/lockstep_course"
    COMPONENT lockstep_development FILES_MATCHING PATTERN "*.hpp")
  lockstep_install_library(course lockstepTargets lockstep_library)
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/share/lockstep")
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/examples" "${PROJECT_BINARY_DIR}/share/lockstep/examples" SYMBOLIC)
endif()
foreach(export lockstepCoreTargets lockstepTargets)
  export(EXPORT ${export} NAMESPACE lockstep:: FILE "${PROJECT_BINARY_DIR}/${export}.cmake")
endforeach()
foreach(module LockstepTorch LockstepCuda)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/${module}.cmake" "${PROJECT_BINARY_DIR}/${module}.cmake" COPYONLY)
endforeach()
