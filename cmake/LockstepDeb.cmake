# Debian packages, by `cpack -G DEB`: liblockstep-core0, liblockstep0, lockstep (the command and the course's programs),
# liblockstep-dev and, where MPI was found, liblockstep-mpi0. scripts/package configures and builds for them.

set(LOCKSTEP_DEB_MAINTAINER "" CACHE STRING "who makes the Debian packages: Name <address>")
if(NOT BUILD_SHARED_LIBS OR LOCKSTEP_TORCH_ROOT OR NOT LOCKSTEP_GLOO OR LOCKSTEP_BLAS_RPATH
    OR NOT CMAKE_INSTALL_PREFIX STREQUAL "/usr" OR NOT LOCKSTEP_DEB_MAINTAINER)
  message(FATAL_ERROR "Debian packages hold shared libraries in /usr, linked with Debian's libtorch and Gloo, and name "
    "their maintainer.\n"
    "help: run scripts/package, which configures with the options that this needs")
endif()

set(LOCKSTEP_DEB_RELEASE 1)
set(packaging "${PROJECT_SOURCE_DIR}/packaging/debian")
set(made "${PROJECT_BINARY_DIR}/debian")

# Each package has its changelog and its license in share/doc. SOURCE_DATE_EPOCH makes the date repeatable.
string(TIMESTAMP changelog_date "%a, %d %b %Y %H:%M:%S +0000" UTC)
configure_file("${packaging}/changelog.in" "${made}/changelog.Debian" @ONLY)
configure_file("${PROJECT_SOURCE_DIR}/CHANGELOG.md" "${made}/changelog" COPYONLY)
execute_process(COMMAND gzip -9nf "${made}/changelog.Debian" "${made}/changelog" COMMAND_ERROR_IS_FATAL ANY)

# lockstep_deb(<component> <package> <section> DEPENDS <packages> SUMMARY <line> TEXT <lines>)
set(CPACK_COMPONENTS_ALL "")
macro(lockstep_deb component package section)
  cmake_parse_arguments(deb "" "DEPENDS;RECOMMENDS;SUMMARY;TEXT" "" ${ARGN})
  list(APPEND CPACK_COMPONENTS_ALL ${component})
  string(TOUPPER ${component} key)
  set(CPACK_DEBIAN_${key}_PACKAGE_NAME ${package})
  set(CPACK_DEBIAN_${key}_PACKAGE_SECTION ${section})
  set(CPACK_DEBIAN_${key}_PACKAGE_DEPENDS "${deb_DEPENDS}")
  set(CPACK_DEBIAN_${key}_PACKAGE_RECOMMENDS "${deb_RECOMMENDS}")
  set(CPACK_DEBIAN_${key}_DESCRIPTION "${deb_SUMMARY}\n${deb_TEXT}")
  install(FILES "${packaging}/copyright" "${made}/changelog.Debian.gz"
    DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/${package}" COMPONENT ${component})
endmacro()

set(same "(= ${PROJECT_VERSION}-${LOCKSTEP_DEB_RELEASE})")
set(core liblockstep-core${LOCKSTEP_SOVERSION})
set(library liblockstep${LOCKSTEP_SOVERSION})
lockstep_deb(lockstep_core_library ${core} libs
  SUMMARY "parallel training for libtorch - library without libtorch"
  TEXT "Pipeline schedules, collectives between processes, and the launcher of ranks,
 as far as they need no libtorch. It holds the module that uses Gloo for ranks
 on several hosts.")
# Only the OpenMP build of OpenBLAS keeps the threads of a rank inside its budget.
lockstep_deb(lockstep_library ${library} libs
  DEPENDS "${core} ${same}, libopenblas0-openmp"
  SUMMARY "parallel training for libtorch - library"
  TEXT "DistributedDataParallel, DataParallel, pipelines, mixed precision and fused
 optimizers for C++ programs that train with libtorch on several processes,
 devices or hosts.")
if(LOCKSTEP_MPI)
  lockstep_deb(lockstep_mpi_module liblockstep-mpi${LOCKSTEP_SOVERSION} libs
    DEPENDS "${core} ${same}"
    RECOMMENDS "openmpi-bin"
    SUMMARY "parallel training for libtorch - ranks over MPI"
    TEXT "The module that liblockstep-core${LOCKSTEP_SOVERSION} loads when ranks that MPI started are to
 communicate over MPI, which reaches the networks of clusters.")
endif()
lockstep_deb(lockstep_programs lockstep science
  DEPENDS "${library} ${same}, ${core} ${same}, fonts-dejavu-core"
  RECOMMENDS "liblockstep-dev"
  SUMMARY "parallel training for libtorch - launcher, monitor and labs"
  TEXT "The command lockstep starts programs as several ranks, on one host or more,
 shows what they do, checks the machine, and runs the labs of a course on
 parallel training, with reports as HTML and PDF.")
lockstep_deb(lockstep_development liblockstep-dev libdevel
  DEPENDS "${library} ${same}, ${core} ${same}, libtorch-dev, nlohmann-json3-dev"
  RECOMMENDS "lockstep"
  SUMMARY "parallel training for libtorch - development files"
  TEXT "Headers, and the files by which CMake and pkg-config find the libraries, for
 C++ programs that train with libtorch on several processes, devices or hosts.")
install(FILES "${made}/changelog.gz" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

# Manual pages are compressed, and completion for zsh is where Debian's zsh looks for it, once all are laid down.
install(CODE [[
  set(share "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/share")
  file(GLOB pages "${share}/man/man1/*.1")
  if(pages)
    execute_process(COMMAND gzip -9nf ${pages} COMMAND_ERROR_IS_FATAL ANY)
  endif()
  if(EXISTS "${share}/zsh/site-functions")
    file(RENAME "${share}/zsh/site-functions" "${share}/zsh/vendor-completions")
  endif()]] COMPONENT lockstep_programs)

# Packages that link a library depend on its exact version. A trigger runs ldconfig.
foreach(component lockstep_core_library lockstep_library)
  string(TOUPPER ${component} key)
  set(package ${CPACK_DEBIAN_${key}_PACKAGE_NAME})
  string(REGEX REPLACE "${LOCKSTEP_SOVERSION}$" "" name ${package})
  file(WRITE "${made}/${package}/shlibs" "${name} ${LOCKSTEP_SOVERSION} ${package} ${same}\n")
  set(CPACK_DEBIAN_${key}_PACKAGE_CONTROL_EXTRA "${packaging}/triggers" "${made}/${package}/shlibs")
endforeach()
set(CPACK_GENERATOR DEB)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX "${CMAKE_INSTALL_PREFIX}")
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
  OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_PACKAGE_CONTACT "${LOCKSTEP_DEB_MAINTAINER}")
set(CPACK_DEBIAN_PACKAGE_RELEASE ${LOCKSTEP_DEB_RELEASE})
set(CPACK_DEBIAN_PACKAGE_SOURCE lockstep)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS "${PROJECT_BINARY_DIR}/lib")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
