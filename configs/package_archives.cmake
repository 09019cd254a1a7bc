# package_archives.cmake - writes the archive and the wheel. CPack runs it.
execute_process(COMMAND python3 ${CPACK_MOETRAIN_SOURCE}/configs/package.py ${CPACK_TEMPORARY_DIRECTORY}
    ${CPACK_MOETRAIN_VERSION} ${CPACK_MOETRAIN_EPOCH} ${CPACK_PACKAGE_DIRECTORY} COMMAND_ERROR_IS_FATAL ANY)
