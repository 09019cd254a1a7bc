# commit.cmake - the version of the sources in SOURCE. Sets
#   number     X.Y.Z of MT_VERSION in kernels/base.h
#   version    number at a commit with the tag vX.Y.Z; else number-dev+gCOMMIT, or number in a source archive
#   commit     12 digits, with +changes when files differ from it
#   epoch      seconds of the commit, or of the files of a source archive; SOURCE_DATE_EPOCH overrides it
# With OUT it also writes version and commit to the C file OUT, unless the file has them already.
#   cmake -DSOURCE=DIR -DOUT=FILE -P commit.cmake
function(describe result)
    execute_process(COMMAND git -C "${SOURCE}" ${ARGN} OUTPUT_VARIABLE out OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(${result} "${out}" PARENT_SCOPE)
endfunction()

file(STRINGS "${SOURCE}/kernels/base.h" number REGEX "define MT_VERSION")
string(REGEX MATCH "[0-9]+[.][0-9]+[.][0-9]+" number "${number}")
set(version "${number}")
set(commit "none recorded (built from a source archive)")
file(TIMESTAMP "${SOURCE}/kernels/base.h" epoch %s UTC)
if(EXISTS "${SOURCE}/.git")
    describe(commit describe --always --dirty=+changes --abbrev=12 --exclude=*)
    describe(tag describe --exact-match --match=v[0-9]* --dirty=+changes)
    describe(epoch log -1 --format=%ct)
    if(NOT commit)
        set(commit unknown)
    endif()
    if(tag MATCHES "^v[0-9.]+$" AND NOT tag STREQUAL "v${number}")
        message(FATAL_ERROR "this commit has the tag ${tag}, but MT_VERSION in kernels/base.h is ${number}: "
            "set one as the other")
    elseif(NOT tag STREQUAL "v${number}")
        string(REPLACE "+" "." version "${commit}")
        set(version "${number}-dev+g${version}")
    endif()
endif()
if(DEFINED ENV{SOURCE_DATE_EPOCH})
    set(epoch $ENV{SOURCE_DATE_EPOCH})
endif()

if(DEFINED OUT)
    set(content "extern const char build_version[], build_commit[];\n")
    string(APPEND content "const char build_version[] = \"${version}\", build_commit[] = \"${commit}\";\n")
    set(before "")
    if(EXISTS "${OUT}")
        file(READ "${OUT}" before)
    endif()
    if(NOT content STREQUAL before)
        file(WRITE "${OUT}" "${content}")
    endif()
endif()
