# package.cmake - `cmake --build BUILD --target package` writes an archive, a wheel and, with dpkg-dev and file, a .deb.
# CPack includes this file again before it runs each generator, with the variables CPACK_* that the first inclusion set.
if(NOT DEFINED CPACK_MOETRAIN_SOURCE) # included by CMakeLists.txt
    find_program(shlibdeps dpkg-shlibdeps)
    find_program(file_program file) # CPack needs it to find the libraries of a .deb
    set(CPACK_GENERATOR External)
    if(shlibdeps AND file_program)
        list(APPEND CPACK_GENERATOR DEB)
    endif()
    set(CPACK_MOETRAIN_SOURCE ${CMAKE_SOURCE_DIR})
    set(CPACK_MOETRAIN_COMMIT ${commit_file})
    set(CPACK_MOETRAIN_MAP ${CMAKE_BINARY_DIR}/moetrain.map)
    set(CPACK_MOETRAIN_CUDA ${CUDAToolkit_VERSION})
    set(CPACK_PROJECT_CONFIG_FILE ${CMAKE_CURRENT_LIST_FILE})
    set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_LIST_DIR}/package_files.cmake)
    set(CPACK_EXTERNAL_PACKAGE_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/package_archives.cmake)
    set(CPACK_EXTERNAL_ENABLE_STAGING ON)
    set(CPACK_VERBATIM_VARIABLES ON)
    set(CPACK_STRIP_FILES ON)
    set(CPACK_PACKAGE_CONTACT "the moetrain developers")
    set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "LoRA fine-tuning of mixture-of-experts models with 4-bit experts")
    set(CPACK_DEBIAN_PACKAGE_SECTION science)
    set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
    # The program loads these when it needs them: libcurl for downloads, libmicrohttpd for serve, the libraries of CUDA
    # for GPUs.
    set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "libcurl4 | libcurl3-gnutls, ca-certificates")
    set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libmicrohttpd12 | libmicrohttpd12t64")
    if(CUDAToolkit_VERSION)
        string(REGEX REPLACE "^([0-9]+)[.]([0-9]+).*" "\\1-\\2" cuda ${CUDAToolkit_VERSION})
        string(APPEND CPACK_DEBIAN_PACKAGE_SUGGESTS ", libcublas-${cuda}, libnccl2")
    endif()
    include(CPack)
    return()
endif()

set(SOURCE ${CPACK_MOETRAIN_SOURCE})
include(${SOURCE}/configs/commit.cmake)
file(READ ${CPACK_MOETRAIN_COMMIT} version) # of the executable
string(REGEX REPLACE ".*build_version.. = \"([^\"]+)\".*" "\\1" version "${version}")
set(ENV{SOURCE_DATE_EPOCH} ${epoch})
if(CPACK_MOETRAIN_CUDA) # as PyTorch's versions name it
    string(REGEX MATCH "^[0-9]+" cuda ${CPACK_MOETRAIN_CUDA})
    if(version MATCHES "[+]")
        string(APPEND version ".cuda${cuda}")
    else()
        string(APPEND version "+cuda${cuda}")
    endif()
endif()
set(CPACK_MOETRAIN_VERSION ${version})
set(CPACK_MOETRAIN_EPOCH ${epoch})
set(CPACK_PACKAGE_VERSION ${version})
string(REPLACE "-dev" "~dev" CPACK_DEBIAN_PACKAGE_VERSION ${version}) # sorts before the release
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_PACKAGE_FILE_NAME moetrain) # of files in between
if(CPACK_GENERATOR STREQUAL DEB)
    set(CPACK_MOETRAIN_PREFIX /usr)
endif()
