# What `cmake --install` lays down: headers, both libraries, the programs, and a package for find_package(lockstep).
# The package names the libtorch lockstep was built with: a program must not mix in another.

include(CMakePackageConfigHelpers)

set_target_properties(lockstep_core PROPERTIES EXPORT_NAME core)
set_target_properties(lockstep_torch PROPERTIES EXPORT_NAME torch)
set_target_properties(lockstep_flags PROPERTIES EXPORT_NAME flags)

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/lockstep" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS lockstep lockstep_core lockstep_torch lockstep_flags EXPORT lockstepTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
if(LOCKSTEP_BUILD_PROGRAMS)
  install(TARGETS lockstep-cli lockstep-probe RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()
if(LOCKSTEP_BUILD_EXAMPLES)
  install(TARGETS ${LOCKSTEP_COURSE_PROGRAMS} RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()
if(LOCKSTEP_CUDA)
  install(TARGETS lockstep_cuda lockstep_cuda_runtime EXPORT lockstepTargets
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()
if(LOCKSTEP_GLOO)
  install(TARGETS lockstep_gloo LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}/lockstep")
endif()

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/lockstep")
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION "${package_dir}")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/lockstepConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/lockstepConfig.cmake" INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/lockstepConfig.cmake" "${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake"
  DESTINATION "${package_dir}")

# For programs of your own: the course's helpers and every example, and the package in the build folder too, so that
# `lockstep new` works before anything is installed.
if(LOCKSTEP_BUILD_EXAMPLES)
  file(GLOB examples CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/examples/*.cpp")
  install(FILES ${examples} DESTINATION "${CMAKE_INSTALL_DATADIR}/lockstep/examples")
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/examples/course" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/lockstep_course"
    FILES_MATCHING PATTERN "*.hpp")
  install(TARGETS course EXPORT lockstepTargets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/share/lockstep")
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/examples" "${PROJECT_BINARY_DIR}/share/lockstep/examples" SYMBOLIC)
endif()
export(EXPORT lockstepTargets NAMESPACE lockstep:: FILE "${PROJECT_BINARY_DIR}/lockstepTargets.cmake")
