# commit.cmake - writes the commit of SOURCE to the C file OUT; does not touch OUT when the commit is the same.
#   cmake -DSOURCE=DIR -DOUT=FILE -P commit.cmake
set(text "none recorded (built from a source archive)")
if(EXISTS "${SOURCE}/.git")
    execute_process(COMMAND git -C "${SOURCE}" describe --always --dirty=+changes --abbrev=12 --exclude=*
        OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed AND described)
        set(text "${described}")
    endif()
endif()
set(content "extern const char build_commit[];\nconst char build_commit[] = \"${text}\";\n")
set(before "")
if(EXISTS "${OUT}")
    file(READ "${OUT}" before)
endif()
if(NOT content STREQUAL before)
    file(WRITE "${OUT}" "${content}")
endif()
