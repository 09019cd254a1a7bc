# package_files.cmake - adds the SBOM and the licences to the files of a package. CPack runs it.
set(doc ${CPACK_TEMPORARY_DIRECTORY}${CPACK_MOETRAIN_PREFIX}/share/doc/moetrain)
execute_process(COMMAND python3 ${CPACK_MOETRAIN_SOURCE}/configs/sbom.py --map ${CPACK_MOETRAIN_MAP}
    --version ${CPACK_MOETRAIN_VERSION} --epoch ${CPACK_MOETRAIN_EPOCH} --cuda=${CPACK_MOETRAIN_CUDA}
    --out ${doc} COMMAND_ERROR_IS_FATAL ANY)
# A .deb keeps the modes of files and folders, which would otherwise depend on the user's umask.
file(CHMOD ${doc}/copyright ${doc}/moetrain.spdx.json PERMISSIONS OWNER_READ OWNER_WRITE GROUP_READ WORLD_READ)
file(CHMOD_RECURSE ${CPACK_TEMPORARY_DIRECTORY} DIRECTORY_PERMISSIONS
    OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
